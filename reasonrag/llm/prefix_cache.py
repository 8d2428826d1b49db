"""Keys and values of recent prompts, so that a model computes the beginning that prompts share once.

Siblings and successive steps of a trajectory begin alike. Keys and values of a token depend on it and on the tokens
before it, so they are those that a plain forward pass would compute, up to the rounding that comes with another shape
of the batch (`row_sampling`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from reasonrag.core.text import common_length
from reasonrag.llm.row_sampling import filled_cache, inner_model, left_padded

if TYPE_CHECKING:
    from torch import Tensor

Ids = tuple[int, ...]

# A shorter beginning that prompts share is not worth a forward pass by itself.
_WORTH_TOKENS = 32
_MAX_BYTES = 2**29
# A forward pass computes at most so many tokens, or one row, and pads a row by an eighth of the longest, or a few.
_TOKENS_AT_ONCE = 4096
_PADDING = 8


class PrefixCache:
    """Holds at most `max_bytes` of keys and values of one model's prompts, the least recently used leave first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[Ids, list[Tensor]] = {}  # `[H, P, D]` keys and values by layer; least recently used first
        self._sorted: list[Ids] = []
        self._bytes = 0

    def filled(self, model: Any, prompts: Sequence[Ids]) -> Any:
        """Return transformers' cache of all tokens but the last of `[B]` prompts, padded on the left.

        What no earlier prompt shares is computed first, and what several of these share only once.
        """
        wanted = [prompt[:-1] for prompt in prompts]
        distinct = sorted({ids for ids in wanted if ids})
        shared = {a[: common_length(a, b)] for a, b in pairwise(distinct)}
        missing = {ids for ids in distinct if self._held(ids) < len(ids)}
        missing |= {ids for ids in shared if len(ids) - self._held(ids) >= _WORTH_TOKENS}
        while missing:
            ready = {ids for ids in missing if not any(ids[: len(a)] == a for a in missing if a is not ids)}
            for group in self._alike(ready):
                self._compute(inner_model(model), group)
            missing -= ready
        cache = self._joined(wanted, [len(ids) for ids in wanted])
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        return cache

    def _alike(self, ready: Collection[Ids]) -> list[list[Ids]]:
        """Group by the tokens to compute, so that hardly any are padding: a row of many fills a processor by itself."""
        fresh = {ids: len(ids) - self._held(ids) for ids in sorted(ready)}
        groups: list[list[Ids]] = []
        most = 0  # of the group
        for ids in sorted(fresh, key=lambda ids: fresh[ids], reverse=True):
            is_like = fresh[ids] >= most - max(most // _PADDING, _WORTH_TOKENS)
            if groups and is_like and most * (len(groups[-1]) + 1) <= _TOKENS_AT_ONCE:
                groups[-1].append(ids)
            else:
                groups.append([ids])
                most = fresh[ids]
        return groups

    def _compute(self, model: Any, group: Sequence[Ids]) -> None:
        fresh = max(len(ids) - self._held(ids) for ids in group)
        # All padding is on the left if every row computes equally many tokens: sliding windows count columns.
        cache = self._joined(group, [max(len(ids) - fresh, 0) for ids in group])
        width = cache.get_seq_length() + fresh
        input_ids, mask = left_padded(group, width, model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(  # not its backbone alone: a trainer may have wrapped `forward` for its mixed precision
            input_ids=input_ids[:, -fresh:],
            attention_mask=mask,
            position_ids=positions[:, -fresh:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for row, ids in enumerate(group):
            self._put(ids, [kv[row, :, width - len(ids) :].clone() for kv in _tensors(cache)])

    def _joined(self, prompts: Sequence[Ids], lengths: Sequence[int]) -> Any:
        """Return a cache of the first `lengths[i]` tokens of each prompt, which are held, padded on the left."""
        width = max(lengths)
        if not width:
            return filled_cache([])
        held = [self._entries[self._nearest(ids)] for ids in prompts]
        columns = []
        for parts in zip(*held, strict=True):
            heads, _, size = parts[0].shape
            joined = parts[0].new_zeros(len(prompts), heads, width, size)
            for row, (part, length) in enumerate(zip(parts, lengths, strict=True)):
                joined[row, :, width - length :] = part[:, :length]
            columns.append(joined)
        return filled_cache(list(zip(columns[::2], columns[1::2], strict=True)))

    def _held(self, ids: Ids) -> int:
        """Return how many of the first tokens are held."""
        return common_length(ids, self._nearest(ids)) if self._entries else 0

    def _nearest(self, ids: Ids) -> Ids:
        """Return the entry with the longest common beginning, as used just now: of sorted texts it is a neighbour."""
        place = bisect_left(self._sorted, ids)
        nearest = max(self._sorted[max(place - 1, 0) : place + 1], key=lambda entry: common_length(entry, ids))
        self._entries[nearest] = self._entries.pop(nearest)
        return nearest

    def _put(self, ids: Ids, tensors: list[Tensor]) -> None:
        if self._entries and (nearest := self._nearest(ids)) == ids[: len(nearest)]:
            self._drop(nearest)  # the new entry holds it too
        self._entries[ids] = tensors
        insort(self._sorted, ids)
        self._bytes += _size(tensors)

    def _drop(self, ids: Ids) -> None:
        self._bytes -= _size(self._entries.pop(ids))
        del self._sorted[bisect_left(self._sorted, ids)]


def reusable(model: Any) -> bool:
    """Return whether a prefix can be taken from the model's state, which convolutions and recurrence do not allow."""
    import inspect

    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    inner = inner_model(model)
    takes = inspect.signature(type(inner).forward).parameters
    if getattr(inner, "_is_stateful", False) or not {"position_ids", "past_key_values", "logits_to_keep"} <= set(takes):
        return False
    layers = DynamicCache(config=inner.config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _tensors(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
