"""A transformers model in this process, for CPUs, tests and small models: one thread writes requests in batches.

Each row of a batch has its own seed, temperature, length and stop strings, and its own random generator,
so its draws do not depend on the rest of the batch. Its logits do slightly: in a batch of another shape,
floats are summed in another order, about 1e-6 apart in float32 and 1e-2 in bfloat16. A draw that falls on
the border of two tokens, or a near tie of greedy decoding, can therefore have another winner; float32
makes that rare, not impossible.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import secrets
import select
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, DynamicLayer

from reasonrag.core.calls import Slots
from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.event_loop import CLOSE_S, beat
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import common_length
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import Sampling, caller, cut_at_stop
from reasonrag.llm.chat_template import ChatTemplate, load_causal, template_identity
from reasonrag.llm.model_folder import choose_threads, first_not_finite, model_commit, model_identity, require_memory

log = structlog.get_logger()

# How long an idle worker lets requests come before it begins: rows cannot join a batch later.
_WINDOW_S = 0.005
# A token at the end may decode to nothing (special tokens are skipped), or begin before the stop string.
_SPARE_TAIL_TOKENS = 16
_WORTH_TOKENS = 128  # a shorter beginning that prompts share does not pay for a forward pass by itself


@dataclass(slots=True, eq=False)
class _Row:
    """One completion: what was asked for, its tokens so far, and the future that gets it."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    draws: Random
    future: Future[Completion] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Give the caller an error, if it still waits."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class TransformersLLM:
    """A causal language model of transformers, which never blocks the event loop.

    Logprobs are at the sampling temperature before top_p, and at temperature 1 for greedy rows.

    Attributes:
        slots: the requests in this engine: those of a batch that runs, and of the next.
        model: the loaded model; None after `aclose`.
        chat: its tokenizer and chat template.
    """

    commit: str | None = None  # of a model from the Hub

    def __init__(self, chat: ChatTemplate, *, name: str, batch_size: int = 16, model: Any = None) -> None:
        """Start the engine.

        Args:
            chat: the model's tokenizer and chat template.
            name: of the model, in run identities.
            batch_size: largest number of rows in a batch.
            model: a loaded model; with None, the engine works while one is lent to it.
        """
        self.name = name
        self.chat = chat
        self.decode = chat.decode
        self.model: Any = None
        self._batch_size = batch_size
        # A batch that runs, and the requests of the next: with
        # fewer the worker would wait for them in between.
        self.slots = Slots(2 * batch_size)
        # No `get` of it may have a timeout: in CPython 3.11,
        # one that is over meanwhile becomes a wait for ever.
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._in_use = threading.Lock()  # held while the worker computes
        if model is not None:
            chat.check_fits(model)
            self._take(model)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def lent(self, model: Any) -> Iterator[None]:
        """Use weights that a trainer holds and changes, without a second copy.

        No request may be running when this ends. The model is in
        evaluation mode in the block, and restored afterwards.
        """
        training = model.training
        # Dropout would make another text of each request, and gradient checkpointing turns the cache off.
        self._take(model)
        model.eval()
        try:
            yield
        finally:
            with self._in_use:  # replies are there before the worker has let go of the model
                self.model = None
            model.train(training)

    def _take(self, model: Any) -> None:
        self.model = model
        self._end_ids = end_token_ids(model, self.chat)
        # Some models have no such bound, or None there.
        self._context = int(getattr(model.config, "max_position_embeddings", None) or 2**31)

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion with token ids and logprobs.

        Raises:
            LLMError: with cause `refused` (the template rejects the chat), `context_overflow`,
                `engine` (any other failure of generation) or `closed`.
            RunError: the model's probabilities are NaN.
        """
        async with self.slots.request(caller.get().priority):
            if self._closed.is_set():
                raise self._closed_error()
            row = self._row(prompt, sampling)
            self._queue.put(row)
            return await asyncio.wrap_future(row.future)

    async def aclose(self) -> None:
        """End the running batch, fail the waiting requests, and release the model."""
        self._closed.set()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self.model = None

    def _row(self, prompt: Prompt, sampling: Sampling) -> _Row:
        try:
            prompt_ids = self.chat.token_ids(prompt)
        except Exception as error:  # templates may raise anything
            raise self._failure("refused", error) from error
        if (room := self._context - len(prompt_ids)) < 1:
            problem = f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self._context}"
            raise LLMError(f"{self.name}: {problem}", cause="context_overflow")
        max_tokens = min(sampling.max_tokens, room)
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        return _Row(prompt_ids, sampling, max_tokens, prompt.stop, Random(seed))

    def _work(self) -> None:
        waiting: list[_Row] = []
        while not self._closed.is_set():
            if not waiting and (row := self._queue.get()) is not None:
                waiting.append(row)
                # A wait for a relative time: `time.sleep` ends at an
                # absolute one, which a clock that jumps moves away.
                select.select((), (), (), _WINDOW_S)
            waiting += self._arrived()
            if batch := _next_batch(waiting, self._batch_size):
                with self._in_use:
                    self._write(batch)
        for row in waiting + self._arrived():
            row.fail(self._closed_error())

    def _arrived(self) -> list[_Row]:
        arrived = [self._queue.get() for _ in range(self._queue.qsize())]
        return [row for row in arrived if row is not None]

    def _write(self, rows: Sequence[_Row]) -> None:
        """Write rows to their ends; if anything fails, every row that is not done gets the error."""
        try:
            self._decode(rows)
            error: BaseException = self._closed_error()
        except Exception as failure:
            error = failure if isinstance(failure, RunError) else self._failure("engine", failure)
        for row in rows:
            row.fail(error)

    def _decode(self, rows: Sequence[_Row]) -> None:
        """Compute the prompts, then a token of every row at a time."""
        running = list(rows)
        with torch.no_grad():  # not inference_mode: a model in training may keep a tensor that is made here
            logits, cache, mask, rows_of = self._read(rows)
            cache.reorder_cache(rows_of)
            logits, mask = logits[rows_of], mask[rows_of]
            while True:
                tokens, logprobs = _choose(logits, running)
                left = self._append(running, tokens.tolist(), logprobs.tolist())
                beat()
                if self._closed.is_set() or not left:
                    return
                # Rows that are done stay in the batch until half
                # of them are: to leave copies the whole cache.
                if 2 * len(left) <= len(running):
                    keep = torch.tensor(left)
                    running = [running[index] for index in left]
                    cache.reorder_cache(keep)
                    tokens, mask = tokens[keep], mask[keep]
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                logits, cache = self._forward(tokens[:, None], mask, cache)

    def _read(self, rows: Sequence[_Row]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Compute the prompts of rows; those of one prompt share its computation.

        Returns:
            `[P, V]` float32 logits behind each of P prompts, their cache, `[P, T]` their tokens without the padding,
            and `[B]` the number of each row's prompt.
        """
        numbers: dict[tuple[int, ...], int] = {}
        of_rows = [numbers.setdefault(row.prompt_ids, len(numbers)) for row in rows]
        if (shared := _shared_tokens(numbers)) and not _attends_to_all(self.model):
            shared = 0
        ends, mask = padded([ids[shared:] for ids in numbers], side="left")
        rows_of, cache = torch.tensor(of_rows), None
        if shared:
            beginning = torch.tensor([next(iter(numbers))[:shared]])
            _, cache = self._forward(beginning, torch.ones_like(beginning), None)
            cache.reorder_cache(rows_of.new_zeros(len(numbers)))
            mask = torch.cat([mask.new_ones(len(mask), shared), mask], dim=1)
        return *self._forward(ends, mask, cache), mask, rows_of

    def _forward(self, input_ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Run the model on `[B, T]` new tokens behind those of the cache; return `[B, V]` logits, and the cache."""
        # `[B, T]` positions without the padding. The model alone is on its device.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        placed = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
        placed = {name: tensor.to(self.model.device) for name, tensor in placed.items()}
        output = self.model(**placed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # In float32: a softmax over many words loses too much in bfloat16.
        return output.logits[:, -1].float().cpu(), output.past_key_values

    def _append(self, rows: Sequence[_Row], tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        """Add a token to each row and deliver the finished rows; return the numbers of the others."""
        left = []
        for number, (row, token, logprob) in enumerate(zip(rows, tokens, logprobs, strict=True)):
            # Done earlier, or cancelled by its caller.
            if row.future.done():
                continue
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if (reason := self._finish_reason(row, token)) is None:
                left.append(number)
                continue
            completion = sampled_completion(
                self.chat, row.prompt_ids, row.token_ids, row.logprobs, reason, row.stop, model=self.model
            )
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                row.future.set_result(completion)
        return left

    def _finish_reason(self, row: _Row, token: int) -> FinishReason | None:
        if token in self._end_ids:
            return FinishReason.STOP
        if row.stop:
            # Decodes as many of the last tokens as any stop string that ends in them can have.
            tail_length = max(len(mark.encode()) for mark in row.stop) + _SPARE_TAIL_TOKENS
            if cut_at_stop(self.chat.decode(row.token_ids[-tail_length:]), row.stop) is not None:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(row.token_ids) >= row.max_tokens else None

    def _failure(self, cause: str, error: Exception) -> LLMError:
        return LLMError(f"{self.name}: {type(error).__name__}", quoting=error, cause=cause)

    def _closed_error(self) -> LLMError:
        return LLMError(f"{self.name} is closed", cause="closed")


def _next_batch(waiting: list[_Row], batch_size: int) -> list[_Row]:
    """Take the row that has waited longest, and the rows nearest in length: little padding, no starvation."""
    waiting[:] = [row for row in waiting if not row.future.done()]
    if not waiting:
        return []
    length = len(waiting[0].prompt_ids)
    nearest = sorted(waiting, key=lambda row: abs(len(row.prompt_ids) - length))[:batch_size]
    waiting[:] = [row for row in waiting if row not in nearest]
    return nearest


def _shared_tokens(prompts: Collection[tuple[int, ...]]) -> int:
    """Return how many tokens all prompts begin with, but for the last of each; 0 if they are too few to pay."""
    if len(prompts) < 2:
        return 0
    # No other two have less in common.
    shared = min(common_length(min(prompts), max(prompts)), min(map(len, prompts)) - 1)
    return shared if shared >= _WORTH_TOKENS else 0


def _attends_to_all(model: Any) -> bool:
    """Return whether each layer attends to all tokens before.

    Else padding behind a shared beginning would count in a window, or change a recurrent state.
    """
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def padded(rows: Sequence[Sequence[int]], *, side: str) -> tuple[Tensor, Tensor]:
    """Return `[R, T]` ids and their attention mask, padded at the side `left` or `right`."""
    ids = [torch.tensor(row) for row in rows]
    columns = (ids, [torch.ones_like(row) for row in ids])
    input_ids, mask = (pad_sequence(column, batch_first=True, padding_side=side) for column in columns)
    return input_ids, mask


def _choose(logits: Tensor, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
    """Return the next token of each row and its log-probability, `[B]` each, from `[B, V]` logits."""
    # Greedy rows report log-probabilities at temperature 1.
    temperatures = torch.tensor([row.sampling.temperature for row in rows])[:, None]
    is_greedy = temperatures[:, 0] == 0
    probabilities = torch.softmax(logits / torch.where(temperatures == 0, 1, temperatures), dim=-1)
    nuclei = torch.tensor([row.sampling.top_p for row in rows])[:, None]
    kept = probabilities if bool((nuclei >= 1).all()) else nucleus(probabilities, nuclei)
    # One draw a row from its own generator, in each step: whoever else is in the batch changes none.
    draws = torch.tensor([[row.draws.random()] for row in rows], dtype=torch.float64)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), words_at(kept, draws))
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log()


def words_at(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Return the `[B]` words at which `[B, V]` probabilities, added up, exceed `[B, 1]` draws in [0, 1).

    The words keep their order, so rounding hardly moves what a draw hits.
    """
    sums = probabilities.double().cumsum(dim=-1)
    total = sums[:, -1:]
    # Rounding may not reach a word behind the last one with a mass.
    last = (sums < total).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(sums, draws * total, right=True), last)[:, 0]


def nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the most likely words that together reach `[B, 1]` top_p; of equal words the first stay."""
    # Sums before each word: the first one stays, whatever its mass.
    ordered, words = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    # Rounding may keep the whole mass below 1, and then no word is cut.
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    return torch.zeros_like(probabilities).scatter(1, words, ordered)


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

    The token that completes a stop string may hold more
    characters: the ids keep it whole, the text ends at the
    string. `model` is what sampled them, for the error.

    Raises:
        RunError: a log-probability is NaN or infinite, so that nothing the model writes means anything.
    """
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        broken = None if model is None else first_not_finite(model)
        why = f"its weights hold NaN or infinities, first in {broken}" if broken else "its activations overflow"
        remedy = "take an earlier checkpoint, or copy its files again" if broken else "load it in float32 or bfloat16"
        raise RunError(f"the policy's probabilities are not finite numbers: {why}; {remedy}")
    # The end token decodes to nothing, and stays in the ids.
    text = chat.decode(token_ids)
    kept = None if logprobs is None else tuple(logprobs[: len(token_ids)])
    counts = (len(prompt_ids), len(token_ids))
    return Completion(cut_at_stop(text, stop) or text, reason, tuple(token_ids), kept, prompt_ids, *counts)


def end_token_ids(model: Any, chat: ChatTemplate) -> frozenset[int]:
    """Return the tokens that end a turn, by the model's generation config, its tokenizer and its chat template."""
    configured = model.generation_config.eos_token_id
    end_ids = configured if isinstance(configured, list) else [configured]
    return frozenset((*end_ids, chat.tokenizer.eos_token_id, chat.end_of_turn)) - {None}


def load_model(path_or_name: str, config: ModelConfig) -> Any:
    """Return a causal language model of a folder or a Hub name in evaluation mode.

    `config` has device, dtype, revision and whether code that
    comes with the model is run. Without a device it is a GPU if
    there is one, else the CPU; without a dtype that of the files.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        require_memory(
            path_or_name,
            config.dtype,
            revision=config.revision,
            remedy="a smaller model, --set policy.dtype=bfloat16, or a server (--policy http://HOST:PORT/v1)",
        )
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    model = load_causal(path_or_name, dtype=config.dtype or "auto", **options).to(device).eval()
    torch.set_num_threads(choose_threads(model))
    return model


def open_transformers(address: ModelAddress, config: ModelConfig) -> TransformersLLM:
    """Load the model at `hf:NAME_OR_PATH`, or the shipped one at `demo[:FORMAT]`, which runs on the CPU."""
    is_demo = address.scheme == "demo"
    identity = model_identity(address.model, config.revision) + template_identity(config.chat_template)
    loaded: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    chat = ChatTemplate.load(address.model, template=config.chat_template, **loaded)
    on_cpu = config.model_copy(update={"device": "cpu", "dtype": "float32"})
    model = load_model(address.model, on_cpu if is_demo else config)
    if model.device.type != "cpu":
        log.warning(f"hf: is for CPUs, tests and tiny models; on a GPU, --policy vllm:{address.rest} or a vLLM server")
    llm = TransformersLLM(chat, name=f"hf:{identity}", batch_size=config.batch_size, model=model)
    llm.slots.limit = config.concurrency or llm.slots.limit
    llm.commit = None if is_demo else model_commit(address.model, config.revision)
    return llm
