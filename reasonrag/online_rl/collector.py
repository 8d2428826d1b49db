"""Questions to groups of scored trajectories: the one engine, the reward, dynamic sampling, and judges that fail.

Everything that is drawn depends on the seed, the training step and the place in its batch alone, not on the number of
processes: a training that was killed makes the same rollouts again from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

import structlog

from reasonrag.core.errors import LLMError, RetrievalError, RunError
from reasonrag.core.types import Question, Trajectory
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.advantages import has_variance
from reasonrag.online_rl.samples import Batch, Group, Sample
from reasonrag.online_rl.settings import OutageSettings, SamplingSettings
from reasonrag.online_rl.transcript import Transcript, transcript
from reasonrag.rewards.base import NO_REWARD, Reward, Score
from reasonrag.rewards.batch import finite
from reasonrag.rollout import Engine, derive_seed, gather_all

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

    @property
    def slots(self) -> range:
        """The places of a batch that are this process's."""
        share = self.per_step // self.processes
        return range(self.process * share, (self.process + 1) * share)

    def wanted(self, batch: int) -> list[Question]:
        """The questions of a batch that are this process's: each once an epoch, in an order of that epoch's own."""
        drawn = self._drawn(batch)
        return [self.questions[drawn[slot]] for slot in self.slots]

    def replacements(self, batch: int, slots: Sequence[int], attempt: int) -> list[Question]:
        """Questions for places of a batch whose groups were dropped, `attempt` times already counting this one.

        None that the batch began with, and none twice on any process, as far as there are so many.
        """
        taken = set(self._drawn(batch))
        order = _order(len(self.questions), derive_seed(self.seed, "refill", batch))
        others = [place for place in order if place not in taken] or order
        first = (attempt - 1) * self.per_step
        return [self.questions[others[(first + slot) % len(others)]] for slot in slots]

    def _drawn(self, batch: int) -> list[int]:
        """Where the questions of a batch are, of all processes."""
        start = batch * self.per_step
        return [self._at(place) for place in range(start, start + self.per_step)]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self.questions))
        return _order(len(self.questions), derive_seed(self.seed, "epoch", epoch))[within]


@lru_cache(maxsize=4)
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
        batch = Batch(await self._groups(self.plan.wanted(number), self.plan.slots, step, number))
        if self.sampling.dynamic:
            await self._refill(batch, number, step)
        await self._complete(batch, step)
        batch.flat = sum(not has_variance(group.rewards) for group in batch.groups)
        batch.unscored = dict(Counter(s.score.cause or "unknown" for s in batch.samples if s.score.value is None))
        batch.seconds = time.monotonic() - started
        return batch

    async def _refill(self, batch: Batch, number: int, step: int) -> None:
        """Other questions in the place of those whose attempts all earned the same; what cannot be told stays."""
        for attempt in range(1, self.sampling.max_rounds + 1):
            flat = [slot for slot, group in enumerate(batch.groups) if _has_no_signal(group)]
            if not flat:
                return
            batch.rounds = attempt
            slots = [self.plan.slots[place] for place in flat]
            questions = self.plan.replacements(number, slots, attempt)
            found = await self._groups(questions, slots, step, number, attempt)
            for place, group in zip(flat, found, strict=True):
                batch.dropped += 1
                batch.groups[place] = group

    async def _groups(self, questions: Sequence[Question], slots: Sequence[int], step: int, *drawn: int) -> list[Group]:
        """Attempts at questions. Seeds are those of their places: a question may come twice in a batch."""
        return await gather_all(
            self._group(question, derive_seed(self.plan.seed, "rollout", slot, *drawn), step)
            for question, slot in zip(questions, slots, strict=True)
        )

    async def _group(self, question: Question, seed: int, step: int) -> Group:
        seeds = [derive_seed(seed, question.dataset, question.id, index) for index in range(self.plan.group_size)]
        attempts = await gather_all(roll_out(self.engine, question, seed) for seed in seeds)
        made = [self._written(question, trajectory, cause) for trajectory, cause in attempts]
        scores = iter(await self._scores([trajectory for trajectory, _, _ in made if trajectory is not None], step))
        return Group(
            question,
            tuple(
                Sample(
                    question,
                    index,
                    trajectory,
                    written,
                    Score(None, cause=cause) if trajectory is None else next(scores),
                )
                for index, (trajectory, written, cause) in enumerate(made)
            ),
        )

    def _written(
        self, question: Question, trajectory: Trajectory | None, cause: str
    ) -> tuple[Trajectory | None, Transcript, str]:
        """An attempt with its tokens; none, with a cause, where the policy wrote nothing."""
        made = None if trajectory is None else transcript(trajectory, self.chat)
        if made is None or not made.completion_ids:
            nothing = Transcript((self.end_id,), (self.end_id,), (0,), (0.0,), False)
            return None, nothing, cause or "empty"
        if self.max_tokens is not None and len(made.prompt_ids) + len(made.completion_ids) > self.max_tokens:
            made = replace(made, truncated=True)
        return trajectory, made.ended(self.end_id), ""

    async def _scores(self, trajectories: Sequence[Trajectory], step: int) -> list[Score]:
        """One a trajectory; a value that is no number is no reward, and one that is missing has a cause.

        Raises:
            RunError: a reward of one's own gives another number of scores.
        """
        if not trajectories:
            return []
        found = await self.reward.score(trajectories, step=step)
        if len(found) != len(trajectories):
            raise RunError(
                f"the reward gave {len(found)} scores for {len(trajectories)} trajectories, so nobody knows whose they "
                "are; its `score` has to return one a trajectory, in their order"
            )
        scores = map(finite, found)
        return [replace(s, cause="unknown") if s.value is None and not s.cause else s for s in scores]

    async def _complete(self, batch: Batch, step: int) -> None:
        """Ask again for the rewards that are missing, if they are too many.

        Raises:
            RunError: they stay missing.
        """
        allowed = self.outage.max_unscored * len(batch.samples)
        unmade = Counter(sample.score.cause for sample in batch.samples if sample.trajectory is None)
        if unmade.total() > allowed:
            raise RunError(
                f"{unmade.total()} of {len(batch.samples)} trajectories of step {step + 1} could not be made "
                f"({dict(unmade)}), more than outage.max_unscored {self.outage.max_unscored:g} allows; shorten "
                "prompts, passages (retrieval.max_passage_chars, top_k) or turns, or take a model with a larger context"
            )
        for attempt in range(self.outage.retries + 1):
            missing = [sample for sample in batch.samples if _awaits_a_reward(sample)]
            if len(missing) <= allowed:
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
            await self._score_again(batch, missing, step)

    async def _score_again(self, batch: Batch, samples: Sequence[Sample], step: int) -> None:
        scores = await self._scores([s.trajectory for s in samples if s.trajectory is not None], step)
        again = {id(old): replace(old, score=score) for old, score in zip(samples, scores, strict=True)}
        batch.groups = [
            Group(group.question, tuple(again.get(id(sample), sample) for sample in group.samples))
            for group in batch.groups
        ]


async def roll_out(engine: Engine, question: Question, seed: int) -> tuple[Trajectory | None, str]:
    """A trajectory, or the cause why there is none.

    Raises:
        LLMError, RetrievalError: a backend is not there at all.
    """
    try:
        (trajectory,) = await engine.run([Trajectory(question)], seeds=[seed])
    except (LLMError, RetrievalError) as error:
        if error.cause not in ("context_overflow", "refused"):
            raise
        log.warning("trajectory set aside", question=question.id, cause=error.cause)
        return None, error.cause
    return trajectory, ""


def _awaits_a_reward(sample: Sample) -> bool:
    return sample.trajectory is not None and sample.score.value is None and sample.score.cause != NO_REWARD


def _has_no_signal(group: Group) -> bool:
    """Return whether all rewards are known and equal. A missing one may still come to differ; no reward never does."""
    pending = any(sample.score.value is None and sample.score.cause != NO_REWARD for sample in group.samples)
    return not pending and not has_variance(group.rewards)
