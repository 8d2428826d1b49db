"""Sample from a trainer's own weights with transformers' continuous batching, where no request waits for a batch.

Written for transformers 5.23, whose manager stops on token ids only and has one temperature for all requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reasonrag.core.errors import ConfigError, LLMError, RunError, is_out_of_memory
from reasonrag.core.slots import Slots
from reasonrag.core.types import Completion, FinishReason, Prompt
from reasonrag.llm.base import LLM, Sampling, caller, cut_at_stop
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.row_sampling import end_token_ids, inner_model, room_for, sampled_completion, tail_length

# Layers whose cache transformers can page; any other kind ends its thread at the first request.
_PAGED = frozenset({"full_attention", "sliding_attention"})
# Share of the memory that is free when a manager opens; the rest is for forward passes and other processes.
_MEMORY_SHARE = 0.7
# On a CPU the cache would otherwise be sized by the machine's whole memory.
_CPU_PAGE, _CPU_CACHE_TOKENS, _CPU_BATCH_TOKENS = 32, 16_384, 256
_STOP_S = 60.0
_CHECK_S = 1.0  # how often a waiting call checks that the manager's thread is alive


class BorrowingLLM(LLM, Protocol):
    """An LLM that works on a model lent to it."""

    def lent(self, model: Any) -> AbstractContextManager[None]:
        """Answer requests with these weights. No request may be running when this ends; the model is restored."""
        ...


def unsupported(model: Any) -> str | None:
    """Return why continuous batching cannot run a model, or None if it can."""
    inner = inner_model(model)
    name = type(inner).__name__
    if not hasattr(inner, "init_continuous_batching"):
        return f"{name} has no continuous batching in this version of transformers"
    if getattr(inner, "_is_stateful", False) or not getattr(inner, "_supports_attention_backend", False):
        return f"{name} has no attention cache that can be paged"
    layer_types = set(getattr(inner.config.get_text_config(), "layer_types", None) or ())
    unpaged = sorted(layer_types - _PAGED)
    return f"{name} has layers of kind {', '.join(unpaged)}, whose state cannot be paged" if unpaged else None


class ContinuousLLM:
    """Continuous batching with weights that a trainer holds and changes, without a second copy.

    Logprobs are at the sampling temperature, and at temperature 1 for greedy requests. With `top_p` below 1 there are
    none: the manager knows only the truncated distribution. A stop string ends a request at the token that completes
    it, as in `row_sampling`, though a few more tokens may have been computed.

    A manager has one temperature and one top_p, and two managers on one model give wrong numbers. So requests with
    other parameters wait until no request of the current ones is running.

    The manager computes blocks of tokens that requests of a loan begin with once, where the model allows it.

    Seeds are not honoured per request: all requests draw from one random stream, in the order of batching. The first
    request's seed starts the stream, so a single request is reproducible, and many concurrent ones are not. Training is
    exact nevertheless: ids and logprobs are the sampled ones.
    """

    def __init__(self, chat: ChatTemplate, *, name: str, batch_size: int = 64) -> None:
        """Create an engine without a model, for `batch_size` concurrent requests; it works while a model is lent."""
        if batch_size < 1:
            raise ConfigError(f"batch_size has to be at least 1, not {batch_size}")
        self.chat = chat
        self.name = name
        self._batch_size = batch_size
        self.slots = Slots(2 * batch_size)
        self._loan: _Loan | None = None
        self._closed = False

    @contextlib.contextmanager
    def lent(self, model: Any) -> Iterator[None]:
        """Answer requests with these weights, from one event loop, until the block ends.

        In the block, the model is in evaluation mode and computes in the dtype of its weights, not in the trainer's
        mixed precision, as the paged cache holds one dtype. Model and random state of torch are restored afterwards.

        Raises:
            ConfigError: continuous batching cannot run this model.
        """
        reason = unsupported(model)
        if reason is not None:
            raise ConfigError(f"continuous batching cannot run the policy: {reason}; set rollout.engine to generate")
        with _as_it_was(model):
            self._loan = _Loan(inner_model(model), self.chat, self._batch_size)
            try:
                yield
            finally:
                loan, self._loan = self._loan, None
                loan.close()

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Return `[n]` completions with token ids and logprobs. The prompt's tokens are counted on the first one.

        Raises:
            LLMError: with cause `refused` (the template rejects the chat), `context_overflow`, `out_of_memory`,
                `engine` (any other failure of generation) or `closed` (also while no model is lent).
        """
        loan = self._loan
        if self._closed or loan is None:
            state = "is closed" if self._closed else "has no model: none is lent to it at the moment"
            raise LLMError(f"{self.name} {state}", cause="closed")
        try:
            prompt_ids = self.chat.token_ids(prompt)
        except Exception as error:
            raise self._failure("refused", f"{type(error).__name__}: {error}") from error
        max_tokens = min(sampling.max_tokens, room_for(self.name, prompt_ids, loan.context))
        async with self.slots.request(caller.get().priority), loan.turn(sampling):
            try:
                manager = loan.manager(sampling)
            except Exception as error:
                raise self._failure(_cause(error), f"{type(error).__name__}: {error}") from error
            stop = tuple(mark for mark in prompt.stop if mark)
            known = sampling.temperature == 0 or sampling.top_p >= 1
            requests = [_Request(self, loan, manager, prompt_ids, stop, known) for _ in range(sampling.n)]
            return await self._all(manager, requests, max_tokens)

    async def aclose(self) -> None:
        """Refuse further requests. The resources of a loan are released when it ends."""
        self._closed = True

    async def _all(self, manager: Any, requests: list[_Request], max_tokens: int) -> tuple[Completion, ...]:
        try:
            for index, request in enumerate(requests):
                request.start(max_tokens, counted=index == 0)
            waiting = {request.future for request in requests}
            while waiting:
                # An error that was sent before the thread ended may still arrive.
                ended = not manager.is_running()
                done, waiting = await asyncio.wait(waiting, timeout=0.1 if ended else _CHECK_S)
                for future in done:
                    future.result()
                if waiting and ended:
                    raise self._failure("engine", "continuous batching ended before the request was done")
            return tuple(request.future.result() for request in requests)
        finally:
            for request in requests:
                request.end()

    def _failure(self, cause: str, found: str) -> LLMError:
        remedy = ": no memory for continuous batching; free the GPU, or set rollout.engine to generate"
        return LLMError(self.name + remedy * (cause == "out_of_memory"), quoting=found, cause=cause)


@dataclass
class _Loan:
    """A lent model with the manager of the current temperature and top_p, which are called its law."""

    model: Any
    chat: ChatTemplate
    batch_size: int
    open: Any = None  # the current manager
    failed: Any = None  # a manager whose thread is ending or has ended
    law: tuple[float, float] | None = None  # its temperature and top_p
    inside: int = 0  # calls that use the manager
    waiting: list[asyncio.Future[None]] = field(default_factory=list)  # calls with another law
    running: dict[str, Any] = field(default_factory=dict)  # the manager of each running request
    started: int = 0

    def __post_init__(self) -> None:
        self.end_ids = end_token_ids(self.model, self.chat)
        self.context = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31)
        self._one_token: dict[str, int | None] = {}

    @contextlib.asynccontextmanager
    async def turn(self, sampling: Sampling) -> AsyncIterator[None]:
        """Wait until no call samples with another law."""
        while self.inside and self.law != _law(sampling):
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        self.law, changed = _law(sampling), self.law != _law(sampling)
        self.inside += 1
        try:
            if changed:
                self._stop()
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                for future in self.waiting:
                    if not future.done():
                        future.set_result(None)
                self.waiting.clear()

    def manager(self, sampling: Sampling) -> Any:
        """Return the open manager, or a new one if there is none or its thread has ended."""
        if self.open is not None and (self.open is self.failed or not self.open.is_running()):
            self._stop()
        if self.open is None:
            self.open = self._open(*_law(sampling), sampling.seed)
        return self.open

    def _open(self, temperature: float, top_p: float, seed: int | None) -> Any:
        from transformers import GenerationConfig

        law = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(**law if temperature > 0 else {"do_sample": False}, eos_token_id=-1),
            continuous_batching_config=self._config(secrets.randbits(62) if seed is None else seed),
        )
        manager.start()
        return manager

    def _config(self, seed: int) -> Any:
        import torch
        from transformers.generation import ContinuousBatchingConfig

        own: dict[str, Any] = {}
        if self.model.device.type == "cpu":
            tokens = max(_CPU_CACHE_TOKENS, self.context if self.context < 2**31 else 0)
            own = {
                "page_size": _CPU_PAGE,
                "num_blocks": -(-tokens // _CPU_PAGE),
                "max_batch_tokens": max(_CPU_BATCH_TOKENS, self.batch_size),
            }
        return ContinuousBatchingConfig(
            return_logprobs=True,
            max_requests_per_batch=self.batch_size,
            max_memory_percent=_MEMORY_SHARE,
            # Flash attention supports 16 bits only.
            auto_switch_to_flash=self.model.dtype in (torch.bfloat16, torch.float16),
            # With async batching, cancelling a request in a batch ends the thread: the update asks for its blocks.
            use_async_batching=False,
            seed=seed,
            **own,
        )

    def one_token(self, mark: str) -> int | None:
        """Return the id of a stop string that is one token and visible when decoded, or None."""
        if mark not in self._one_token:
            ids = self.chat.encode(mark)
            self._one_token[mark] = ids[0] if len(ids) == 1 and self.chat.decode(ids) == mark else None
        return self._one_token[mark]

    def close(self) -> None:
        """Cancel the remaining requests and end the thread."""
        for request_id, manager in self.running.items():
            manager.cancel_request(request_id)
        self._stop()

    def _stop(self) -> None:
        """Stop the manager and wait until nothing is computed any more."""
        manager, self.open = self.open, None
        if manager is not None:
            manager.stop(block=True, timeout=_STOP_S)
            if manager.is_running():
                raise LLMError("continuous batching does not let go of the model", cause="stalled")
            manager.destroy()


def _law(sampling: Sampling) -> tuple[float, float]:
    return sampling.temperature, sampling.top_p if sampling.temperature > 0 else 1.0


@dataclass(eq=False)
class _Request:
    """One sample: receives its tokens on the event loop, and ends at a stop string."""

    llm: ContinuousLLM
    loan: _Loan
    manager: Any
    prompt_ids: tuple[int, ...]
    stop: tuple[str, ...]
    logprobs_known: bool

    def __post_init__(self) -> None:
        self.future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.id = f"{self.loan.started}"
        self.loan.started += 1

    def start(self, max_tokens: int, *, counted: bool) -> None:
        """Queue the request. `counted` is whether the prompt's tokens are counted on this sample."""
        marks = [self.loan.one_token(mark) for mark in self.stop]
        self._counted = counted
        self.manager.register_result_handler(self.id, self._receive)
        self.loan.running[self.id] = self.manager
        accepted = self.manager.add_request(
            list(self.prompt_ids),
            request_id=self.id,
            max_new_tokens=max_tokens,
            # Tokens are streamed only if a stop string consists of several. A stop string that is one token may also be
            # spelled with several: it is then found when the request has ended, and the rest is dropped.
            streaming=None in marks,
            eos_token_id=sorted({*self.loan.end_ids, *(mark for mark in marks if mark is not None)}),
        )
        if accepted is None:
            raise self.llm._failure("engine", "continuous batching takes no requests: its thread has ended")

    def end(self) -> None:
        """Cancel the request if it is still running."""
        # Otherwise a late token may be sent to a closed event loop, which ends the thread.
        self.manager.output_router.result_handlers.pop(self.id, None)
        if self.loan.running.pop(self.id, None) is not None and (
            self.future.cancel() or self.future.cancelled() or self.future.exception() is not None
        ):
            self.manager.cancel_request(self.id)

    def _receive(self, output: Any) -> None:
        if self.future.done():
            return  # late tokens of a request that was cut or cancelled
        try:
            if output.error is not None:
                self.loan.failed = self.manager
                raise self.llm._failure(_cause(output.error), output.error)
            ids, finished = output.generated_tokens, output.is_finished()
            if self.stop and self._stops(ids if finished else ids[-tail_length(self.stop) :]):
                kept = 1 + bisect_left(range(1, len(ids)), True, key=lambda count: self._stops(ids[:count]))
                self.future.set_result(self._completion(ids[:kept], output.logprobs, FinishReason.STOP))
                if not finished:
                    self.manager.cancel_request(self.id)
            elif finished:
                reason = FinishReason.STOP if ids[-1] in self.loan.end_ids else FinishReason.LENGTH
                self.future.set_result(self._completion(ids, output.logprobs, reason))
        except (LLMError, RunError) as error:
            self.future.set_exception(error)
        except Exception as error:
            self.future.set_exception(self.llm._failure("engine", f"{type(error).__name__}: {error}"))

    def _stops(self, ids: list[int]) -> bool:
        return cut_at_stop(self.loan.chat.decode(ids), self.stop) is not None

    def _completion(self, ids: list[int], logprobs: list[float], reason: FinishReason) -> Completion:
        known = logprobs if self.logprobs_known else None
        completion = sampled_completion(
            self.loan.chat, self.prompt_ids, ids, known, reason, self.stop, model=self.loan.model
        )
        return completion if self._counted else replace(completion, prompt_tokens=0)


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Switch to evaluation mode and the dtype of the weights; restore the model and torch's random state afterwards."""
    import torch

    inner = inner_model(model)
    training, attention = model.training, inner.config._attn_implementation
    forward, plain = vars(inner).get("forward"), vars(inner).get("_original_forward")
    devices = [inner.device] if inner.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        model.eval()
        if plain is not None:
            inner.forward = plain  # without accelerate's autocast, whose dtypes the paged cache refuses
        try:
            yield
        finally:
            if plain is not None:
                inner.forward = forward
            if inner.config._attn_implementation != attention:
                inner.set_attn_implementation(attention)
            model.train(training)


def _cause(found: object) -> str:
    """Return the cause of a failure from its message, which is all that transformers' thread reports."""
    return "out_of_memory" if is_out_of_memory(found) else "engine"
