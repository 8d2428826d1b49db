"""From questions to groups of scored trajectories: rollouts, rewards, dynamic sampling, and judges that fail.

All randomness depends on the seed, the training step and the slot in its batch, not on the number of processes: a
training run that was killed makes the same rollouts again from its last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import ClassVar

import structlog

from reasonrag.core.errors import LLMError, RetrievalError, RunError
from reasonrag.core.http import Retries, Unavailable
from reasonrag.core.types import Question, Trajectory
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.advantages import has_variance
from reasonrag.online_rl.settings import OutageSettings, SamplingSettings
from reasonrag.online_rl.transcript import Transcript, transcripts
from reasonrag.rewards.base import NO_REWARD, Reward, Score, finite
from reasonrag.rollout import Engine, derive_seed, gather_all

log = structlog.get_logger()

# The cause of a missing score where dynamic sampling left a group with equal rewards out.
FLAT = "flat"


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt of a group. `trajectory` is None, and so is the score's value, if the policy's backend failed."""

    question: Question
    index: int  # within its group
    trajectory: Trajectory | None
    transcripts: tuple[Transcript, ...]  # its training rows, at least one: see `transcript.transcripts`
    score: Score

    @property
    def policy_tokens(self) -> int:
        """How many tokens the policy wrote."""
        return sum(sum(row.mask) for row in self.transcripts)

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut off any of its rows."""
        return any(row.truncated for row in self.transcripts)

    @property
    def awaits_reward(self) -> bool:
        """Whether the reward is missing, but may be known when it is asked for again."""
        return self.trajectory is not None and self.score.value is None and self.score.cause != NO_REWARD


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one question by one policy: `samples` are `[G]`."""

    question: Question
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> list[float | None]:
        """`[G]`, None for a sample without a reward."""
        return [sample.score.value for sample in self.samples]

    @property
    def has_no_signal(self) -> bool:
        """Whether all rewards are equal for good: no missing one can still make the group differ."""
        pending = any(sample.awaits_reward or sample.trajectory is None for sample in self.samples)
        return not pending and not has_variance(self.rewards)


@dataclass(slots=True)
class Batch:
    """The rollouts of one training step, with their scores and what they cost."""

    groups: list[Group]  # in the order of their slots
    dropped: int = 0  # groups that were replaced because all their rewards were equal
    flat: int = 0  # groups with equal rewards that remain
    rounds: int = 0  # of replacing
    retried: int = 0  # trajectories whose reward was asked for again
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
        seeds = [derive_seed(seed, question.dataset, question.id, index) for index in range(self.plan.group_size)]
        rolled_out = await gather_all(roll_out(self.engine, question, seed) for seed in seeds)
        attempts = [self._with_tokens(trajectory, cause) for trajectory, cause in rolled_out]
        scores = iter(await self._scores([trajectory for trajectory, _, _ in attempts if trajectory is not None], step))
        samples = []
        for index, (trajectory, rows, cause) in enumerate(attempts):
            score = Score(None, cause=cause) if trajectory is None else next(scores)
            samples.append(Sample(question, index, trajectory, rows, score))
        return Group(question, tuple(samples))

    def _with_tokens(
        self, trajectory: Trajectory | None, cause: str
    ) -> tuple[Trajectory | None, tuple[Transcript, ...], str]:
        """Return an attempt with its tokens; None and a cause if the policy wrote nothing."""
        rows = () if trajectory is None else transcripts(trajectory, self.chat)
        if not rows:
            nothing = Transcript((self.end_id,), (self.end_id,), (0,), (0.0,), False)
            return None, (nothing,), cause or "empty"
        return trajectory, tuple(self._ended(row) for row in rows), ""

    def _ended(self, row: Transcript) -> Transcript:
        if self.max_tokens is not None and len(row.prompt_ids) + len(row.completion_ids) > self.max_tokens:
            row = replace(row, truncated=True)
        return row.ended(self.end_id)

    async def _scores(self, trajectories: Sequence[Trajectory], step: int) -> list[Score]:
        """Return one score per trajectory; a score whose value is missing, NaN or infinite has a cause.

        Raises:
            RunError: a user's reward returns another number of scores.
        """
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
        """Ask again for missing rewards if there are too many; return whether any was asked for.

        Raises:
            RunError: they stay missing.
        """
        allowed = self.outage.max_unscored * len(batch.samples)
        failed = Counter(sample.score.cause for sample in batch.samples if sample.trajectory is None)
        if failed.total() > allowed:
            raise RunError(
                f"{failed.total()} of {len(batch.samples)} trajectories of step {step + 1} failed ({dict(failed)}), "
                f"more than outage.max_unscored {self.outage.max_unscored:g} allows; shorten prompts, passages "
                "(retrieval.max_passage_chars, top_k) or turns, or use a model with a larger context"
            )
        retries = Retries(
            deadline_s=math.inf, max_retries=self.retries, wait_s=lambda n: float(self.first_wait_s * 2 ** (n - 1))
        )

        async def complete() -> None:
            if retries.failures:
                await self._score_again(batch, [sample for sample in batch.samples if sample.awaits_reward], step)
            missing = [sample for sample in batch.samples if sample.awaits_reward]
            if len(missing) > allowed:
                causes = dict(Counter(sample.score.cause for sample in missing))
                what = f"{len(missing)} of {len(batch.samples)} rewards of step {step + 1} are missing ({causes})"
                log.warning(what)
                raise Unavailable(what, cause="reward")

        try:
            await retries.run_async(complete)
        except Unavailable as failure:
            raise RunError(
                f"{failure}, more than outage.max_unscored {self.outage.max_unscored:g} allows, after {self.retries} "
                "retries; the state before that step is kept: check the reward and its judge, and run the same "
                "command again to resume"
            ) from failure
        return retries.failures > 0

    async def _score_again(self, batch: Batch, samples: Sequence[Sample], step: int) -> None:
        batch.retried += len(samples)
        scores = await self._scores([s.trajectory for s in samples if s.trajectory is not None], step)
        rescored = {id(sample): replace(sample, score=score) for sample, score in zip(samples, scores, strict=True)}
        for index, group in enumerate(batch.groups):
            batch.groups[index] = Group(
                group.question, tuple(rescored.get(id(sample), sample) for sample in group.samples)
            )


def _set_aside(batch: Batch, flat: Sequence[int], step: int) -> None:
    """Take the scores of the groups at the places `flat` back.

    Raises:
        RunError: all groups have equal rewards for good.
    """
    if all(group.has_no_signal for group in batch.groups):
        raise RunError(
            f"the rewards of each of {len(flat) + batch.dropped} groups of step {step + 1} are all equal, so there is "
            "nothing to learn from: the policy solves all questions alike, or none. The state before that step is "
            "kept; train on other questions, with a larger --group-size or another reward, or stop here"
        )
    log.warning("batch is short: groups with equal rewards remain", step=step + 1, groups=len(flat))
    for index in flat:
        group = batch.groups[index]
        samples = [
            sample if sample.score.value is None else replace(sample, score=Score(None, sample.score.parts, FLAT))
            for sample in group.samples
        ]
        batch.groups[index] = Group(group.question, tuple(samples))


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
