"""A transformers model in this process: one worker thread gathers the requests of many tasks into batches."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any

import structlog

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import Sampling, public_name
from reasonrag.llm.chat_template import ChatTemplate, cannot_load, check_folder
from reasonrag.llm.memory import require_memory
from reasonrag.llm.prefix_cache import PrefixCache, reusable
from reasonrag.llm.row_sampling import Row, end_token_ids, generate_rows, inner_model, room_for
from reasonrag.llm.slots import Slots

log = structlog.get_logger()

# How long an incomplete batch waits for more requests: about the time until a finished question sends its next one.
_WINDOW_S = 0.005
# A model with fewer parameters gains nothing from a second thread on the CPU.
_SMALL = 20_000_000


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    sampling: Sampling
    futures: list[Future[Completion]]


@dataclass(slots=True)
class _Waiting:
    row: Row
    future: Future[Completion]


class TransformersLLM:
    """A causal language model of transformers, which never blocks the event loop.

    What prompts share is computed once (`prefix_cache`), and what earlier ones computed is kept, up to half a gigabyte.
    Samples depend on the seed and not on the rest of the batch (`row_sampling` says how exactly); CPU and GPU draw
    different numbers from the same seed. Logprobs are at the sampling temperature before top_p, and at temperature 1
    for greedy rows.

    Attributes:
        slots: the requests in this engine: those of a batch that runs, and of the next.
        model: the loaded model; None after `aclose`.
        chat: its tokenizer and chat template.
    """

    model: Any
    _prefixes: PrefixCache | None  # of the current weights

    def __init__(
        self,
        path_or_name: str,
        *,
        batch_size: int = 16,
        device: str | None = None,
        dtype: str | None = None,
        name: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Load the model, which takes seconds to minutes.

        Args:
            path_or_name: a folder or a Hub name.
            batch_size: largest number of rows in a batch. Halved for good if the device runs out of memory.
            device: `cpu`, `cuda:0`, ...; None takes a GPU if there is one, else the CPU.
            dtype: such as `bfloat16`; None takes that of the files.
            name: name in run identities; None takes the Hub name or the folder's name.
            trust_remote_code: whether to run code that comes with the model.
            revision: revision of a Hub model.
            chat_template: as `template` of `ChatTemplate.load`.

        Raises:
            ConfigError: the model cannot be loaded, or has no chat template.
        """
        chat = ChatTemplate.load(
            path_or_name, revision=revision, trust_remote_code=trust_remote_code, template=chat_template
        )
        model: Any = _load(path_or_name, device, dtype, revision, trust_remote_code)
        self._start(model, chat, name=name or public_name(path_or_name), batch_size=batch_size)

    @classmethod
    def borrowing(cls, chat: ChatTemplate, *, name: str, batch_size: int = 16) -> TransformersLLM:
        """Create an engine without a model; it works while one is lent to it."""
        llm = cls.__new__(cls)
        llm._start(None, chat, name=name, batch_size=batch_size)
        return llm

    @contextlib.contextmanager
    def lent(self, model: Any) -> Iterator[None]:
        """Use weights that a trainer holds and changes, without a second copy.

        No request may be running when this ends. The model is in evaluation mode in the block, and restored afterwards.
        """
        inner = inner_model(model)
        defaults, training = inner.generation_config, model.training
        self._take(model)
        model.eval()
        try:
            yield
        finally:
            self.model = self._prefixes = None  # the trainer changes the weights
            inner.generation_config = model.generation_config = defaults
            model.train(training)

    def _start(self, model: Any, chat: ChatTemplate, *, name: str, batch_size: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size has to be at least 1, not {batch_size}")
        self.name = name
        self.chat = chat
        self.model = None
        self._prefixes = None
        self._end_ids: frozenset[int] = frozenset()
        self._context = 2**31
        self._batch_size = batch_size
        self.slots = Slots(2 * batch_size)  # a batch that runs, and the requests of the next
        if model is not None:
            self._take(model)
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()  # so that nothing is queued after the None that ends the worker
        self._closed = threading.Event()
        self._worker = threading.Thread(target=self._work, name=f"llm-{self.name}", daemon=True)
        self._worker.start()

    def _take(self, model: Any) -> None:
        from transformers import GenerationConfig

        self.model = model
        self._end_ids = end_token_ids(model, self.chat)
        model.generation_config = GenerationConfig()  # without the model's sampling defaults (top_k, penalties)
        self._context = int(getattr(model.config, "max_position_embeddings", None) or 2**31)
        self._prefixes = PrefixCache() if reusable(model) else None

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Return `[n]` completions with token ids and logprobs. The prompt's tokens are counted on the first one.

        Raises:
            LLMError: with cause `refused` (the template rejects the chat), `context_overflow`, `out_of_memory`,
                `engine` (any other failure of generation) or `closed`.
        """
        futures: list[Future[Completion]] = [Future() for _ in range(sampling.n)]
        async with self.slots.request():
            with self._lock:
                if self._closed.is_set():
                    raise self._closed_error()
                self._queue.put(_Request(prompt, sampling, futures))
            first, *others = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return (first, *(replace(other, prompt_tokens=0) for other in others))

    async def aclose(self) -> None:
        """End the running batch, fail the waiting requests, and release the model."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._queue.put(None)
        await asyncio.to_thread(self._worker.join)
        self.model = self._prefixes = None

    def _work(self) -> None:
        while self._gather():
            self._run(self._next_batch())
        _fail([item.future for item in self._waiting], self._closed_error())

    def _gather(self) -> bool:
        """Take requests until a batch is full or the window is over; return False if closed."""
        deadline = time.monotonic() + _WINDOW_S
        while True:
            if not self._waiting:
                request = self._queue.get()
                deadline = time.monotonic() + _WINDOW_S
            else:
                full = len(self._waiting) >= self._batch_size
                try:
                    request = self._queue.get(timeout=0.0 if full else max(deadline - time.monotonic(), 0.0))
                except queue.Empty:
                    return True
            if request is None:
                return False
            self._accept(request)

    def _accept(self, request: _Request) -> None:
        try:
            rows = self._rows(request.prompt, request.sampling)
        except Exception as error:
            _fail(request.futures, error if isinstance(error, LLMError) else _failure(self.name, "refused", error))
            return
        self._waiting += [_Waiting(row, future) for row, future in zip(rows, request.futures, strict=True)]

    def _rows(self, prompt: Prompt, sampling: Sampling) -> list[Row]:
        prompt_ids = self.chat.token_ids(prompt)
        max_tokens = min(sampling.max_tokens, room_for(self.name, prompt_ids, self._context))
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        return [
            Row(prompt_ids, seed + index, sampling.temperature, sampling.top_p, max_tokens, prompt.stop)
            for index in range(sampling.n)
        ]

    def _next_batch(self) -> list[_Waiting]:
        """Return the row that has waited longest, with the rows nearest in length: little padding, no starvation."""
        if not self._waiting:
            return []
        length = len(self._waiting[0].row.prompt_ids)
        by_length = sorted(range(len(self._waiting)), key=lambda i: abs(len(self._waiting[i].row.prompt_ids) - length))
        taken = set(by_length[: self._batch_size])
        batch, remaining = [], []
        for index, item in enumerate(self._waiting):
            if index not in taken:
                remaining.append(item)
            elif item.future.set_running_or_notify_cancel():
                batch.append(item)
        self._waiting = remaining
        return batch

    def _run(self, batch: list[_Waiting]) -> None:
        import torch

        if not batch:
            return
        futures = [item.future for item in batch]
        try:
            rows = [item.row for item in batch]
            completions = generate_rows(
                self.model,
                self.chat,
                rows,
                end_ids=self._end_ids,
                interrupted=self._closed.is_set,
                prefixes=self._prefixes,
            )
        except torch.OutOfMemoryError as error:
            failure = _failure(self.name, "out_of_memory", error)
        except Exception as error:
            _fail(futures, _failure(self.name, "engine", error))
            return
        else:
            if self._closed.is_set():
                _fail(futures, self._closed_error())
                return
            for future, completion in zip(futures, completions, strict=True):
                future.set_result(completion)
            return
        self._run_in_halves(batch, failure)

    def _run_in_halves(self, batch: list[_Waiting], failure: LLMError) -> None:
        """Retry a batch that was too large; not in its `except`, where the traceback keeps the tensors alive."""
        import torch

        if self._prefixes is not None:
            self._prefixes = PrefixCache()
        torch.cuda.empty_cache()
        if len(batch) == 1:
            _fail([batch[0].future], failure)
            return
        half = len(batch) // 2
        self._batch_size = min(self._batch_size, half)
        log.warning("out of memory; continuing with smaller batches", llm=self.name, batch_size=self._batch_size)
        self._run(batch[:half])
        self._run(batch[half:])

    def _closed_error(self) -> LLMError:
        return LLMError(f"{self.name} is closed", cause="closed")


def _fail(futures: Iterable[Future[Completion]], failure: LLMError) -> None:
    for future in futures:
        with contextlib.suppress(InvalidStateError):  # cancelled by the caller
            future.set_exception(failure)


def _failure(name: str, cause: str, error: Exception) -> LLMError:
    return LLMError(f"{name}: {type(error).__name__}", quoting=error, cause=cause)


def _load(path_or_name: str, device: str | None, dtype: str | None, revision: str | None, trust: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    check_folder(path_or_name)
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"{dtype!r} is not a dtype; use float32, bfloat16 or float16")
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        require_memory(
            path_or_name,
            dtype,
            revision=revision,
            doing="loading it",
            remedy="take a smaller model, --set policy.dtype=bfloat16, or a server (--policy http://HOST:PORT/v1)",
            instead=("bfloat16", 1, "--set policy.dtype=bfloat16"),
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path_or_name, revision=revision, trust_remote_code=trust, dtype=dtype or "auto", use_safetensors=True
        )
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        raise cannot_load(path_or_name, error) from error
    # The matrices of a small model are too small to split, and on a busy machine each short operation waits for the
    # slower of two threads. The setting applies to the whole process: a large model on the CPU needs another process.
    if model.device.type == "cpu" and sum(weights.numel() for weights in model.parameters()) < _SMALL:
        torch.set_num_threads(1)
    return model
