"""An invented encyclopedia, its questions, and a tiny policy trained on them: every part of the pipeline in minutes."""

from __future__ import annotations

from pathlib import Path

from reasonrag.core.settings import DEMO_FORMATS, demo_folder
from reasonrag.demo.world import World, demo_corpus, demo_questions, make_world

__all__ = ["World", "demo_corpus", "demo_questions", "make_world", "policy_folder", "stream_policy_folder"]


def policy_folder() -> Path:
    """The folder of the shipped policy, as transformers loads it."""
    return demo_folder()


def stream_policy_folder() -> Path:
    """The folder of the shipped policy that speaks the four formats of one growing turn."""
    return demo_folder(DEMO_FORMATS[0])
