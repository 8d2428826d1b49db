"""Optimizer steps that cost less and compute the same: the head on scored tokens alone, rows of like length together.

Imports torch, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from torch.utils.data import Sampler

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_IGNORED_LABEL = -100
LENGTH = "length"  # column of a data set: the tokens that a row is padded to where it is alone in its batch


def score_labels_only(model: nn.Module) -> None:
    """Let the fused head that TRL gave `model` compute log-probabilities only where the next token has a label.

    TRL 1.16 does so with Triton, and scores every position elsewhere. The backbone reads all positions. Its hidden
    states are cut down to those that are scored on their way to TRL's head, so bias, softcapping, scale, and parameters
    that are sharded over processes stay TRL's business. Other devices than a CPU, and calls without a fused head, are
    left as they are.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    fused = base.forward

    @functools.wraps(fused)  # keeps the signature, which `generate` reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None or labels.device.type != "cpu":
            return fused(*args, **kwargs)
        next_tokens = labels[:, 1:]
        scored = next_tokens != _IGNORED_LABEL

        def keep_scored(module: nn.Module, inputs: Any, outputs: Any) -> None:
            outputs.last_hidden_state = outputs.last_hidden_state[:, :-1][scored][None]

        hook = self.base_model.register_forward_hook(keep_scored)
        try:
            outputs = fused(*args, **(kwargs | {"labels": None, "shift_labels": next_tokens[scored][None]}))
        finally:
            hook.remove()
        for name in _PER_TOKEN:
            if (values := getattr(outputs, name)) is not None:
                setattr(outputs, name, values.new_zeros(scored.shape).masked_scatter(scored, values))
        outputs.label_mask = scored
        return outputs

    base.forward = types.MethodType(forward, base)


class StepsByLength(Sampler[int]):  # type: ignore[misc]
    """The rows of another sampler, those of each optimizer step longest first, so that less is padded.

    A step has the same rows as before, in other forward passes, so its gradient is the same but for rounding. The last
    step of an epoch keeps its order: its passes may be of different sizes, and a row of a smaller one weighs more.

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
