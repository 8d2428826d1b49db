"""An invented encyclopedia, its questions, and a tiny policy trained on them: every part of the pipeline in minutes."""

from __future__ import annotations

from pathlib import Path


def policy_folder() -> Path:
    """The folder of the shipped policy, as transformers loads it."""
    return Path(__file__).parent / "policy"
