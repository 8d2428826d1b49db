"""`dpo train`, `sft train` and `rl train`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.shell import error_console, log_plainly, this_command
from reasonrag.core.errors import Interrupted
from reasonrag.core.text import printable
from reasonrag.online_rl.settings import RLSettings
from reasonrag.training.settings import DPOSettings, SFTSettings

if TYPE_CHECKING:
    from reasonrag.training.run import TrainingRun


def dpo(settings: DPOSettings, out: Path) -> int:
    """Train on pairs; returns the exit code."""
    from reasonrag.dpo.train import DPORun

    return _train(DPORun(settings, out, log=_print_line))


def sft(settings: SFTSettings, out: Path) -> int:
    """Train on chosen steps; returns the exit code."""
    from reasonrag.dpo.train import SFTRun

    return _train(SFTRun(settings, out, log=_print_line))


def rl(settings: RLSettings, out: Path) -> int:
    """Train on rollouts; returns the exit code."""
    from reasonrag.online_rl.train import OnlineRLRun

    return _train(OnlineRLRun(settings, out, log=_print_line))


def _print_line(line: str) -> None:
    click.echo(printable(line), err=True)


def _train(training_run: TrainingRun[Any]) -> int:
    log_plainly()
    try:
        summary = training_run.run()
    except Interrupted as stopped:
        error_console().print(f"{stopped}. Go on with:\n  {this_command()}")
        return 128 + (stopped.number or signal.SIGINT)
    if summary:  # the other processes of a launch have nothing to say
        print(f"policy: {training_run.out}")
    return 0
