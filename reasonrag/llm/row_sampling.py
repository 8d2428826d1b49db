"""Generate one batch with transformers' `generate`; each row has its own seed, temperature, length and stop strings.

Each row has its own random generator, so its draws do not depend on the rest of the batch. Its logits do slightly: in a
batch of another shape, floats are summed in another order, about 1e-6 apart in float32 and 1e-2 in bfloat16. A near tie
between two tokens can therefore have another winner in another batch; float32 makes that rare, not impossible.

On one CPU core and with 150,000 tokens, sampling costs about 4 ms per row and token, with top_p < 1 about 17 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Completion, FinishReason
from reasonrag.llm.base import cut_at_stop
from reasonrag.llm.chat_template import ChatTemplate

if TYPE_CHECKING:
    from torch import Tensor

    from reasonrag.llm.prefix_cache import PrefixCache

# A token at the end may decode to nothing (special tokens are skipped), or begin before the stop string.
_SPARE_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to generate: `prompt_ids` `[P]` and sampling parameters. Temperature 0 is greedy."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]


def generate_rows(
    model: Any,
    chat: ChatTemplate,
    rows: Sequence[Row],
    *,
    end_ids: Collection[int],
    interrupted: Callable[[], bool] = lambda: False,
    prefixes: PrefixCache | None = None,
) -> list[Completion]:
    """Return `[len(rows)]` completions. This blocks, so call it from a worker thread.

    Args:
        model: a causal language model of transformers with a neutral `generation_config`.
        chat: its tokenizer.
        rows: the completions to generate, in one batch.
        end_ids: tokens that end a turn.
        interrupted: called after every token; true ends the batch early, with `FinishReason.OTHER`.
        prefixes: what earlier prompts of the same weights share with these; None computes each prompt as a whole.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    sampler = _RowSampler(rows, chat, end_ids, model.device, interrupted)
    # A recurrent state is nothing that rows can be taken from.
    shrinks = not getattr(inner_model(model), "_is_stateful", False)
    with torch.no_grad():  # not inference_mode: a model in training may keep a tensor that is made here
        cache = None if prefixes is None else prefixes.filled(model, [row.prompt_ids for row in rows])
        # A call of `generate` computes all of its rows until it ends, so it ends as soon as half of them are done.
        while batch := sampler.begin(shrinks=shrinks):
            texts = [sampler.text_ids(index) for index in batch]
            held = 0 if cache is None else cache.get_seq_length()
            input_ids, attention_mask = left_padded(texts, max(held + 1, *map(len, texts)), model.device)
            made = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                # Without an end token here: `generate` would overwrite finished rows with padding.
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=sampler.longest_rest,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                ),
                logits_processor=LogitsProcessorList([sampler.choose]),
                stopping_criteria=StoppingCriteriaList([sampler.finished]),
                **({} if cache is None else {"past_key_values": cache}),
            )
            if rest := sampler.unfinished:
                cache = made.past_key_values
                cache.reorder_cache(torch.tensor(rest, device=model.device))
    return sampler.completions()


def left_padded(prompts: Sequence[Sequence[int]], width: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return `[B, width]` ids and their attention mask. The mask hides the padding, so any id will do there."""
    import torch

    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for index, ids in enumerate(prompts):
        input_ids[index, width - len(ids) :] = torch.tensor(ids)
        mask[index, width - len(ids) :] = 1
    return input_ids.to(device), mask.to(device)


def sampled_completion(
    chat: ChatTemplate,
    prompt_ids: tuple[int, ...],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    reason: FinishReason,
    stop: tuple[str, ...],
) -> Completion:
    """Build the completion of sampled ids.

    The token that completes a stop string may hold more characters: the ids keep it whole, the text ends at the string.
    """
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


class _RowSampler:
    """Chooses each row's next token (`generate`'s logits processor) and ends each row (its stopping criterion)."""

    def __init__(
        self,
        rows: Sequence[Row],
        chat: ChatTemplate,
        end_ids: Collection[int],
        device: Any,
        interrupted: Callable[[], bool],
    ) -> None:
        import torch

        self._rows, self._chat, self._end_ids, self._interrupted = rows, chat, frozenset(end_ids), interrupted
        self._device = device
        self._token_ids: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[list[float]] = [[] for _ in rows]
        self._ended: list[FinishReason | None] = [None] * len(rows)
        self._generators = [torch.Generator(device).manual_seed(row.seed) for row in rows]
        self._tails = [tail_length(row.stop) for row in rows]

    def begin(self, *, shrinks: bool) -> list[int]:
        """Start a call of `generate` with the rows that are not done yet, `[B]`; return their places in the batch.

        With `shrinks` the call ends when at most half of its rows are left, else when none is.
        """
        import torch

        self._batch = [index for index, ended in enumerate(self._ended) if ended is None]
        self._left = len(self._batch) // 2 if shrinks else 0
        rows = [self._rows[index] for index in self._batch]
        temperatures = [row.temperature or 1.0 for row in rows]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=self._device)[:, None]
        # Rounding may carry the cumulated mass past 1; with infinity, rows without top_p keep every token.
        masses = [row.top_p if row.top_p < 1 else float("inf") for row in rows]
        self._top_p = torch.tensor(masses, dtype=torch.float32, device=self._device)[:, None]
        self._cuts = any(row.top_p < 1 for row in rows)
        return self._batch

    def text_ids(self, index: int) -> tuple[int, ...]:
        """Return prompt and tokens so far of a row."""
        return (*self._rows[index].prompt_ids, *self._token_ids[index])

    @property
    def longest_rest(self) -> int:
        """The most tokens that a row of the current call may still get."""
        return max(self._rows[index].max_tokens - len(self._token_ids[index]) for index in self._batch)

    @property
    def unfinished(self) -> list[int]:
        """The rows of the current call that are not done, by their places in it."""
        return [place for place, index in enumerate(self._batch) if self._ended[index] is None]

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Turn `[B, V]` logits into `[B, V]` scores whose maximum is the sampled token.

        Gumbel-max: the argmax of logits plus Gumbel noise is a sample of their softmax.
        """
        import torch

        logits = scores / self._temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        allowed = self._within_top_p(logprobs) if self._cuts else logits
        chosen = (allowed + self._noise(scores)).argmax(dim=-1, keepdim=True)
        self._chosen_logprobs = logprobs.gather(1, chosen)[:, 0]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen, 0.0)

    def finished(self, input_ids: Tensor, scores: Any) -> Tensor:
        """Return `[B]` whether each row is done; all are if the call ends. A row keeps no token after its last one."""
        import torch

        stopped = self._interrupted()
        drawn = zip(self._batch, input_ids[:, -1].tolist(), self._chosen_logprobs.tolist(), strict=True)
        for index, token, logprob in drawn:
            if self._ended[index] is None:
                self._token_ids[index].append(token)
                self._logprobs[index].append(logprob)
                self._ended[index] = FinishReason.OTHER if stopped else self._end(index, token)
        rest = self.unfinished
        ended = torch.ones(len(self._batch), dtype=torch.bool, device=input_ids.device)
        if len(rest) > self._left:
            ended[rest] = False
        return ended

    def completions(self) -> list[Completion]:
        completions = []
        for row, ids, ended, logprobs in zip(self._rows, self._token_ids, self._ended, self._logprobs, strict=True):
            reason = ended or FinishReason.OTHER
            completions.append(sampled_completion(self._chat, row.prompt_ids, ids, logprobs, reason, row.stop))
        return completions

    def _end(self, index: int, token: int) -> FinishReason | None:
        row, ids = self._rows[index], self._token_ids[index]
        if token in self._end_ids:
            return FinishReason.STOP
        if row.stop and cut_at_stop(self._chat.decode(ids[-self._tails[index] :]), row.stop) is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= row.max_tokens else None

    def _within_top_p(self, logprobs: Tensor) -> Tensor:
        """Keep the smallest set of most likely tokens whose mass reaches top_p; the others become minus infinity."""
        ordered, order = logprobs.sort(dim=-1, descending=True)
        mass = ordered.exp()
        ordered = ordered.masked_fill(mass.cumsum(dim=-1) - mass >= self._top_p, float("-inf"))
        return ordered.new_empty(ordered.shape).scatter_(1, order, ordered)

    def _noise(self, like: Tensor) -> Tensor:
        """Return `[B, V]` Gumbel noise from each row's generator; zero for greedy and finished rows."""
        import torch

        noise = torch.zeros_like(like)
        for place, index in enumerate(self._batch):
            if self._rows[index].temperature > 0 and self._ended[index] is None:
                # Minus the logarithm of an exponential variable has a Gumbel distribution; zero would give infinity.
                tiny = torch.finfo(noise.dtype).tiny
                noise[place].exponential_(generator=self._generators[index]).clamp_min_(tiny).log_().neg_()
        return noise
