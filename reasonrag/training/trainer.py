"""Additions to TRL's trainers: complete checkpoints, no step on NaN, stops by signal, and cheaper steps.

`GuardedTrainer` stands before a TRL trainer. On a CPU, `score_labels_only`
and `StepsByLength` make an optimizer step cost less and compute the same:
scored tokens alone, shared prompts once, rows of like length together.

Imports transformers, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import is_peft_model, reduce
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import DynamicCache, Trainer, TrainerCallback
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from reasonrag.core.errors import RunError
from reasonrag.core.text import duration
from reasonrag.llm.model_folder import first_not_finite
from reasonrag.training.model import LENGTH

# A forward pass of more tokens is not faster per token on a CPU, and wastes more on padding.
ENOUGH_TOKENS = 1024
WATCHED_ROWS = 64  # an evaluation between two steps reads so many held-out rows, evenly spread
_MAY_FALL = 0.1  # of chosen log-probabilities: so many nats, and this share of where they started
_SAME_LOSS = 0.01  # a held-out loss higher by this share, of few rows by 1 / rows, is equal: the later step is kept
_FEW_ROWS = 30
_WORTH_TOKENS = 128  # a shorter prompt that rows share does not pay for a forward pass by itself
_IGNORED_LABEL = -100
_SKIPPED = "skipped"  # in the log: the step had no finite gradient, and changed nothing
_MOST_SKIPPED = 3  # steps in a row
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_PLAIN = {"input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head", "num_items_in_batch", "return_dict"}


class GuardedTrainer(Trainer):  # type: ignore[misc]
    """Base class that stands before a TRL trainer: complete checkpoints only, and no step without a finite gradient.

    `seconds_before` counts the seconds of this training run in earlier
    processes. `complete_checkpoint` gets the folder of each checkpoint
    and the seconds so far; the checkpoint counts once it has returned.
    """

    def __init__(
        self,
        *args: Any,
        seconds_before: float = 0.0,
        complete_checkpoint: Callable[[Path, float], object] = lambda checkpoint, seconds: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.complete_checkpoint = complete_checkpoint
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:  # a compiled one has no truth value
                score_labels_only(model)
        self._started = time.monotonic() - seconds_before

    @property
    def seconds(self) -> float:
        """Seconds of the whole training run, earlier processes included."""
        return time.monotonic() - self._started

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log with the seconds of the whole training run, so that metrics can be compared by their cost."""
        super().log({**logs, "seconds": round(self.seconds, 2)}, *args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: training.json describes how the model was made."""

    def get_train_dataloader(self) -> Any:
        """Return the batches of this process; a data set with a column `length` has rows of like length together."""
        loader, size = super().get_train_dataloader(), self.args.train_batch_size
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
        number = 0.0 if broken is None else torch.nan
        self.check_finite(number, f"the weight {broken or 'of another process'}", self.state.global_step)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        # transformers calls this before the optimizer uses the
        # gradient. With fp16 the scaler skips bad steps itself.
        norm = super()._get_grad_norm(*args, **kwargs)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor under FSDP2
        if norm is None or self.args.fp16 or self._is_finite(norm):
            return norm
        # In bfloat16 the gradient of a batch may overflow, and that of the next one not: the weights stay as they are.
        done = self.state.global_step
        skipped = [entry["step"] for entry in self.state.log_history if _SKIPPED in entry]
        if skipped[1 - _MOST_SKIPPED :] == list(range(done + 1 - _MOST_SKIPPED, done)) or not done:
            self.check_finite(norm, "the gradient", done + 1)
        self.model.zero_grad(set_to_none=True)
        self.log({_SKIPPED: 1.0})
        return 0.0

    def _is_finite(self, number: Any) -> bool:
        """Return whether a number or a tensor is finite in all processes."""
        finite = torch.isfinite(torch.as_tensor(number, device=self.args.device).detach()).all()
        return bool(self.accelerator.gather(finite.reshape(1)).all())

    def check_finite(self, number: Any, what: str, step: int) -> None:
        """Raise RunError on all processes alike if a number or a tensor of any of them holds NaN or an infinity."""
        if not self._is_finite(number):
            kept = f"checkpoints before step {step} are kept" if step > 1 else "nothing was trained"
            raise RunError(
                f"{what} is not a finite number in step {step}, and every later step would be useless; {kept}. "
                "Try a lower learning_rate, a lower max_grad_norm, or float32"
            )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metrics of held-out rows: of all of them, or between two steps of some."""
        whole: Any = self.eval_dataset
        if self.is_in_train:
            self.eval_dataset: Any = whole.select(range(0, len(whole), -(-len(whole) // WATCHED_ROWS)))
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.eval_dataset = whole

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        # transformers compares one number. The log is part of a checkpoint,
        # so a run that resumes chooses as one that was never stopped.
        if is_best := bool(self.best_evaluation()["step"] == self.state.global_step):
            self.state.best_global_step = self.state.global_step
            self.control.should_save = True
        return is_best

    def best_evaluation(self) -> Mapping[str, Any]:
        """Return the latest log entry of about the lowest held-out loss at which the chosen steps are likely enough.

        DPO's loss falls on while a policy forgets how to write any step
        (docs/training.md has figures). If the chosen steps are too unlikely
        in all entries, it is the entry in which they are least so.
        """
        start, later = self._evaluations()
        unlikely, loss = min(_badness(start, entry) for entry in later)
        rows = len(self.eval_dataset)
        enough = (unlikely, loss + (_SAME_LOSS if rows >= _FEW_ROWS else 1 / rows) * abs(loss))
        return [entry for entry in later if _badness(start, entry) <= enough][-1]

    def why_best(self) -> str:
        """Return a line if the best evaluation is not the last, or the chosen steps are too unlikely in it; or ""."""
        best, steps, (start, later) = self.best_evaluation(), self.state.global_step, self._evaluations()
        kept = f"kept step {best['step']} of {steps}"
        for entry in later:
            if entry["step"] >= best["step"] and _badness(start, entry)[0]:
                return (
                    f"the held-out chosen steps' log-probability fell too far below its start by step {entry['step']}: "
                    f"{kept}; a lower --learning-rate unlearns less"
                )
        rose = f"after step {best['step']} the held-out loss, {best['eval_loss']:.4f}, rose by more than chance"
        return "" if best["step"] == steps else f"{rose}: {kept}"

    def _evaluations(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the log entry before the first step and those of later ones."""
        entries = [entry for entry in self.state.log_history if "eval_loss" in entry]
        return entries[0], entries[1:] or entries  # runs of older versions have no first one

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.check_weights()  # or older checkpoints would be removed for one that cannot be trained further
        # Two that are whole, and the best one if it is older.
        self.args.save_total_limit = 2 if self.state.best_global_step in (None, self.state.global_step) else 3
        super()._save_checkpoint(*args, **kwargs)  # removes older ones, too, of which the newest is kept
        self.accelerator.wait_for_everyone()  # the other processes write their random states
        if self.accelerator.is_main_process:
            checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            self.save_extra_state(checkpoint)
            (checkpoint / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nothing reads
            self.complete_checkpoint(checkpoint, self.seconds)

    def save_extra_state(self, checkpoint: Path) -> None:
        """Write the state that a subclass needs to resume; called on the first process before the checkpoint counts."""


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """Stops a training run with a checkpoint, after the same step on every process, once any of them got a signal.

    In its `with` block, the first Ctrl-C or SIGTERM asks for a stop; the
    second one acts as it did before. `number` is that of the signal, 0
    without one. Outside the main thread Python cannot handle signals.
    A run resumes with a whole batch of `steps_a_batch` steps, so it stops after one.
    """

    def __init__(self, log: Callable[[str], None], steps_a_batch: int = 1) -> None:
        self.log = log
        self.steps_a_batch = steps_a_batch
        self.number = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal) or signal.SIG_DFL
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()
        self.log("stopping after this step; a second signal stops now and loses the steps since the last checkpoint")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = self.number
        if args.world_size > 1:  # all have to stop after the same step, or they would deadlock
            number = reduce(torch.tensor(float(number), device=args.device), reduction="sum").item()
        if number and state.global_step % self.steps_a_batch == 0:
            control.should_training_stop = control.should_save = True
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True  # the last step may be the best
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
        steps_done, steps_left = state.global_step - self.first_step, state.max_steps - state.global_step
        seconds_left = (time.monotonic() - self.started) / steps_done * steps_left if steps_done else None
        if line := progress_line(logs or {}, state.global_step, state.max_steps, seconds_left):
            self.log(line)


# Keys in the log that a line shows, after `eval_` if they are of held-out data.
_PRINTED = (
    *("loss", "rewards/margins", "rewards/accuracies", "rewards/chosen", "mean_token_accuracy"),
    *("rollout/reward", "rollout/em", "rollout/retrievals", "rollout/format_rate"),
    *("em", "f1", "acc", "retrievals", "format_rate"),
)


def progress_line(logs: Mapping[str, Any], step: int, steps: int, left_s: float | None) -> str | None:
    """Return one line of progress; None if the log entry has no loss and no validation metrics.

    >>> progress_line({"loss": 0.5, "rewards/margins": 1.25, "rewards/accuracies": 0.75}, 20, 80, 130.0)
    'step 20/80  loss 0.5000  margins 1.2500  accuracies 0.7500  2 min 10 s left'
    >>> progress_line({"eval_em": 0.5, "eval_retrievals": 1.5}, 20, 80, None)
    'step 20/80  held-out: em 0.5000  retrievals 1.5000'
    """
    if _SKIPPED in logs:
        return f"step {step + 1}/{steps}  left out, as its gradient is not a finite number"
    prefix = "eval_" if "eval_em" in logs or "eval_loss" in logs else ""
    if not prefix and "loss" not in logs:
        return None
    known = [name for name in _PRINTED if logs.get(prefix + name) is not None]
    parts = [f"{name.rpartition('/')[2]} {logs[prefix + name]:.4f}" for name in known]
    if left_s and not prefix:
        parts.append(f"{duration(left_s)} left")
    return f"step {step}/{steps}  {'held-out: ' if prefix else ''}{'  '.join(parts)}"


def _badness(start: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return by how many nats the held-out chosen steps are too unlikely, 0 if they are not, and the loss."""
    before, after = (row.get("eval_logps/chosen", 0.0) for row in (start, entry))
    return max(0.0, before - after - _MAY_FALL * (1.0 + abs(before))), entry["eval_loss"]


def score_labels_only(model: nn.Module) -> None:
    """Let the fused head that TRL gave `model` compute only the terms of the log-probabilities of labelled tokens.

    TRL 1.16 reads every row of a batch at the length of the longest, and scores
    every position unless it has Triton. Here rows of like length share a forward
    pass of the backbone, a prompt that several rows begin with is read once, and
    TRL's head gets the hidden states that are scored, so bias, softcapping, scale,
    and parameters that are sharded over processes stay TRL's business. Other
    devices than a CPU, and calls without a fused head, are left as they are.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    fused = base.forward
    can_share = _has_plain_cache(base)

    @functools.wraps(fused)  # keeps the signature, which `generate` reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None or labels.device.type != "cpu":
            return fused(*args, **kwargs)
        next_tokens = labels[:, 1:]  # position t predicts token t + 1
        scored = next_tokens != _IGNORED_LABEL
        # Checkpointing computes a pass again for its gradient,
        # and cannot do so after another has used its cache.
        shares = can_share and not (self.is_gradient_checkpointing and self.training)
        given = {name for name, value in kwargs.items() if value is not None}  # peft passes None values, too
        in_parts = not args and given <= _PLAIN and not getattr(self.config, "output_router_logits", False)
        backbone = self.base_model
        whole = backbone.forward

        def read(*args: Any, **kwargs: Any) -> Any:
            if in_parts and scored.any():
                hidden = _scored_states(whole, kwargs["input_ids"], kwargs["attention_mask"], scored, shares=shares)
                return BaseModelOutput(last_hidden_state=hidden[None])
            outputs = whole(*args, **kwargs)
            outputs.last_hidden_state = outputs.last_hidden_state[:, :-1][scored][None]
            return outputs

        backbone.forward = read
        try:
            outputs = fused(*args, **(kwargs | {"labels": None, "shift_labels": next_tokens[scored][None]}))
        finally:
            backbone.forward = whole
        for name in _PER_TOKEN:
            if (values := getattr(outputs, name)) is not None:
                setattr(outputs, name, values.new_zeros(scored.shape).masked_scatter(scored, values))
        outputs.label_mask = scored
        return outputs

    base.forward = types.MethodType(forward, base)


def _has_plain_cache(model: Any) -> bool:
    """Return whether a prefix can be taken from the model's state, which convolutions and recurrence do not allow."""
    takes = set(inspect.signature(type(model).forward).parameters)
    if getattr(model, "_is_stateful", False) or not {"position_ids", "past_key_values", "logits_to_keep"} <= takes:
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of a row up to the last one that a scored token depends on, and the places of the scored states."""

    number: int
    ids: Any
    places: Any


def _scored_states(backbone: Callable[..., Any], input_ids: Any, mask: Any, scored: Any, *, shares: bool) -> Any:
    """Return the hidden states `[S, H]` at `scored` positions `[R, T - 1]`, some of which are True, row by row."""
    starts = mask.long().argmax(dim=1).tolist()
    rows_by_prompt: dict[tuple[int, ...], list[_Row]] = {}
    for number in scored.any(dim=1).nonzero()[:, 0].tolist():
        places = scored[number].nonzero()[:, 0]
        start, first, end = starts[number], int(places[0]), int(places[-1]) + 1
        ids = input_ids[number, start:end]
        prompt = tuple(ids[: first - start].tolist())
        rows_by_prompt.setdefault(prompt, []).append(_Row(number, ids, places - start))
    states: dict[int, Any] = {}
    alone: list[_Row] = []
    for prompt, group in rows_by_prompt.items():
        if shares and len(group) > 1 and len(prompt) >= _WORTH_TOKENS:
            states |= _after_prompt(backbone, group, len(prompt))
        else:
            alone += group
    alone.sort(key=lambda row: len(row.ids), reverse=True)
    while alone:
        taken = max(1, ENOUGH_TOKENS // len(alone[0].ids))
        part, alone = alone[:taken], alone[taken:]
        ids = pad_sequence([row.ids for row in part], batch_first=True)
        real = pad_sequence([torch.ones_like(row.ids) for row in part], batch_first=True)
        hidden = backbone(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
        for index, row in enumerate(part):
            states[row.number] = hidden[index, row.places]
    return torch.cat([states[number] for number in sorted(states)])


def _after_prompt(backbone: Callable[..., Any], group: Sequence[_Row], length: int) -> dict[int, Any]:
    """Return the states by number of rows that begin with the same `length` tokens, which are read once."""
    prompt = DynamicCache()
    backbone(input_ids=group[0].ids[None, :length], past_key_values=prompt, use_cache=True)
    states = {}
    for row in group:
        cache = DynamicCache()
        for number, layer in enumerate(prompt.layers):
            cache.update(layer.keys, layer.values, number)
        ids = row.ids[None, length:]
        hidden = backbone(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        states[row.number] = hidden[0, row.places - length]
    return states


class StepsByLength(Sampler[int]):  # type: ignore[misc]
    """The rows of another sampler, those of each optimizer step longest first, so that less is padded.

    A step has the same rows as before, in other forward passes, so its gradient
    is the same but for rounding. The last step of an epoch keeps its order: its
    passes may be of different sizes, and a row of a smaller one weighs more.

    Args:
        order: yields numbers of rows.
        lengths: by number of row.
        rows_a_step: rows of an optimizer step, on all processes.
    """

    def __init__(self, order: Sampler[int], lengths: Sequence[int], rows_a_step: int) -> None:
        self.order = order
        self.lengths = lengths
        self.rows_a_step = rows_a_step

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        """
        >>> list(StepsByLength([3, 0, 2, 1, 4], [10, 30, 20, 40, 50], rows_a_step=2))
        [3, 0, 1, 2, 4]
        """
        numbers = iter(self.order)
        while rows := list(islice(numbers, self.rows_a_step)):
            if len(rows) == self.rows_a_step:
                rows.sort(key=self.lengths.__getitem__, reverse=True)
            yield from rows

    def set_epoch(self, epoch: int) -> None:
        """Let the other sampler shuffle for this epoch."""
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)
