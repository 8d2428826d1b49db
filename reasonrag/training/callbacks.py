"""Training callbacks and trainer checks: complete checkpoints, NaN and inf guards, signal handling, progress lines.

Imports transformers, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import Trainer, TrainerCallback

from reasonrag.core.errors import RunError
from reasonrag.core.text import duration
from reasonrag.llm.weights import first_not_finite
from reasonrag.training.folder import mark_complete, remove_old
from reasonrag.training.throughput import LENGTH, StepsByLength, score_labels_only


@dataclass
class StopRequest:
    """Whether a signal has asked to stop after the current step."""

    number: int = 0  # of the signal; 0 means that none came


@contextlib.contextmanager
def handle_signals(log: Callable[[str], None]) -> Iterator[StopRequest]:
    """Let the first Ctrl-C or SIGTERM ask for a stop; the second one acts as it did before this block.

    Outside the main thread Python cannot handle signals, and the request is never made.
    """
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number in numbers:
            signal.signal(number, before[number] or signal.SIG_DFL)

    def on_signal(number: int, frame: FrameType | None) -> None:
        request.number = number
        restore()
        log("stopping after this step; a second signal stops now and loses the steps since the last checkpoint")

    try:
        for number in numbers:
            signal.signal(number, on_signal)
        yield request
    finally:
        restore()


class GuardedTrainer(Trainer):  # type: ignore[misc]
    """Base class that stands before a TRL trainer: complete checkpoints only, and no step on a non-finite loss.

    `seconds_before` counts the seconds of this training run in earlier processes. `write_card` writes how the policy is
    prompted into the folder of a checkpoint, so that it can be evaluated as it is.
    """

    def __init__(
        self,
        *args: Any,
        seconds_before: float = 0.0,
        checkpoints_kept: int = 1,
        write_card: Callable[[Path], object] = lambda folder: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.write_card = write_card
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                score_labels_only(model)
        self.checkpoints_kept = checkpoints_kept
        self._seconds_before = seconds_before
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the whole training run, earlier processes included."""
        return self._seconds_before + time.monotonic() - self._started

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log with the seconds of the whole training run, so that metrics can be seen by what they cost."""
        super().log({**logs, "seconds": round(self.seconds, 2)}, *args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: training.json says how the model was made."""

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would tell its authors that a trainer is used."""

    def get_train_dataloader(self) -> Any:
        """Return the batches of this process; a data set with a column `length` has rows of like length together."""
        loader, size = super().get_train_dataloader(), self._train_batch_size
        rows_a_step = loader.total_batch_size * self.args.gradient_accumulation_steps
        if LENGTH in (self.train_dataset.column_names or ()) and 1 < size < rows_a_step:
            lengths = list(self.train_dataset[LENGTH])
            loader.set_sampler(StepsByLength(loader.get_sampler(), lengths, rows_a_step))
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # From the checkpoint of the last step, transformers would make one step more.
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's step; raise on all processes alike if the loss of any of them is NaN or infinite."""
        loss = super().training_step(*args, **kwargs)
        self.check_finite(loss, "the loss", self.state.global_step + 1)
        return loss

    def check_weights(self) -> None:
        """Raise on all processes alike if the last step left NaN or an infinity in the weights of any of them."""
        broken = first_not_finite(self.model)
        what = f"the weight {broken or 'of another process'}"
        self.check_finite(0.0 if broken is None else torch.nan, what, self.state.global_step)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        # transformers calls this before the optimizer uses the gradient. With fp16 the scaler skips bad steps itself.
        norm = super()._get_grad_norm(*args, **kwargs)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2
        if norm is not None and not self.args.fp16:
            self.check_finite(norm, "the gradient", self.state.global_step + 1)
        return norm

    def check_finite(self, number: Any, what: str, step: int) -> None:
        """Raise RunError on all processes alike if a number or a tensor of any of them holds NaN or an infinity."""
        finite = torch.isfinite(torch.as_tensor(number, device=self.args.device).detach()).all()
        if not bool(self.accelerator.gather(finite.reshape(1)).all()):
            kept = f"checkpoints before step {step} are kept" if step > 1 else "nothing was trained"
            raise RunError(
                f"{what} is not a finite number in step {step}, and every later step would be useless; {kept}. "
                "Try a lower learning_rate, a lower max_grad_norm, or float32"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()  # or the checkpoints before it would give way to one that cannot be trained further
        super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()  # the other processes write their random states
        if self.accelerator.is_main_process:
            checkpoints = Path(self.args.output_dir)
            checkpoint = checkpoints / f"checkpoint-{self.state.global_step}"
            self.save_extra_state(checkpoint)
            self.write_card(checkpoint)
            (checkpoint / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nothing reads
            mark_complete(checkpoint, seconds=self.seconds)
            remove_old(checkpoints.parent, keep=self.checkpoints_kept, best=self.state.best_model_checkpoint)

    def save_extra_state(self, checkpoint: Path) -> None:
        """Write what a subclass needs to resume; called on the first process before the checkpoint counts."""


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Stops a training run with a checkpoint, after the same step on every process, once any of them got a signal."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = self.request.number
        if args.world_size > 1:  # all have to stop after the same step, or they would deadlock
            number = reduce(torch.tensor(float(number), device=args.device), reduction="sum").item()
        if number:
            control.should_training_stop = control.should_save = True
        if control.should_save or control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True  # before a checkpoint, or means over several steps would lack those before it


class PrintProgress(TrainerCallback):  # type: ignore[misc]
    """Prints one line for each entry of the log, with the time left."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self.first_step = 0
        self.started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        steps_done = state.global_step - self.first_step
        seconds_left = None
        if steps_done:
            seconds_a_step = (time.monotonic() - self.started) / steps_done
            seconds_left = seconds_a_step * (state.max_steps - state.global_step)
        if line := progress_line(logs or {}, state.global_step, state.max_steps, seconds_left):
            self.log(line)


# Key in the log (after `eval_` if it is of held-out data), label, and format. A line shows those that an entry has.
_METRICS = (
    ("loss", "loss", ".4f"),
    ("rewards/margins", "margin", ".3f"),
    ("rewards/accuracies", "accuracy", ".3f"),
    ("mean_token_accuracy", "token accuracy", ".3f"),
    ("rollout/reward", "reward", ".3f"),
    ("rollout/em", "EM", ".3f"),
    ("rollout/retrievals", "searches", ".2f"),
    ("rollout/format_rate", "in form", ".3f"),
    ("em", "EM", ".3f"),
    ("f1", "F1", ".3f"),
    ("acc", "ACC", ".3f"),
    ("retrievals", "searches", ".3f"),
    ("format_rate", "in form", ".3f"),
)


def progress_line(logs: Mapping[str, Any], step: int, steps: int, left_s: float | None) -> str | None:
    """Return one line of progress; None if the log entry has no loss and no validation metrics.

    >>> progress_line({"loss": 0.5, "rewards/margins": 1.25, "rewards/accuracies": 0.75}, 20, 80, 130.0)
    'step 20/80  loss 0.5000  margin 1.250  accuracy 0.750  2 min 10 s left'
    >>> progress_line({"eval_loss": 0.5}, 80, 80, 0.0)
    'step 80/80  held-out: loss 0.5000'
    >>> progress_line({"eval_em": 0.5, "eval_retrievals": 1.5}, 20, 80, None)
    'step 20/80  held-out: EM 0.500  searches 1.500'
    """
    prefix = "eval_" if "eval_em" in logs or "eval_loss" in logs else ""
    if not prefix and "loss" not in logs:
        return None
    parts = []
    for name, label, form in _METRICS:
        if (value := logs.get(prefix + name)) is not None:
            parts.append(f"{label} {value:{form}}")
    if left_s and not prefix:
        parts.append(f"{duration(left_s)} left")
    return f"step {step}/{steps}  {'held-out: ' if prefix else ''}{'  '.join(parts)}"
