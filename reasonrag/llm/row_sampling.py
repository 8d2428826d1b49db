"""Write rows in batches with transformers' `generate`; each has its own seed, temperature, length and stop strings.

Each row has its own random generator, so its draws do not depend on the rest of the batch. Its logits do slightly: in a
batch of another shape, floats are summed in another order, about 1e-6 apart in float32 and 1e-2 in bfloat16. A draw
that falls on the border of two tokens, or a near tie of greedy decoding, can therefore have another winner in another
batch; float32 makes that rare, not impossible.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.text import common_length
from reasonrag.core.types import Completion, FinishReason
from reasonrag.llm.base import cut_at_stop
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import first_not_finite

if TYPE_CHECKING:
    from torch import Tensor

# A token at the end may decode to nothing (special tokens are skipped), or begin before the stop string.
_SPARE_TAIL_TOKENS = 16
# Most nuclei are found among so many words, without sorting the others.
_LIKELY_WORDS = 1024
_BLOCK = 512
# A cache has room for so many more tokens before it is copied.
_ROOM_TOKENS = 64


def end(waiting: Iterable[Future[Any]], error: BaseException | None = None, value: object = None) -> None:
    """End the futures that are not done, with an error or a value."""
    for future in waiting:
        with suppress(InvalidStateError):
            future.set_result(value) if error is None else future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to generate: `prompt_ids` `[P]` and sampling parameters. Temperature 0 is greedy."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]


def left_padded(prompts: Sequence[Sequence[int]], width: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return `[B, width]` ids and their attention mask. The mask hides the padding, so any id will do there."""
    import torch

    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(prompts):
        input_ids[index, width - len(ids) :] = torch.tensor(ids)
        mask[index, width - len(ids) :] = 1
    return input_ids.to(device), mask.to(device)


def stacked(caches: Sequence[tuple[Any, int]]) -> Any:
    """Return one cache of the rows of several caches, each given with its number of rows, padded on the left.

    A cache without a token has no tensors yet, so its rows are padding throughout.
    """
    import torch
    from torch.nn.functional import pad

    widest = max((cache for cache, _ in caches), key=lambda cache: int(cache.get_seq_length()))
    width = widest.get_seq_length()

    def joined(index: int, name: str) -> Tensor:
        tensors = []
        for cache, rows in caches:
            some = getattr((cache if cache.layers else widest).layers[index], name)
            tensor = some if cache.layers else some[:1, :, :0].expand(rows, -1, -1, -1)
            tensors.append(pad(tensor, (0, 0, width - tensor.shape[2], 0)))
        return torch.cat(tensors)

    return filled_cache([(joined(index, "keys"), joined(index, "values")) for index in range(len(widest.layers))])


def filled_cache(layers: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Return transformers' cache of keys and values by layer, `[B, H, P, D]`, which has room for tokens to come."""
    from transformers import Cache

    cache = Cache(layer_class_to_replicate=_roomy_layer())
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


@functools.cache
def _roomy_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class RoomyLayer(DynamicLayer):  # type: ignore[misc]
        """Writes a token into room that it keeps; its base class copies all keys and values for each token."""

        def __init__(self) -> None:
            super().__init__()
            self.rooms: dict[str, Tensor] = {}

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
                self.keys, self.values = keys, values
            else:
                self.keys, self.values = self.with_more("keys", keys), self.with_more("values", values)
            return self.keys, self.values

        def with_more(self, name: str, more: Tensor) -> Tensor:
            held, room = getattr(self, name), self.rooms.get(name)
            (rows, heads, count, size), total = held.shape, held.shape[2] + more.shape[2]
            if room is None or room.data_ptr() != held.data_ptr() or room.shape[0] != rows or room.shape[2] < total:
                room = self.rooms[name] = held.new_empty(rows, heads, total + _ROOM_TOKENS, size)
                room[:, :, :count] = held
            room[:, :, count:total] = more
            return room[:, :, :total]

    return RoomyLayer


def sampled_completion(
    chat: ChatTemplate,
    prompt_ids: tuple[int, ...],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    reason: FinishReason,
    stop: tuple[str, ...],
    *,
    model: Any = None,
) -> Completion:
    """Build the completion of sampled ids.

    The token that completes a stop string may hold more characters: the ids keep it whole, the text ends at the string.
    `model` is what sampled them, for the error.

    Raises:
        RunError: a log-probability is NaN or infinite, so that nothing the model writes means anything.
    """
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        broken = None if model is None else first_not_finite(model)
        why = f"its weights hold NaN or infinities, first in {broken}" if broken else "its activations overflow"
        remedy = "take an earlier checkpoint, or copy its files again" if broken else "load it in float32 or bfloat16"
        raise RunError(f"the policy's probabilities are not finite numbers: {why}; {remedy}")
    text = chat.decode(token_ids)
    return Completion(
        cut_at_stop(text, stop) or text,
        reason,
        tuple(token_ids),
        None if logprobs is None else tuple(logprobs[: len(token_ids)]),
        prompt_ids,
        len(prompt_ids),
        len(token_ids),
    )


def tail_length(stop: Sequence[str]) -> int:
    """Return how many of the last tokens to decode to find any stop string that ends in them."""
    return max((len(mark.encode()) for mark in stop), default=0) + _SPARE_TAIL_TOKENS


def end_token_ids(model: Any, chat: ChatTemplate) -> frozenset[int]:
    """Return the tokens that end a turn, by the model's generation config, its tokenizer and its chat template."""
    configured = model.generation_config.eos_token_id
    end_ids = configured if isinstance(configured, list) else [configured]
    end_ids = [*end_ids, chat.tokenizer.eos_token_id, chat.end_of_turn]
    return frozenset(token for token in end_ids if token is not None)


def inner_model(model: Any) -> Any:
    """Return the model of transformers under a PEFT wrapper; its layers hold the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def room_for(name: str, prompt_ids: Sequence[int], context: int) -> int:
    """Return how many tokens a completion may have after a prompt, at least 1.

    Raises:
        LLMError: with cause `context_overflow`: the prompt fills the context of the model `name`.
    """
    room = context - len(prompt_ids)
    if room < 1:
        found = f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {context}"
        raise LLMError(f"{name}: {found}", cause="context_overflow")
    return room


@dataclass(slots=True)
class _Writing:
    """A row, its tokens so far, and the future that gets its completion."""

    row: Row
    future: Future[Completion]
    draws: Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: FinishReason | None = None

    @property
    def text_ids(self) -> tuple[int, ...]:
        return (*self.row.prompt_ids, *self.token_ids)


class RowBatch:
    """Rows that a model writes together: each leaves as soon as it is done, and others may take its place.

    A row whose future is cancelled leaves, too. All methods block, so they belong on a worker thread.
    """

    def __init__(
        self,
        model: Any,
        chat: ChatTemplate,
        *,
        end_ids: Collection[int],
        prefixes: PrefixCache | None = None,
        pause: Callable[[int], bool] = lambda rows: False,
    ) -> None:
        """Begin an empty batch.

        Args:
            model: a causal language model of transformers with a neutral `generation_config`.
            chat: its tokenizer.
            end_ids: tokens that end a turn.
            prefixes: what earlier prompts of the same weights share with these; None computes each prompt as a whole,
                and then rows can join an empty batch only.
            pause: called after every token with the rows that are left; if true, `write` returns.
        """
        self._model, self._chat, self._end_ids = model, chat, frozenset(end_ids)
        self._prefixes, self._pause = prefixes, pause
        # A recurrent state is nothing that rows can be taken from.
        self._shrinks = not getattr(inner_model(model), "_is_stateful", False)
        self._rows: list[_Writing] = []  # in the order of the cache
        self._cache: Any = None

    def __len__(self) -> int:
        """Return how many rows are not done."""
        return len(self._rows)

    def takes(self) -> bool:
        """Return whether rows can join now."""
        return self._prefixes is not None or not self._rows

    def join(self, rows: Sequence[tuple[Row, Future[Completion]]]) -> None:
        """Add rows and compute their prompts. Each future gets its row's completion."""
        import torch

        if self._prefixes is not None:
            with torch.no_grad():
                cache = self._prefixes.filled(self._model, [row.prompt_ids for row, _ in rows])
            self._cache = stacked([(self._cache, len(self._rows)), (cache, len(rows))]) if self._rows else cache
        self._rows += [_Writing(row, future, Random(row.seed)) for row, future in rows]

    def write(self) -> None:
        """Write tokens until at most half of the rows are left, or `pause` returns true.

        `generate` computes all rows of a call until it ends, so a call ends before many of them are done.
        """
        import torch
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        self._left = len(self._rows) // 2 if self._shrinks else 0
        self._begin()
        texts = [writing.text_ids for writing in self._rows]
        held = 0 if self._cache is None else self._cache.get_seq_length()
        input_ids, attention_mask = left_padded(texts, max(held + 1, *map(len, texts)), self._model.device)
        with torch.no_grad():  # not inference_mode: a model in training may keep a tensor that is made here
            made = self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                # Without an end token here: `generate` would overwrite finished rows with padding.
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(writing.row.max_tokens - len(writing.token_ids) for writing in self._rows),
                    pad_token_id=0,
                    return_dict_in_generate=True,
                ),
                logits_processor=LogitsProcessorList([self._choose]),
                stopping_criteria=StoppingCriteriaList([self._finish]),
                **({} if self._cache is None else {"past_key_values": self._cache}),
            )
            self._shrink(made.past_key_values)

    def _shrink(self, cache: Any) -> None:
        """Keep the rows that go on, with no more padding than they need."""
        import torch

        left = [place for place, writing in enumerate(self._rows) if writing.ended is None]
        self._cache = cache if left else None
        if self._shrinks and left and len(left) < len(self._rows):
            cache.reorder_cache(torch.tensor(left, device=self._model.device))
        self._rows = [self._rows[place] for place in left]
        if left and self._prefixes is not None:
            width = max(len(writing.text_ids) for writing in self._rows) - 1
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, -width:], layer.values[:, :, -width:]

    def _begin(self) -> None:
        """Put the parameters of the rows into tensors."""
        import torch

        rows = [writing.row for writing in self._rows]
        of_rows = functools.partial(torch.tensor, dtype=torch.float32, device=self._model.device)
        temperatures = [row.temperature or 1.0 for row in rows]
        self._temperature = of_rows(temperatures)[:, None] if set(temperatures) != {1.0} else None
        greedy = [row.temperature == 0 for row in rows]
        self._any_greedy, self._all_greedy = any(greedy), all(greedy)
        self._greedy = torch.tensor(greedy, device=self._model.device)
        self._cut = [place for place, row in enumerate(rows) if row.top_p < 1 and row.temperature > 0]
        self._top_p = of_rows([rows[place].top_p for place in self._cut])[:, None]

    def _choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Turn `[B, V]` logits into `[B, V]` scores with the maximum at the sampled token (`generate`'s processor)."""
        import torch

        logits = scores if self._temperature is None else scores / self._temperature
        probabilities = torch.softmax(logits, dim=-1)
        chosen = logits.argmax(dim=-1) if self._all_greedy else self._drawn(probabilities)
        if self._any_greedy and not self._all_greedy:
            chosen = torch.where(self._greedy, logits.argmax(dim=-1), chosen)
        self._chosen_logprobs = probabilities.gather(1, chosen[:, None])[:, 0].log()
        return scores.fill_(float("-inf")).scatter_(1, chosen[:, None], 0.0)

    def _drawn(self, probabilities: Tensor) -> Tensor:
        import torch

        if self._cut:
            probabilities = probabilities.clone()
            probabilities[self._cut] = _nucleus(probabilities[self._cut], self._top_p)
        draws = [[writing.draws.random()] for writing in self._rows]
        return words_at(probabilities, torch.tensor(draws, dtype=torch.float64))

    def _finish(self, input_ids: Tensor, scores: Any) -> Tensor:
        """Return `[B]` whether each row is done; all are if the call ends (`generate`'s criterion)."""
        import torch

        drawn = zip(self._rows, input_ids[:, -1].tolist(), self._chosen_logprobs.tolist(), strict=True)
        for writing, token, logprob in drawn:
            if writing.ended is None:  # a row keeps no token after its last one
                writing.token_ids.append(token)
                writing.logprobs.append(logprob)
                writing.ended = self._end(writing, token)
                if writing.ended is not None:
                    self._hand_out(writing, writing.ended)
        left = [place for place, writing in enumerate(self._rows) if writing.ended is None]
        ended = torch.ones(len(self._rows), dtype=torch.bool, device=input_ids.device)
        if not self._pause(len(left)) and len(left) > self._left:
            ended[left] = False
        return ended

    def _end(self, writing: _Writing, token: int) -> FinishReason | None:
        row, ids = writing.row, writing.token_ids
        if token in self._end_ids:
            return FinishReason.STOP
        if row.stop and cut_at_stop(self._chat.decode(ids[-tail_length(row.stop) :]), row.stop) is not None:
            return FinishReason.STOP
        if len(ids) >= row.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.OTHER if writing.future.cancelled() else None

    def _hand_out(self, writing: _Writing, reason: FinishReason) -> None:
        row = writing.row
        completion = sampled_completion(
            self._chat, row.prompt_ids, writing.token_ids, writing.logprobs, reason, row.stop, model=self._model
        )
        end([writing.future], value=completion)


def words_at(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Return the `[B]` words at which `[B, V]` probabilities, added up, exceed `[B, 1]` draws in [0, 1).

    One draw a row instead of one a word. The words keep their order, so rounding hardly moves what a draw hits.
    """
    from torch.nn.functional import pad

    # First the block of words, then the word: adding up all words one by one would take a tenth of a large model.
    blocks = pad(probabilities, (0, -probabilities.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    masses = blocks.sum(dim=-1).double()
    block, rest = _reached(masses, draws.to(masses.device) * masses.sum(dim=-1, keepdim=True))
    word, _ = _reached(blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double(), rest)
    return (block * _BLOCK + word)[:, 0]


def _reached(masses: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the `[B, 1]` places at which `[B, N]` masses, added up, exceed `[B, 1]` wanted ones, and the difference.

    A place has a mass above zero, even if rounding makes all of them together too little.
    """
    import torch

    sums = masses.cumsum(dim=-1)
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(sums, wanted, right=True), last)
    return place, (wanted - (sums - masses).gather(1, place)).clamp(min=0)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the most likely words that together reach `[B, 1]` top_p; of equal words the first stay."""
    most = probabilities.topk(min(_LIKELY_WORDS, probabilities.shape[1]), dim=-1).values
    if bool((most.sum(dim=-1, keepdim=True) < top_p).any()):
        most = probabilities.sort(dim=-1, descending=True).values
    # Rounding may keep the whole mass below top_p: then every word stays.
    last = (most.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True).clamp(max=most.shape[1] - 1)
    least = most.gather(1, last)
    above, equal = probabilities > least, probabilities == least
    kept = above | (equal & (equal.cumsum(dim=-1) <= last + 1 - above.sum(dim=-1, keepdim=True)))
    return probabilities.masked_fill(~kept, 0.0)


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
