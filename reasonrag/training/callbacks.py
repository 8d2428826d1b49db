"""What is watched while TRL trains: whole checkpoints, numbers that are none, signals, and a line now and then."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.training.checkpoints import mark_complete, remove_old


class Stop:
    """Whether a signal has asked to end after the current step. `number` is the signal, 0 before one came."""

    def __init__(self) -> None:
        self.number = 0


@contextlib.contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask to stop, once; the second one does what it did before. Elsewhere than in the main thread
    signals cannot be taken, and none are.
    """
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.number = number
        for each in numbers:
            signal.signal(each, before[each] or signal.SIG_DFL)
        say("stopping after this step; once more stops now, back to the last checkpoint")

    try:
        for number in numbers:
            signal.signal(number, ask)
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number] or signal.SIG_DFL)


class Clock:
    """Seconds of a training, those before a kill included."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._started = time.monotonic()

    @property
    def here(self) -> float:
        """Seconds of this process."""
        return time.monotonic() - self._started

    @property
    def seconds(self) -> float:
        """Of the whole training."""
        return self._before + self.here


class Guard:
    """Laid over a trainer: checkpoints that count only when whole, and no step on numbers that are none.

    `clock` and `keep` (checkpoints) are to be set before `train`. `collapse` says why a training has ended itself.
    """

    clock: Clock
    keep: int
    collapse: str = ""
    accelerator: Any
    args: Any
    state: Any

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: the folder says by training.json how it was made."""

    def _send_telemetry(self) -> None:
        """Nobody is told."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; ends the training, on all processes alike, where the loss of any is no number."""
        import torch

        parent: Any = super()
        loss = parent.training_step(*args, **kwargs)
        finite = torch.isfinite(loss.detach()).all().reshape(1)
        if not bool(self.accelerator.gather(finite).all()):
            raise self._not_finite("the loss")
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; before the optimizer uses the gradient. With fp16 the scaler skips such steps itself."""
        import torch

        parent: Any = super()
        norm = parent._get_grad_norm(*args, **kwargs)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2
        if norm is not None and not self.args.fp16 and not bool(torch.isfinite(torch.as_tensor(norm)).all()):
            raise self._not_finite("the gradient")
        return norm

    def _not_finite(self, what: str) -> RunError:
        kept = self.state.global_step and f"checkpoints before step {self.state.global_step + 1} are kept"
        return RunError(
            f"{what} is not a finite number in step {self.state.global_step + 1}, and every later step would be of no "
            f"use; {kept or 'nothing was trained'}. Try a lower learning_rate, a lower max_grad_norm, or float32"
        )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        parent._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()  # the others write their random states
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir)
            mark_complete(folder / f"checkpoint-{self.state.global_step}", seconds=self.clock.seconds)
            remove_old(folder.parent, keep=self.keep, best=self.state.best_model_checkpoint)


@cache
def guarded(trainer: Any) -> Any:
    """A trainer's class with `Guard` laid over it."""
    return type(trainer.__name__, (Guard, trainer), {"__module__": __name__})


def callbacks(stop: Stop, clock: Clock, log: Callable[[str], None] | None) -> list[Any]:
    """Those that end a training on a signal, and print its progress if `log` is given."""
    from transformers import TrainerCallback

    class Ending(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _any_process(stop.number, args):
                control.should_training_stop = control.should_save = True
            if control.should_training_stop or state.global_step >= state.max_steps:
                control.should_log = True  # the last figures, whatever logging_steps is

    class Printing(TrainerCallback):  # type: ignore[misc]
        first_step = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.first_step = state.global_step

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            paced = state.global_step - self.first_step
            left = clock.here / paced * (state.max_steps - state.global_step) if paced else None
            line = progress_line(logs or {}, state.global_step, state.max_steps, left)
            if line and log is not None:
                log(line)

    return [Ending(), Printing()] if log is not None else [Ending()]


_SHOWN = (
    ("loss", "loss", ".4f"),
    ("rewards/margins", "margin", ".3f"),
    ("rewards/accuracies", "accuracy", ".3f"),
    ("mean_token_accuracy", "token accuracy", ".3f"),
    ("rollout/reward", "reward", ".3f"),
    ("rollout/em", "EM", ".3f"),
    ("rollout/retrievals", "searches", ".2f"),
    ("rollout/format_rate", "in form", ".3f"),
)
_LOOKED_AT = (("em", "EM"), ("f1", "F1"), ("acc", "ACC"), ("retrievals", "searches"), ("format_rate", "in form"))


def progress_line(logs: Mapping[str, Any], step: int, steps: int, left_s: float | None) -> str | None:
    """One line of progress; None where there is no loss to tell of.

    >>> progress_line({"loss": 0.5, "rewards/margins": 1.25, "rewards/accuracies": 0.75}, 20, 80, 130.0)
    'step 20/80  loss 0.5000  margin 1.250  accuracy 0.750  2m 10s left'
    >>> progress_line({"eval_loss": 0.5}, 80, 80, 0.0)
    'step 80/80  held-out: loss 0.5000'
    >>> progress_line({"eval_em": 0.5, "eval_retrievals": 1.5}, 20, 80, None)
    'step 20/80  held-out: EM 0.500  searches 1.500'
    """
    if "eval_em" in logs:
        looked = "  ".join(
            f"{label} {logs[f'eval_{name}']:.3f}" for name, label in _LOOKED_AT if f"eval_{name}" in logs
        )
        return f"step {step}/{steps}  held-out: {looked}"
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return None
    found = [(label, logs.get(prefix + name), form) for name, label, form in _SHOWN]
    if logs.get(f"{prefix}rewards/accuracies") is not None:
        found = found[:-1]
    figures = "  ".join(f"{label} {value:{form}}" for label, value, form in found if value is not None)
    if prefix:
        return f"step {step}/{steps}  held-out: {figures}"
    return f"step {step}/{steps}  {figures}" + (f"  {_duration(left_s)} left" if left_s else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def _any_process(number: int, args: Any) -> bool:
    """Whether any process was asked to stop. All have to stop after the same step, or they would wait for ever."""
    if args.world_size <= 1:
        return bool(number)
    import torch
    from accelerate.utils import reduce

    return bool(reduce(torch.tensor(float(number), device=args.device), reduction="sum").item())
