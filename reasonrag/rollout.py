"""Advance trajectories by one step, or run them to the end (arXiv:2505.14069, Algorithm 1).

The engine knows no tags and no rewards. It asks the format for a prompt, the policy for a completion, the
format for the action, and the retriever for passages if the action is a search. Any number of
trajectories may be advanced concurrently: the backends batch requests and limit their number.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ParamSpec, TypeVar

import structlog

from reasonrag.core.errors import RunError
from reasonrag.core.text import quoted
from reasonrag.core.types import Answer, Completion, Malformed, Prompt, Search, Step, StopReason, Trajectory
from reasonrag.formats.base import Format, Stage
from reasonrag.llm.base import LLM, Sampling, StepScorer
from reasonrag.retrieval.base import Retriever

log = structlog.get_logger()

T = TypeVar("T")
P = ParamSpec("P")

# A policy that writes one readable step in three has none among 12 in one run of 130: (2/3)**12 = 1/130.
_FIRST_LOOK, _SECOND_LOOK = 12, 60  # steps


@dataclass(eq=False)
class FirstSteps:
    """Looks at the first steps that a policy writes: stops a run of unreadable steps before it is paid for.

    It looks at the first 12, of which one has to be readable,
    and at the first 60, of which a share has to be.

    Args:
        policy: its name, for the message.
        most_unreadable: share of the first 60 steps, in [0, 1]; 1 only warns.
        longer: the flag, with its value, that lets the policy write more tokens.
        refuse: lets all calls that are still to be paid for raise an error, and replays others; None:
            `check` raises it before every call.
    """

    policy: str
    _: KW_ONLY
    most_unreadable: float
    longer: str
    refuse: Callable[[RunError], object] | None = None
    seen: list[Step] = field(default_factory=list)
    verdict: str = ""  # why the run cannot go on

    def check(self) -> None:
        """Raise RunError once the run cannot go on, unless `refuse` ends its calls."""
        if self.verdict and self.refuse is None:
            raise RunError(self.verdict)

    def add(self, step: Step) -> None:
        """Count a step, and end the run if too few of those so far can be read."""
        if len(self.seen) == _SECOND_LOOK or self.verdict:
            return
        self.seen.append(step)
        unreadable = [(step.action.reason, step.completion) for step in self.seen if isinstance(step.action, Malformed)]
        has_none = len(unreadable) == len(self.seen) == _FIRST_LOOK
        has_few = len(self.seen) == _SECOND_LOOK and len(unreadable) > self.most_unreadable * _SECOND_LOOK
        if has_none or has_few:
            message = self._describe(unreadable)
            if self.most_unreadable < 1:
                self.verdict = f"{message}; pass --max-unreadable 1 to continue anyway"
                if self.refuse is not None:
                    self.refuse(RunError(self.verdict))
            else:
                log.warning(message)

    def _describe(self, unreadable: list[tuple[str, Completion]]) -> str:
        counts = Counter(reason for reason, _ in unreadable)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        texts = dict.fromkeys(quoted(completion.text) for _, completion in unreadable)
        seen, examples = len(self.seen), " and ".join([*texts][:2])
        readable = f"{seen - len(unreadable)} of the first {seen} steps can be read ({reasons})"
        message = f"{self.policy}: {readable}, for example {examples}"
        if (cut := sum(completion.is_cut for _, completion in unreadable)) > len(unreadable) / 2:
            message += f"; {cut} were cut off: let it write more ({self.longer}, in a new folder)"
        return (
            f"{message}; if it does not know the format: take an instruct model, try --open-tags, give a trained one "
            "the --format and --prompts of its training, or train this one on demonstrations first (sft train "
            "--examples trajectories)"
        )


@dataclass(eq=False)
class Engine:
    """Runs a policy in a format, with a retriever.

    Args:
        llm: the policy.
        retriever: answers the searches.
        format: turns steps into prompts and completions into actions.
        max_steps: actions of a trajectory, as the format counts them; the last one has to answer.
        max_searches: searches of a trajectory; once the passages of the last one are read, it has to
            answer. None leaves them to `max_steps`.
        top_k: passages per search.
        sampling: temperature, top_p and max_tokens of every step; the engine sets seed and n.
        first_steps: ends a run if its steps cannot be read; None never does.
        scorer: chooses one of several `candidates` for a step.
        candidates: how many are sampled.
        grade: returns a trajectory with the grade of its answer; None leaves answers without one.
    """

    llm: LLM
    retriever: Retriever
    format: Format
    _: KW_ONLY
    max_steps: int = 8
    max_searches: int | None = None
    top_k: int = 3
    sampling: Sampling = field(default_factory=Sampling)
    first_steps: FirstSteps | None = None
    scorer: StepScorer | None = None
    candidates: int = 1
    grade: Callable[[Trajectory], Awaitable[Trajectory]] | None = None

    def __post_init__(self) -> None:
        if hasattr(self.format, "decode"):  # it looks at the tokens of a step
            self.format.decode = getattr(self.llm, "decode", None)

    async def step(self, trajectory: Trajectory, *, seed: int, final: bool = False) -> Trajectory:
        """Return the trajectory with one more step; it ends if that step answers or is the last one allowed.

        The step is one that the format takes itself (`Format.own_step`), or else the
        policy is asked for it. `final` demands an answer, as in the last step.

        Raises:
            ValueError: the trajectory has already ended.
            LLMError, RetrievalError: a backend failed after its retries.
            RunError: too few of the first steps could be read.
        """
        if trajectory.stop_reason is not None:
            raise ValueError(f"a trajectory that ended ({trajectory.stop_reason}) cannot be continued")
        searches = sum(isinstance(step.action, Search) for step in trajectory.steps)
        is_spent = self.max_searches is not None and searches >= self.max_searches
        own_action = self.format.own_step(trajectory.question, trajectory.steps)
        if own_action is not None and not (is_spent and isinstance(own_action, Search)):
            # Nothing was sampled for it, so there is nothing to train on.
            step = Step(Prompt(()), Completion("", prompt_tokens=0, completion_tokens=0), own_action)
            return await self._take(trajectory, step)
        # The last step has to answer: a trajectory that only searches
        # earns nothing, and its prefix would look worthless.
        final = final or self.format.must_answer(trajectory.steps, self.max_steps)
        # A growing turn holds the passages already; other
        # formats show them once, in a step that cannot search.
        is_read = self.format.append_only or self.format.stage(trajectory.steps) is not Stage.GROUNDING
        final = final or (is_spent and is_read)
        prompt = self.format.prompt(trajectory.question, trajectory.steps, final=final)
        # A greedy policy that is asked the same again would write the same. That is where a step could not
        # be read: the next prompt is that step's unless it has to be the last one.
        last = trajectory.steps[-1] if self.sampling.temperature == 0 and trajectory.steps else None
        known = last.completion if last is not None and last.prompt == prompt else None
        completions = [known] if known else await self._sample(prompt, seed)
        steps = [self._parse(trajectory, prompt, completion, final=final) for completion in completions]
        step = steps[0] if len(steps) == 1 else await self._best(steps)
        if self.first_steps is not None and known is None:
            self.first_steps.add(step)
        return await self._take(trajectory, step, final=final)

    async def _take(self, trajectory: Trajectory, step: Step, *, final: bool = False) -> Trajectory:
        """Return the trajectory with a step that was decided on, and with the passages of its search."""
        action = step.action
        if isinstance(action, Search):
            (passages,) = await self.retriever.search([action.query], self.top_k)
            step = replace(step, passages=passages)
        if isinstance(action, Answer):
            reason = StopReason.FORCED_ANSWER if action.forced else StopReason.ANSWERED
            return await self.graded(trajectory.extend(step, reason))
        ended = final or (isinstance(action, Malformed) and action.ends)
        return trajectory.extend(step, StopReason.NO_ANSWER if ended else None)

    async def graded(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the grade of its answer, if it has one and answers are graded."""
        return await self.grade(trajectory) if self.grade and trajectory.complete else trajectory

    def _parse(self, trajectory: Trajectory, prompt: Prompt, completion: Completion, *, final: bool) -> Step:
        action = self.format.parse(completion.text, trajectory.steps, final=final)
        if isinstance(action, Answer) and not prompt.stop and not completion.is_whole:
            action = Malformed("cut_off")  # without stop strings, a message is whole if the policy ended it
        if final and isinstance(action, Search):  # of a plug-in format: no step would be left to read its passages
            action = Malformed("unexpected_search", ends=True)
        return Step(prompt, completion, action)

    async def _best(self, steps: Sequence[Step]) -> Step:
        """Return the step that is valued most, before any search is made; one that cannot be read only if none can."""
        readable = [step for step in steps if not isinstance(step.action, Malformed)]
        if len({step.completion.text for step in readable}) < 2 or self.scorer is None:
            return (readable or steps)[0]
        values = await self.scorer.score([(step.prompt, step.completion) for step in readable])
        return readable[values.index(max(values))]

    async def _sample(self, prompt: Prompt, seed: int) -> list[Completion]:
        """Return as many completions as there are candidates; the first has the seed that it has alone."""
        if self.first_steps is not None:
            self.first_steps.check()
        # One request a candidate: each has a seed of its
        # own, so more candidates change none of the others.
        seeds = [seed, *(derive_seed(seed, "candidate", number) for number in range(1, self.candidates))]
        requests = [self.llm.complete(prompt, replace(self.sampling, seed=request_seed)) for request_seed in seeds]
        # Without a task for the usual single request: it would cost a turn of the event loop a step.
        return [await requests[0]] if self.candidates == 1 else await gather_all(requests)

    async def run(
        self, trajectories: Sequence[Trajectory], *, seeds: Sequence[int], completed: Callable[[], object] | None = None
    ) -> list[Trajectory]:
        """Run `[B]` trajectories to their ends, concurrently; trajectory `i` derives its step seeds from `seeds[i]`.

        `completed` is called after each step. If a backend fails for one of them, the exception is raised
        after the others have ended: paid calls are kept.
        """
        attempts = zip(trajectories, seeds, strict=True)
        return await gather_all(self._finish(trajectory, seed, completed) for trajectory, seed in attempts)

    async def _finish(self, trajectory: Trajectory, seed: int, completed: Callable[[], object] | None) -> Trajectory:
        while trajectory.stop_reason is None:
            trajectory = await self.step(trajectory, seed=derive_seed(seed, len(trajectory.steps)))
            if completed is not None:
                completed()
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
    text = "\0".join(map(str, parts)).encode("utf-8", "replace")
    digest = hashlib.blake2b(text, digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1  # torch and most servers take 31 bits
