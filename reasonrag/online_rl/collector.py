"""From questions to groups of scored trajectories: rollouts, rewards, dynamic sampling, and judges that fail.

All randomness depends on the seed, the training step and the slot in its batch, not on the number of processes: a
training run that was killed makes the same rollouts again from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, Self, TypeVar

import structlog

from reasonrag.core import event_loop
from reasonrag.core.errors import LLMError, RetrievalError, RunError
from reasonrag.core.event_loop import progressing
from reasonrag.core.types import Question, Trajectory
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.rows import Group, Sample, Transcript, has_variance, transcripts
from reasonrag.online_rl.settings import OutageSettings, SamplingSettings
from reasonrag.rewards.base import Reward, Score, finite
from reasonrag.rollout import Engine, derive_seed, gather_all

log = structlog.get_logger()

T = TypeVar("T")

# The cause of a missing score where dynamic sampling left a group with equal rewards out.
FLAT = "flat"
_CLOSE_S = 60.0


class RolloutLoop:
    """The event loop of rollouts, and the parts that are closed with it.

    Args:
        stall_s: seconds without any progress after which rollouts count as stalled.
        in_background: run the loop in a thread, so that the next batch is made while this one is trained on.
    """

    def __init__(self, stall_s: float, *, in_background: bool = False) -> None:
        self.parts = contextlib.AsyncExitStack()
        self.stall_s = stall_s
        self._runner = event_loop.runner()
        self._thread: threading.Thread | None = None
        if in_background:
            run_forever = self._runner.get_loop().run_forever
            self._thread = threading.Thread(target=run_forever, name="rollouts", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def in_background(self) -> bool:
        return self._thread is not None

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work in the background, and return its future result."""
        return asyncio.run_coroutine_threadsafe(self._watched(work), self._runner.get_loop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work; raise Stalled if it makes no progress."""
        return self.start(work).result() if self.in_background else self._runner.run(self._watched(work))

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function in the thread of the loop: SQLite's connections belong to the thread that opens them."""

        async def called() -> T:
            return function(*args, **kwargs)

        return self.run(called())

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        async with progressing(self.stall_s):
            return await work

    def close(self) -> None:
        """Close the parts, cancel unfinished work, and close the loop unless something blocks it."""
        with contextlib.suppress(RuntimeError):
            self.run(self.parts.aclose())
        if self._thread is not None:
            loop = self._runner.get_loop()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                return
        self._runner.close()


@dataclass(slots=True)
class Batch:
    """The rollouts of one training step, with their scores and what they cost."""

    groups: list[Group]  # in the order of their slots
    dropped: int = 0  # groups that were replaced because all their rewards were equal
    flat: int = 0  # groups with equal rewards that remain
    rounds: int = 0  # of replacing
    retried: int = 0  # trajectories that were scored again
    unscored: dict[str, int] = field(default_factory=dict)  # trajectories without a reward, by cause
    seconds: float = 0.0  # of rollouts and rewards

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups, in order."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which questions each batch uses, deterministically from the seed. Each process makes its share of a batch."""

    questions: Sequence[Question]
    group_size: int  # attempts per question
    per_step: int  # questions of a batch, over all processes
    seed: int  # of the order and of the rollouts
    process: int = 0
    processes: int = 1

    @property
    def slots(self) -> range:
        """The slots of a batch that belong to this process."""
        share = self.per_step // self.processes
        return range(self.process * share, (self.process + 1) * share)

    def questions_of(self, batch: int) -> list[Question]:
        """Return this process's questions of a batch: each comes once per epoch, in an order that differs by epoch."""
        drawn = self._drawn(batch)
        return [self.questions[drawn[slot]] for slot in self.slots]

    def replacements(self, batch: int, slots: Sequence[int], attempt: int) -> list[Question]:
        """Return other questions for slots whose groups were dropped; `attempt` counts from 1.

        No question of the original batch, and none twice on any process, as long as there are enough questions.
        """
        taken = set(self._drawn(batch))
        order = _order(len(self.questions), derive_seed(self.seed, "refill", batch))
        others = [index for index in order if index not in taken] or order
        drawn = []
        for slot in slots:
            passes, place = divmod((attempt - 1) * self.per_step + slot, len(others))
            # Each pass is shifted by one, or else a slot would meet the same few questions again.
            drawn.append(self.questions[others[(place + passes) % len(others)]])
        return drawn

    def _drawn(self, batch: int) -> list[int]:
        """Return the indices of the questions of a batch, over all processes."""
        drawn = []
        for position in range(batch * self.per_step, (batch + 1) * self.per_step):
            epoch, within = divmod(position, len(self.questions))
            drawn.append(_order(len(self.questions), derive_seed(self.seed, "epoch", epoch))[within])
        return drawn


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return tuple(order)


@dataclass
class Collector:
    """Makes the batches of a training run."""

    # A batch draws at most this many times its number of questions: one of a policy that solves all is never full.
    most_draws: ClassVar = 10
    retries: ClassVar = 3  # of missing rewards before the training run stops
    first_wait_s: ClassVar = 5.0  # before the first of them; doubled before each further one

    engine: Engine  # runs the policy that is trained
    reward: Reward
    chat: ChatTemplate  # of the policy
    plan: BatchPlan
    end_id: int  # the token that ends a turn
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    outage: OutageSettings = field(default_factory=OutageSettings)
    max_tokens: int | None = None  # of prompt and turn; a longer trajectory counts as truncated

    async def batch(self, number: int, *, step: int) -> Batch:
        """Make the rollouts of batch `number`, for the training step after `step`.

        With dynamic sampling, groups whose rewards are all equal are replaced until none is left (DAPO,
        arXiv:2503.14476, sec. 3.2). If the guard `most_draws` ends that, the batch is short: the trajectories of the
        groups that remain are set aside under the cause `flat`, so they weigh in no mean and no loss.

        Raises:
            RunError: too many rewards are missing after every retry, and no value is made up for them; or dynamic
                sampling found no group to learn from.
        """
        started = time.monotonic()
        if hasattr(self.engine.retriever, "at_step"):
            self.engine.retriever.at_step(step)
        batch = Batch(await self._groups(self.plan.questions_of(number), self.plan.slots, step, number))
        if self.sampling.dynamic:
            await self._replace_flat_groups(batch, number, step)
        while await self._complete(batch, step) and self.sampling.dynamic:
            await self._replace_flat_groups(batch, number, step)
        flat = [index for index, group in enumerate(batch.groups) if not has_variance(group.rewards)]
        batch.flat = len(flat)
        if flat and self.sampling.dynamic:
            _set_aside(batch, flat, step)
        batch.unscored = dict(Counter(s.score.cause or "unknown" for s in batch.samples if s.score.value is None))
        batch.seconds = time.monotonic() - started
        return batch

    async def _replace_flat_groups(self, batch: Batch, number: int, step: int) -> None:
        most = self.most_draws * len(self.plan.slots)
        while batch.dropped < most:
            flat = [index for index, group in enumerate(batch.groups) if group.has_no_signal][: most - batch.dropped]
            if not flat:
                return
            batch.rounds += 1
            slots = [self.plan.slots[index] for index in flat]
            questions = self.plan.replacements(number, slots, batch.rounds)
            groups = await self._groups(questions, slots, step, number, batch.rounds)
            for index, group in zip(flat, groups, strict=True):
                batch.groups[index] = group
            batch.dropped += len(flat)

    async def _groups(self, questions: Sequence[Question], slots: Sequence[int], step: int, *drawn: int) -> list[Group]:
        # The slot is part of the seed, as a question may come twice in a batch.
        return await gather_all(
            self._group(question, derive_seed(self.plan.seed, "rollout", slot, *drawn), step)
            for question, slot in zip(questions, slots, strict=True)
        )

    async def _group(self, question: Question, seed: int, step: int) -> Group:
        """Sample `G` trajectories of a question, and score them together."""
        seeds = [derive_seed(seed, question.dataset, question.id, index) for index in range(self.plan.group_size)]
        samples = []
        attempts = await gather_all(roll_out(self.engine, question, attempt_seed) for attempt_seed in seeds)
        for index, (trajectory, cause) in enumerate(attempts):
            rows = transcripts(trajectory, self.chat) if trajectory is not None else ()
            if rows:
                samples.append(Sample(question, index, trajectory, tuple(map(self._ended, rows)), Score(None)))
            else:  # the policy wrote nothing; TRL needs a row for each trajectory
                empty = Transcript((self.end_id,), (self.end_id,), (0,), (0.0,), False)
                samples.append(Sample(question, index, None, (empty,), Score(None, cause=cause or "empty")))
        written = [sample for sample in samples if sample.trajectory is not None]
        for sample, score in zip(written, await self._scores(written, step), strict=True):
            samples[sample.index] = replace(sample, score=score)
        return Group(question, tuple(samples))

    def _ended(self, row: Transcript) -> Transcript:
        if self.max_tokens is not None and len(row.prompt_ids) + len(row.completion_ids) > self.max_tokens:
            row = replace(row, truncated=True)
        return row.ended(self.end_id)

    async def _scores(self, samples: Sequence[Sample], step: int) -> list[Score]:
        """Return one score per trajectory; a score whose value is missing, NaN or infinite has a cause."""
        trajectories = [sample.trajectory for sample in samples if sample.trajectory is not None]
        if not trajectories:
            return []
        scores = await self.reward.score(trajectories, step=step)
        if len(scores) != len(trajectories):
            raise RunError(
                f"the reward gave {len(scores)} scores for {len(trajectories)} trajectories, so they cannot be "
                "matched; its `score` has to return one score per trajectory, in their order"
            )
        checked = []
        for score in map(finite, scores):
            unexplained = score.value is None and not score.cause
            checked.append(replace(score, cause="unknown") if unexplained else score)
        return checked

    async def _complete(self, batch: Batch, step: int) -> bool:
        """Score again if too many rewards are missing; return whether that was needed. RunError: they stay missing."""
        allowed = self.outage.max_unscored * len(batch.samples)
        failed = Counter(sample.score.cause for sample in batch.samples if sample.trajectory is None)
        if failed.total() > allowed:
            raise RunError(
                f"{failed.total()} of {len(batch.samples)} trajectories of step {step + 1} failed ({dict(failed)}), "
                f"more than outage.max_unscored {self.outage.max_unscored:g} allows; shorten prompts, passages "
                "(retrieval.max_passage_chars, top_k) or turns, or use a model with a larger context"
            )
        for attempt in range(self.retries + 1):
            missing = [sample for sample in batch.samples if sample.awaits_reward]
            if len(missing) <= allowed:
                return attempt > 0
            causes = dict(Counter(sample.score.cause for sample in missing))
            problem = f"{len(missing)} of {len(batch.samples)} rewards of step {step + 1} are missing ({causes})"
            log.warning(problem)
            if attempt < self.retries:
                await asyncio.sleep(self.first_wait_s * 2**attempt)
                await self._score_again(batch, missing, step)
        raise RunError(
            f"{problem}, more than outage.max_unscored {self.outage.max_unscored:g} allows, after {self.retries} "
            "retries; the state before that step is kept: check the reward and its judge, and run the same "
            "command again to resume"
        )

    async def _score_again(self, batch: Batch, samples: Sequence[Sample], step: int) -> None:
        batch.retried += len(samples)
        scores = iter(await self._scores(samples, step))
        for index, group in enumerate(batch.groups):
            scored = [replace(s, score=next(scores)) if s.awaits_reward else s for s in group.samples]
            batch.groups[index] = Group(group.question, tuple(scored))


def _set_aside(batch: Batch, flat: Sequence[int], step: int) -> None:
    """Remove the scores of the groups at the places `flat`; RunError: all groups have equal rewards for good."""
    if all(group.has_no_signal for group in batch.groups):
        raise RunError(
            f"the rewards of each of {len(flat) + batch.dropped} groups of step {step + 1} are all equal, so there is "
            "nothing to learn from: the policy solves all questions alike, or none. The state before that step is "
            "kept; train on other questions, with a larger --group-size or another reward, or stop here"
        )
    log.warning("batch is short: groups with equal rewards remain", step=step + 1, groups=len(flat))
    for index in flat:
        samples = []
        for sample in batch.groups[index].samples:
            score = sample.score if sample.score.value is None else Score(None, sample.score.parts, FLAT)
            samples.append(replace(sample, score=score))
        batch.groups[index] = Group(batch.groups[index].question, tuple(samples))


async def roll_out(engine: Engine, question: Question, seed: int) -> tuple[Trajectory | None, str]:
    """Return a trajectory, or None and the cause if the backend refuses this one.

    Raises:
        LLMError, RetrievalError: the backend fails altogether.
    """
    try:
        (trajectory,) = await engine.run([Trajectory(question)], seeds=[seed])
    except (LLMError, RetrievalError) as error:
        if error.cause not in ("context_overflow", "refused"):
            raise
        log.warning("trajectory set aside", question=question.id, cause=error.cause)
        return None, error.cause
    return trajectory, ""
