"""Questions to groups of scored trajectories: the one engine, the reward, dynamic sampling, and judges that fail.

Everything that is drawn depends on the seed, the training step and the question alone: a training that was killed
makes the same rollouts again from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import structlog

from reasonrag.errors import LLMError, RetrievalError, RunError
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.advantages import has_variance
from reasonrag.online_rl.samples import Batch, Group, Sample
from reasonrag.online_rl.settings import OutageSettings, SamplingSettings
from reasonrag.rewards.base import Reward, Score
from reasonrag.rollout.engine import Engine, derive_seed, gather_all
from reasonrag.rollout.transcript import Transcript, transcript
from reasonrag.types import Question, Trajectory

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drawn for each step, and how much of it.

    Args:
        questions: to train on.
        group_size: attempts at each.
        per_step: questions of a batch, of all processes together.
        seed: of everything that is drawn.
        process, processes: which share of a batch is this one's.
    """

    questions: Sequence[Question]
    group_size: int
    per_step: int
    seed: int
    process: int = 0
    processes: int = 1

    def wanted(self, batch: int) -> list[Question]:
        """The questions of a batch that are this process's: each once an epoch, in an order of that epoch's own."""
        start = batch * self.per_step
        places = [self._at(place) for place in range(start, start + self.per_step)]
        share = self.per_step // self.processes
        return [self.questions[place] for place in places[self.process * share : (self.process + 1) * share]]

    def replacement(self, batch: int, slot: int, attempt: int) -> Question:
        """Another question for a place whose group was dropped."""
        slot += self.process * (self.per_step // self.processes)
        return self.questions[derive_seed(self.seed, "refill", batch, slot, attempt) % len(self.questions)]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self.questions))
        return _order(len(self.questions), derive_seed(self.seed, "epoch", epoch))[within]


@lru_cache(maxsize=2)
def _order(count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return tuple(order)


class Collector:
    """Makes the batches of a training."""

    def __init__(
        self,
        engine: Engine,
        reward: Reward,
        chat: ChatTemplate,
        plan: Plan,
        *,
        end_id: int,
        sampling: SamplingSettings | None = None,
        outage: OutageSettings | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            engine: its LLM is the policy that is trained.
            reward: of every trajectory.
            chat: tokenizer and template of the policy.
            plan: which questions when.
            end_id: token that ends a turn.
            sampling: whether groups without variance are refilled.
            outage: what to do where rewards are missing.
            max_tokens: of prompt and turn; a longer trajectory counts as truncated.
        """
        self.engine = engine
        self.reward = reward
        self.chat = chat
        self.plan = plan
        self.end_id = end_id
        self.sampling = sampling or SamplingSettings()
        self.outage = outage or OutageSettings()
        self.max_tokens = max_tokens

    async def batch(self, number: int, *, step: int) -> Batch:
        """The rollouts of batch `number`, for the training step after `step`.

        Raises:
            RunError: too many rewards are missing, after every retry: nothing is made up in their place.
        """
        started = time.monotonic()
        wanted = self.plan.wanted(number)
        groups = await gather_all(self._group(q, number, 0, step) for q in wanted)
        batch = Batch(groups)
        if self.sampling.dynamic:
            await self._refill(batch, number, step)
        batch.flat = sum(not has_variance(group.rewards) for group in batch.groups)
        await self._complete(batch, step)
        batch.unscored = dict(Counter(s.score.cause or "unknown" for s in batch.samples if s.score.value is None))
        batch.seconds = time.monotonic() - started
        return batch

    async def _refill(self, batch: Batch, number: int, step: int) -> None:
        """Other questions in the place of those whose attempts all earned the same; what cannot be told stays."""
        for attempt in range(1, self.sampling.max_rounds + 1):
            flat = [slot for slot, group in enumerate(batch.groups) if _teaches_nothing(group)]
            if not flat:
                return
            batch.rounds = attempt
            questions = [self.plan.replacement(number, slot, attempt) for slot in flat]
            found = await gather_all(self._group(q, number, attempt, step) for q in questions)
            for slot, group in zip(flat, found, strict=True):
                batch.dropped += 1
                batch.groups[slot] = group

    async def _group(self, question: Question, number: int, attempt: int, step: int) -> Group:
        seeds = [
            derive_seed(self.plan.seed, "rollout", number, attempt, question.dataset, question.id, index)
            for index in range(self.plan.group_size)
        ]
        attempts = await gather_all(self._attempt(question, seed) for seed in seeds)
        scores = await self._scores([trajectory for trajectory, _ in attempts], step)
        samples = [
            Sample(question, index, trajectory, written, replace(score, cause=score.cause or cause))
            for index, ((trajectory, written, cause), score) in enumerate(
                zip([(t, *self._written(question, t, c)) for t, c in attempts], scores, strict=True)
            )
        ]
        return Group(question, tuple(samples))

    async def _attempt(self, question: Question, seed: int) -> tuple[Trajectory | None, str]:
        """A trajectory, or the cause why there is none. An engine that is not there at all ends the training."""
        try:
            (trajectory,) = await self.engine.run([Trajectory(question)], seeds=[seed])
        except (LLMError, RetrievalError) as error:
            if error.cause not in ("context_overflow", "refused"):
                raise
            log.warning("trajectory set aside", question=question.id, cause=error.cause)
            return None, error.cause
        return trajectory, ""

    def _written(self, question: Question, trajectory: Trajectory | None, cause: str) -> tuple[Transcript, str]:
        if trajectory is None:
            prompt = self.engine.format.prompt(question, ())
            return Transcript(self.chat.token_ids(prompt), (self.end_id,), (0,), (0.0,), False), cause
        made = transcript(trajectory, self.chat)
        if self.max_tokens is not None and len(made.prompt_ids) + len(made.completion_ids) > self.max_tokens:
            made = replace(made, truncated=True)
        if not made.completion_ids:
            return Transcript(made.prompt_ids, (self.end_id,), (0,), (0.0,), False), "empty"
        return made.ended(self.end_id), ""

    async def _scores(self, trajectories: Sequence[Trajectory | None], step: int) -> list[Score]:
        """One a trajectory; a value that is no number is no reward."""
        there = [trajectory for trajectory in trajectories if trajectory is not None]
        found = iter([_finite(score) for score in await self.reward.score(there, step=step)] if there else [])
        return [Score(None) if trajectory is None else next(found) for trajectory in trajectories]

    async def _complete(self, batch: Batch, step: int) -> None:
        """Ask again for the rewards that are missing, if they are too many.

        Raises:
            RunError: they stay missing.
        """
        for attempt in range(self.outage.retries + 1):
            missing = [s for s in batch.samples if s.score.value is None and s.trajectory is not None]
            if len(missing) <= self.outage.max_unscored * len(batch.samples):
                return
            causes = dict(Counter(sample.score.cause for sample in missing))
            if attempt == self.outage.retries:
                raise RunError(
                    f"{len(missing)} of {len(batch.samples)} rewards of step {step + 1} are missing ({causes}), more "
                    f"than outage.max_unscored {self.outage.max_unscored:g} allows, after {attempt} retries; the state "
                    "before that step is kept: see to the judge, and run the same command again"
                )
            log.warning("rewards are missing, asking again", step=step + 1, missing=len(missing), causes=causes)
            await asyncio.sleep(self.outage.wait_s * 2**attempt)
            batch.retried += len(missing)
            scores = iter(await self._scores([sample.trajectory for sample in missing], step))
            again = {id(sample): replace(sample, score=next(scores)) for sample in missing}
            batch.groups = [
                Group(group.question, tuple(again.get(id(sample), sample) for sample in group.samples))
                for group in batch.groups
            ]


def _teaches_nothing(group: Group) -> bool:
    """All rewards are there and equal. Where one is missing the group may still come to differ."""
    return None not in group.rewards and not has_variance(group.rewards)


def _finite(score: Score) -> Score:
    if score.value is not None and not math.isfinite(score.value):
        return replace(score, value=None, cause="not_finite")
    return score
