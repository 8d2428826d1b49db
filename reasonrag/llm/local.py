"""A transformers model in this process: one worker thread writes the requests of many tasks in batches.

The worker knows no deadline. It waits for a request, or it computes; between two tokens it takes new requests. A
`Watch` checks that it makes progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import structlog

from reasonrag.core.calls import Slots
from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError, RunError, is_out_of_memory
from reasonrag.core.event_loop import CLOSE_S, beat
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import Sampling, caller
from reasonrag.llm.chat_template import ChatTemplate, loading, template_identity
from reasonrag.llm.machine import choose_threads, is_small, require_memory
from reasonrag.llm.model_folder import model_commit, model_identity, public_name
from reasonrag.llm.row_sampling import PrefixCache, Row, RowBatch, end, end_token_ids, inner_model, reusable, room_for

log = structlog.get_logger()

# How long an idle worker lets requests come before it begins, if they cannot join later.
_WINDOW_S = 0.005
_LET_GO_S = 60.0
# Others join a running batch if they are so many that a call of `generate` for them pays: a quarter of those running.
_JOIN_SHARE = 4


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    sampling: Sampling
    futures: list[Future[Completion]]


class TransformersLLM:
    """A causal language model of transformers, which never blocks the event loop.

    What prompts share is computed once (`prefix_cache`), and what earlier ones computed is kept, up to half a gigabyte.
    Samples depend on the seed and not on the rest of the batch, up to rounding (`row_sampling`). Logprobs are at the
    sampling temperature before top_p, and at temperature 1 for greedy rows.

    Attributes:
        slots: the requests in this engine: those of a batch that runs, and of the next.
        model: the loaded model; None after `aclose`.
        chat: its tokenizer and chat template.
    """

    model: Any
    _prefixes: PrefixCache | None  # of the current weights
    commit: str | None = None  # of a model from the Hub

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
        model: Any = load_model(path_or_name, device, dtype, revision, trust_remote_code)
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
            # Replies are there before the worker has let go of the model.
            if not self._in_use.acquire(timeout=_LET_GO_S):
                raise LLMError(f"{self.name} does not let go of the model that was lent to it", cause="stalled")
            self._in_use.release()
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
        # No `get` of it may have a timeout: in CPython 3.11, one that is over meanwhile becomes a wait for ever.
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._waiting: list[tuple[Row, Future[Completion]]] = []
        self._closed = threading.Event()
        self._in_use = threading.Lock()  # held while the worker computes
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

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
            RunError: the model's probabilities are NaN.
        """
        async with self.slots.request(caller.get().priority):
            if self._closed.is_set():
                raise self._closed_error()
            futures: list[Future[Completion]] = [Future() for _ in range(sampling.n)]
            self._queue.put(_Request(prompt, sampling, futures))
            first, *others = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return (first, *(replace(other, prompt_tokens=0) for other in others))

    async def aclose(self) -> None:
        """End the running batch, fail the waiting requests, and release the model."""
        self._closed.set()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self.model = self._prefixes = None

    def _work(self) -> None:
        while not self._closed.is_set() and self._receive(wait=not self._waiting):
            with self._in_use:
                self._write()
        self._receive(wait=False)
        end([future for _, future in self._waiting], self._closed_error())

    def _receive(self, *, wait: bool) -> bool:
        """Take the requests that have come, or wait for the first of them; return False if closed."""
        try:
            if wait:
                if not self._accept(self._queue.get()):
                    return False
                if self._prefixes is None:
                    time.sleep(_WINDOW_S)
            while self._accept(self._queue.get_nowait()):
                pass
        except queue.Empty:
            return True
        return False

    def _accept(self, request: _Request | None) -> bool:
        if request is None:
            return False
        try:
            rows = self._rows(request.prompt, request.sampling)
        except Exception as error:
            end(request.futures, error if isinstance(error, LLMError) else _failure(self.name, "refused", error))
        else:
            self._waiting += zip(rows, request.futures, strict=True)
        return True

    def _rows(self, prompt: Prompt, sampling: Sampling) -> list[Row]:
        prompt_ids = self.chat.token_ids(prompt)
        max_tokens = min(sampling.max_tokens, room_for(self.name, prompt_ids, self._context))
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        return [
            Row(prompt_ids, seed + index, sampling.temperature, sampling.top_p, max_tokens, prompt.stop)
            for index in range(sampling.n)
        ]

    def _write(self) -> None:
        """Write what waits, and what comes meanwhile, until nothing is left or a batch has failed."""
        batch = RowBatch(
            self.model, self.chat, end_ids=self._end_ids, prefixes=self._prefixes, pause=self._should_pause
        )
        begun: list[tuple[Row, Future[Completion]]] = []
        try:
            while not self._closed.is_set():
                begun = [item for item in begun if not item[1].done()]
                if batch.takes() and (joining := self._next_rows(self._batch_size - len(batch))):
                    begun += joining
                    batch.join(joining)
                if not batch:
                    return
                batch.write()
                self._receive(wait=False)
        except Exception as error:
            if not is_out_of_memory(error):
                failed = error if isinstance(error, RunError) else _failure(self.name, "engine", error)
                end([future for _, future in begun], failed)
                return
            failure = _failure(self.name, "out_of_memory", error)
        else:
            end([future for _, future in begun], self._closed_error())
            return
        del batch
        self._make_smaller(begun, failure)

    def _next_rows(self, room: int) -> list[tuple[Row, Future[Completion]]]:
        """Return the row that has waited longest, with the rows nearest in length: little padding, no starvation."""
        self._waiting = [item for item in self._waiting if not item[1].done()]
        if not self._waiting or room < 1:
            return []
        length = len(self._waiting[0][0].prompt_ids)
        nearest = sorted(self._waiting, key=lambda item: abs(len(item[0].prompt_ids) - length))[:room]
        taken = {id(item) for item in nearest}
        self._waiting = [item for item in self._waiting if id(item) not in taken]
        return nearest

    def _should_pause(self, rows: int) -> bool:
        """Return whether a batch should stop for others, as so many wait and fit that this pays."""
        beat()
        coming = min(len(self._waiting) + self._queue.qsize(), self._batch_size - rows)
        return self._closed.is_set() or (self._prefixes is not None and coming > 0 and coming * _JOIN_SHARE >= rows)

    def _make_smaller(self, begun: list[tuple[Row, Future[Completion]]], failure: LLMError) -> None:
        """Begin again with smaller batches; not in an `except`, where the traceback keeps the tensors alive."""
        import torch

        if self._prefixes is not None:
            self._prefixes = PrefixCache()
        torch.cuda.empty_cache()
        begun = [item for item in begun if not item[1].done()]
        if len(begun) < 2:
            end([future for _, future in begun], failure)
            return
        self._batch_size = min(self._batch_size, len(begun) // 2)
        log.warning("out of memory; continuing with smaller batches", llm=self.name, batch_size=self._batch_size)
        self._waiting = begun + self._waiting

    def _closed_error(self) -> LLMError:
        return LLMError(f"{self.name} is closed", cause="closed")


def _failure(name: str, cause: str, error: Exception) -> LLMError:
    return LLMError(f"{name}: {type(error).__name__}", quoting=error, cause=cause)


def load_model(
    path_or_name: str,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust: bool = False,
) -> Any:
    """Return a causal language model in evaluation mode; arguments and exceptions are those of `TransformersLLM`."""
    import torch
    from transformers import AutoModelForCausalLM

    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"{dtype!r} is not a dtype; use float32, bfloat16 or float16")
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        require_memory(
            path_or_name,
            dtype,
            revision=revision,
            doing="loading it",
            remedy="a smaller model, or a server (--policy http://HOST:PORT/v1)",
            instead=("bfloat16", 1, "--set policy.dtype=bfloat16"),
        )
    began = time.monotonic()
    with loading(path_or_name):
        model = AutoModelForCausalLM.from_pretrained(
            path_or_name, revision=revision, trust_remote_code=trust, dtype=dtype or "auto", use_safetensors=True
        )
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    torch.set_num_threads(choose_threads(model))
    if not is_small(model):
        log.info(
            f"{public_name(path_or_name)} is loaded",
            parameters=f"{model.num_parameters() / 1e6:,.0f} M",
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            **({"threads": torch.get_num_threads()} if model.device.type == "cpu" else {}),
            seconds=round(time.monotonic() - began, 1),
        )
    return model


def open_transformers(address: ModelAddress, config: ModelConfig) -> TransformersLLM:
    """Load the model at `hf:NAME_OR_PATH`, or the shipped one at `demo[:FORMAT]`, which runs on the CPU."""
    is_demo = address.scheme == "demo"
    identity = model_identity(address.model, config.revision) + template_identity(config.chat_template)
    llm = TransformersLLM(
        address.model,
        batch_size=config.batch_size,
        device="cpu" if is_demo else config.device,
        dtype="float32" if is_demo else config.dtype,
        name=f"hf:{identity}",
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        chat_template=config.chat_template,
    )
    llm.slots.limit = config.concurrency or llm.slots.limit
    llm.commit = None if is_demo else model_commit(address.model, config.revision)
    return llm
