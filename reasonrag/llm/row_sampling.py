"""One batch through transformers' `generate`, each row with its own seed, temperature, length and stop strings.

A row's samples come from its own random generator alone, so they do not depend on its batch mates. Its logits do, a
little: a batch of another shape sums floats in another order, about 1e-6 apart in float32 and 1e-2 in bfloat16. A near
tie between two tokens can therefore fall the other way in another batch; float32 makes that rare, not impossible.

On one CPU core and a vocabulary of 150,000, the choice costs about 4 ms per row and token, with top_p < 1 about 17 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reasonrag.core.types import Completion, FinishReason
from reasonrag.llm.base import cut_at_stop
from reasonrag.llm.chat_template import ChatTemplate

if TYPE_CHECKING:
    from torch import Tensor

# A token of the tail may decode to nothing (special tokens are skipped), or begin before the stop string.
_SPARE_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One completion wanted: `prompt_ids` `[P]`, and how to sample it. Temperature 0 is greedy."""

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
) -> list[Completion]:
    """`[len(rows)]` completions. Blocks; for a worker thread.

    Args:
        model: a causal language model of transformers whose `generation_config` is neutral.
        chat: its tokenizer.
        rows: what to generate, in one batch.
        end_ids: tokens that end a turn.
        interrupted: asked after every token; true ends the batch early, with `FinishReason.OTHER`.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = max(len(row.prompt_ids) for row in rows)
    # The mask hides the padding, so any id will do.
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
        attention_mask[index, width - len(row.prompt_ids) :] = 1
    sampler = _RowSampler(rows, chat, end_ids, model.device, interrupted)
    with torch.no_grad():  # not inference_mode: a model that is trained, too, may keep a tensor that it makes here
        model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            # No end token here: `generate` would overwrite the rows that are done with padding, for nothing.
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max(row.max_tokens for row in rows), pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([sampler.choose]),
            stopping_criteria=StoppingCriteriaList([sampler.finished]),
        )
    return sampler.completions()


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
        self._token_ids: list[list[int]] = [[] for _ in rows]
        self._ended: list[FinishReason | None] = [None] * len(rows)
        self._logprobs: list[Tensor] = []  # `[B]` per step
        self._generators = [torch.Generator(device).manual_seed(row.seed) for row in rows]
        temperatures = [row.temperature or 1.0 for row in rows]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        # Rounding may carry a cumulated mass past 1: infinity keeps every token where nothing is to be cut.
        masses = [row.top_p if row.top_p < 1 else float("inf") for row in rows]
        self._top_p = torch.tensor(masses, dtype=torch.float32, device=device)[:, None]
        self._cuts = any(row.top_p < 1 for row in rows)
        self._tails = [max((len(mark.encode()) for mark in row.stop), default=0) + _SPARE_TAIL_TOKENS for row in rows]

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[B, V]` logits to `[B, V]` scores whose maximum is the sampled token.

        Gumbel-max: the argmax of logits plus Gumbel noise is a sample of their softmax.
        """
        import torch

        logits = scores / self._temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        allowed = self._within_top_p(logprobs) if self._cuts else logits
        chosen = (allowed + self._noise(scores)).argmax(dim=-1, keepdim=True)
        self._logprobs.append(logprobs.gather(1, chosen)[:, 0])
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen, 0.0)

    def finished(self, input_ids: Tensor, scores: Any) -> Tensor:
        """`[B]` whether each row is done. A row takes no token after the one that ended it."""
        import torch

        stopped = self._interrupted()
        for index, token in enumerate(input_ids[:, -1].tolist()):
            if self._ended[index] is None:
                self._token_ids[index].append(token)
                self._ended[index] = FinishReason.OTHER if stopped else self._end(index, token)
        return torch.tensor([ended is not None for ended in self._ended], device=input_ids.device)

    def completions(self) -> list[Completion]:
        import torch

        logprobs = torch.stack(self._logprobs, dim=1).tolist()
        made = []
        for row, ids, ended, row_logprobs in zip(self._rows, self._token_ids, self._ended, logprobs, strict=True):
            text = self._chat.decode(ids)
            # The token that completes a stop string may hold more than its end: ids keep it whole, the text does not.
            made.append(
                Completion(
                    cut_at_stop(text, row.stop) or text,
                    ended or FinishReason.OTHER,
                    tuple(ids),
                    tuple(row_logprobs[: len(ids)]),
                    row.prompt_ids,
                    len(row.prompt_ids),
                    len(ids),
                )
            )
        return made

    def _end(self, index: int, token: int) -> FinishReason | None:
        row, ids = self._rows[index], self._token_ids[index]
        if token in self._end_ids:
            return FinishReason.STOP
        if row.stop and cut_at_stop(self._chat.decode(ids[-self._tails[index] :]), row.stop) is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= row.max_tokens else None

    def _within_top_p(self, logprobs: Tensor) -> Tensor:
        """The smallest set of most likely tokens whose mass reaches top_p; minus infinity elsewhere."""
        ordered, order = logprobs.sort(dim=-1, descending=True)
        mass = ordered.exp()
        ordered = ordered.masked_fill(mass.cumsum(dim=-1) - mass >= self._top_p, float("-inf"))
        return ordered.new_empty(ordered.shape).scatter_(1, order, ordered)

    def _noise(self, like: Tensor) -> Tensor:
        """`[B, V]` Gumbel noise, each row from its own generator; zero for greedy rows and rows that are done."""
        import torch

        noise = torch.zeros_like(like)
        for index, (row, generator) in enumerate(zip(self._rows, self._generators, strict=True)):
            if row.temperature > 0 and self._ended[index] is None:
                # Minus the logarithm of an exponential variable is a Gumbel one; zero would give infinity.
                tiny = torch.finfo(noise.dtype).tiny
                noise[index].exponential_(generator=generator).clamp_min_(tiny).log_().neg_()
        return noise
