"""`dpo train`, `sft train` and `rl train`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.shell import error_console, log_plainly, this_command
from reasonrag.core.errors import Interrupted
from reasonrag.core.text import printable
from reasonrag.online_rl.settings import RLSettings
from reasonrag.training.settings import DPOSettings, SFTSettings


def dpo(settings: DPOSettings, out: Path) -> int:
    """Train on pairs; returns the exit code."""
    from reasonrag.dpo.train import train

    return _train(lambda log: train(settings, out, log=log), out)


def sft(settings: SFTSettings, out: Path) -> int:
    """Train on chosen steps; returns the exit code."""
    from reasonrag.dpo.sft import train

    return _train(lambda log: train(settings, out, log=log), out)


def rl(settings: RLSettings, out: Path) -> int:
    """Train on rollouts; returns the exit code."""
    from reasonrag.online_rl.train import train

    return _train(lambda log: train(settings, out, log=log), out)


def _train(train: Callable[[Callable[[str], None]], dict[str, Any]], out: Path) -> int:
    log_plainly()
    try:
        summary = train(lambda line: click.echo(printable(line), err=True))
    except Interrupted as stopped:
        error_console().print(f"{stopped}. Go on with:\n  {this_command()}")
        return 128 + (stopped.number or signal.SIGINT)
    if summary:  # the other processes of a launch have nothing to say
        print(f"policy: {out}")
    return 0
