"""Advance trajectories by one step, or run them to the end (arXiv:2505.14069, Algorithm 1).

The engine knows no tags and no rewards. It asks the format for a prompt, the policy for a completion, the format for
the action, and the retriever for passages if the action is a search. Any number of trajectories may be advanced
concurrently: the backends batch requests and limit their number.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ParamSpec, TypeVar

from reasonrag.core.types import Answer, Malformed, Search, Step, StopReason, Trajectory
from reasonrag.formats.base import Format
from reasonrag.llm.base import LLM, Sampling
from reasonrag.retrieval.base import Retriever

T = TypeVar("T")
P = ParamSpec("P")


class Engine:
    """Runs a policy in a format, with a retriever."""

    def __init__(
        self,
        llm: LLM,
        retriever: Retriever,
        format: Format,
        *,
        max_steps: int = 8,
        top_k: int = 3,
        sampling: Sampling | None = None,
    ) -> None:
        """Store the parts.

        Args:
            llm: the policy.
            retriever: answers the searches.
            format: turns steps into prompts and completions into actions.
            max_steps: actions of a trajectory, as the format counts them; the last one has to answer.
            top_k: passages per search.
            sampling: temperature, top_p and max_tokens of every step; the engine sets seed and n.
        """
        self.llm = llm
        self.retriever = retriever
        self.format = format
        self.max_steps = max_steps
        self.top_k = top_k
        self.sampling = sampling or Sampling()

    async def step(self, trajectory: Trajectory, *, seed: int) -> Trajectory:
        """Return the trajectory with one more step; it ends if that step answers or is the last one allowed.

        Raises:
            ValueError: the trajectory has already ended.
            LLMError, RetrievalError: a backend failed after its retries.
        """
        if trajectory.stop_reason is not None:
            raise ValueError(f"a trajectory that ended ({trajectory.stop_reason}) cannot be continued")
        # The last step has to answer: a trajectory that only searches earns nothing, and its prefix would look
        # worthless.
        final = self.format.must_answer(trajectory.steps, self.max_steps)
        prompt = self.format.prompt(trajectory.question, trajectory.steps, final=final)
        (completion,) = await self.llm.complete(prompt, replace(self.sampling, n=1, seed=seed))
        action = self.format.parse(completion.text, trajectory.steps, final=final)
        if final and isinstance(action, Search):  # of a plug-in format: no step would be left to read its passages
            action = Malformed("unexpected_search", ends=True)
        step = Step(prompt, completion, action)
        if isinstance(action, Search):
            (passages,) = await self.retriever.search([action.query], self.top_k)
            step = replace(step, passages=passages)
        if isinstance(action, Answer):
            return trajectory.extend(step, StopReason.FORCED_ANSWER if action.forced else StopReason.ANSWERED)
        ended = final or (isinstance(action, Malformed) and action.ends)
        return trajectory.extend(step, StopReason.NO_ANSWER if ended else None)

    async def run(self, trajectories: Sequence[Trajectory], *, seeds: Sequence[int]) -> list[Trajectory]:
        """Run `[B]` trajectories to their ends, concurrently; trajectory `i` derives its step seeds from `seeds[i]`.

        If a backend fails for one of them, the exception is raised after the others have ended: paid calls are kept.
        """
        return await gather_all(self._finish(t, seed) for t, seed in zip(trajectories, seeds, strict=True))

    async def _finish(self, trajectory: Trajectory, seed: int) -> Trajectory:
        while trajectory.stop_reason is None:
            trajectory = await self.step(trajectory, seed=derive_seed(seed, len(trajectory.steps)))
        return trajectory


async def gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order; the first exception is raised only after all have ended."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def callable_in_notebooks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that starts an event loop: if the thread runs one, as in a notebook, it runs in another."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return function(*args, **kwargs)
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(function, *args, **kwargs).result()

    return call


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) that depends on the parts alone: not on time, order or PYTHONHASHSEED.

    >>> derive_seed(7, "q1", 3) == derive_seed(7, "q1", 3) != derive_seed(7, "q13")
    True
    """
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "replace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
