"""Optimizer steps that cost less and compute the same: scored tokens alone, shared prompts once, rows of like length.

Imports torch, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from reasonrag.llm.prefix_cache import reusable

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_IGNORED_LABEL = -100
_PLAIN = {"input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head", "num_items_in_batch", "return_dict"}
# A forward pass of more tokens is no faster by the token on a CPU, and pads more.
ENOUGH_TOKENS = 1024
_WORTH_TOKENS = 128  # a shorter prompt that rows share is not worth a forward pass by itself
LENGTH = "length"  # column of a data set: the tokens that a row is padded to where it is alone in its batch


def score_labels_only(model: nn.Module) -> None:
    """Let the fused head that TRL gave `model` compute only what the log-probabilities of labelled tokens depend on.

    TRL 1.16 reads every row of a batch at the length of the longest, and scores every position unless it has Triton.
    Here rows of like length share a forward pass of the backbone, a prompt that several rows begin with is read once,
    and TRL's head gets the hidden states that are scored, so bias, softcapping, scale, and parameters that are sharded
    over processes stay TRL's business. Other devices than a CPU, and calls without a fused head, are left as they are.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    fused = base.forward
    can_share = reusable(base)

    @functools.wraps(fused)  # keeps the signature, which `generate` reads
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None or labels.device.type != "cpu":
            return fused(*args, **kwargs)
        next_tokens = labels[:, 1:]
        scored = next_tokens != _IGNORED_LABEL
        # Checkpointing computes a pass again for its gradient, and cannot do so after another has used its cache.
        shares = can_share and not (self.is_gradient_checkpointing and self.training)
        given = {name for name, value in kwargs.items() if value is not None}  # peft passes what is None, too
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


def _scored_states(backbone: Callable[..., Any], input_ids: Any, mask: Any, scored: Any, *, shares: bool) -> Any:
    """Return the hidden states `[S, H]` at `scored` positions `[R, T - 1]`, some of which are True, row by row."""
    starts = mask.long().argmax(dim=1).tolist()
    rows: dict[tuple[int, ...], list[_Row]] = {}  # by the tokens that they begin with
    for number in scored.any(dim=1).nonzero()[:, 0].tolist():
        places = scored[number].nonzero()[:, 0]
        start, first, end = starts[number], int(places[0]), int(places[-1]) + 1
        ids = input_ids[number, start:end]
        prompt = tuple(ids[: first - start].tolist())
        rows.setdefault(prompt, []).append(_Row(number, ids, places - start))
    states: dict[int, Any] = {}
    alone: list[_Row] = []
    for prompt, group in rows.items():
        if shares and len(group) > 1 and len(prompt) >= _WORTH_TOKENS:
            states |= _after_prompt(backbone, group, len(prompt))
        else:
            alone += group
    alone.sort(key=lambda row: len(row.ids), reverse=True)
    while alone:
        length = len(alone[0].ids)
        taken = max(1, ENOUGH_TOKENS // length)
        part, alone = alone[:taken], alone[taken:]
        ids = pad_sequence([row.ids for row in part], batch_first=True)
        real = pad_sequence([torch.ones_like(row.ids) for row in part], batch_first=True)
        hidden = backbone(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
        states |= {row.number: hidden[index, row.places] for index, row in enumerate(part)}
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


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of a row up to the last one that a scored token depends on, and the places of the scored states."""

    number: int
    ids: Any
    places: Any


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
