"""From questions to groups of scored trajectories: rollouts, rewards, dynamic sampling, and judges that fail.

Then what is known of them: metrics of batches, validation
and the best policy, signs of a collapse, and a log:

OUT/rollouts/step-000007.parquet    one row per trajectory, with the components of its reward

All randomness depends on the seed, the training step and the slot in its batch, not on the number of
processes: a training run that was killed makes the same rollouts again from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, ClassVar, TypeVar

import structlog

from reasonrag.core import event_loop
from reasonrag.core.errors import LLMError, RetrievalError, RunError
from reasonrag.core.event_loop import progressing
from reasonrag.core.text import excerpt, redact_data
from reasonrag.core.types import Question, Trajectory
from reasonrag.evaluation.metrics import Attempt, attempt_values
from reasonrag.formats import Format
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.rows import Group, Row, Sample, Transcript, has_variance, transcripts
from reasonrag.online_rl.settings import GuardSettings, RLSettings
from reasonrag.rewards.base import Reward, Score, finite, trajectory_text
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import rollout_schema

log = structlog.get_logger()

Result = TypeVar("Result")

Metrics = Mapping[str, float | None]

ANSWER_METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced")
_TOO_LONG = " (context_overflow: shorten prompts or passages, or use a model with a larger context)"
WINDOW = 10  # batches that are averaged before they are compared, so that one bad batch is tolerated


class RolloutLoop:
    """The event loop of rollouts, and the parts that are closed with it.

    Args:
        stall_s: seconds without any progress after which rollouts count as stalled.
    """

    def __init__(self, stall_s: float) -> None:
        self.parts = contextlib.AsyncExitStack()
        self.stall_s = stall_s
        self._runner = event_loop.runner()
        self._thread = ThreadPoolExecutor(1)
        self._begun: Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Do work beside the caller, who may `run` other work when it is done."""
        self._begun = begun = self._thread.submit(self.run, work)
        return begun

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of work; raise Stalled if it makes no progress."""

        async def watched() -> Result:
            self._task = asyncio.current_task()
            async with progressing(self.stall_s):
                return await work

        return self._runner.run(watched())

    def close(self) -> None:
        """Close the parts, and the loop with its unfinished work."""
        while self._begun and not wait([self._begun], 0.1).done:
            if self._task:
                self._runner.get_loop().call_soon_threadsafe(self._task.cancel)
        self._thread.shutdown()
        with contextlib.suppress(RuntimeError):
            self.run(self.parts.aclose())
        self._runner.close()


@dataclass(slots=True)
class Batch:
    """The rollouts of one training step, with their scores and what they cost."""

    groups: list[Group]  # in the order of their slots
    dropped: int = 0  # groups that were replaced because all their rewards were equal
    flat: int = 0  # groups with equal rewards that remain
    rounds: int = 0  # of replacing
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
        # `accumulation` has checked that the processes divide a batch.
        share = self.per_step // self.processes
        return range(self.process * share, (self.process + 1) * share)

    def questions_of(self, batch: int) -> list[Question]:
        """Return this process's questions of a batch: each comes once per epoch, in an order that differs by epoch."""
        drawn = self._drawn(batch)
        return [self.questions[drawn[slot]] for slot in self.slots]

    def replacements(self, batch: int, slots: Sequence[int], attempt: int) -> list[Question]:
        """Return other questions for slots whose groups were dropped; `attempt` counts from 1.

        No question of the original batch, and none twice on
        any process, as long as there are enough questions.
        """
        taken = set(self._drawn(batch))
        order = _order(len(self.questions), derive_seed(self.seed, "refill", batch))
        others = [index for index in order if index not in taken] or order
        questions = []
        for slot in slots:
            passes, place = divmod((attempt - 1) * self.per_step + slot, len(others))
            # Each pass is shifted by one, or else a slot would meet the same few questions again.
            questions.append(self.questions[others[(place + passes) % len(others)]])
        return questions

    def _drawn(self, batch: int) -> list[int]:
        """Return the indices of the questions of a batch, over all processes."""
        drawn_indices = []
        for position in range(batch * self.per_step, (batch + 1) * self.per_step):
            # A batch may reach over the end of an epoch, and a data set may be smaller than a batch.
            epoch, within = divmod(position, len(self.questions))
            drawn_indices.append(_order(len(self.questions), derive_seed(self.seed, "epoch", epoch))[within])
        return drawn_indices


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    Random(seed).shuffle(order)
    return tuple(order)


@dataclass
class Collector:
    """Makes the batches of a training run."""

    # A batch draws at most this many times its number of
    # questions: one of a policy that solves all is never full.
    most_draws: ClassVar = 10

    engine: Engine  # runs the policy that is trained
    reward: Reward
    chat: ChatTemplate  # of the policy
    plan: BatchPlan
    settings: RLSettings

    async def batch(self, number: int) -> Batch:
        """Make the rollouts of the training step after `number` steps.

        With dynamic sampling, groups whose rewards are all equal are
        replaced until none is left (DAPO, arXiv:2503.14476, sec. 3.2).

        Raises:
            RunError: too many rewards are missing, and no value is made up for them; or dynamic sampling
                did not find enough groups to learn from.
        """
        started = time.monotonic()
        batch = Batch(await self._groups(self.plan.questions_of(number), self.plan.slots, number))
        if self.settings.sampling.dynamic:
            await self._replace_flat_groups(batch, number)
        self._refuse_outage(batch, number)
        # Without dynamic sampling such groups stay: their advantages are 0, as in GRPO.
        batch.flat = sum(not has_variance(group.rewards) for group in batch.groups)
        batch.unscored = dict(Counter(s.score.cause for s in batch.samples if s.score.value is None))
        batch.seconds = time.monotonic() - started
        return batch

    async def _replace_flat_groups(self, batch: Batch, number: int) -> None:
        most = self.most_draws * len(self.plan.slots)
        while flat_groups := [index for index, group in enumerate(batch.groups) if group.has_no_signal]:
            if batch.dropped + len(flat_groups) > most:
                # As in verl: a short batch would weigh its few groups too much.
                raise RunError(
                    f"dynamic sampling replaced {batch.dropped} groups for step {number + 1}, and the rewards of "
                    f"{len(flat_groups)} of {len(batch.groups)} are still all equal: the policy solves nearly all "
                    "questions alike. The state before that step is kept; train on other questions, with a larger "
                    "--group-size or another reward, or stop here"
                )
            # The number of the round is part of the seed: one question drawn again gets other attempts.
            batch.rounds += 1
            slots = [self.plan.slots[index] for index in flat_groups]
            questions = self.plan.replacements(number, slots, batch.rounds)
            groups = await self._groups(questions, slots, number, batch.rounds)
            for index, group in zip(flat_groups, groups, strict=True):
                batch.groups[index] = group
            batch.dropped += len(flat_groups)

    async def _groups(
        self, questions: Sequence[Question], slots: Sequence[int], number: int, *rounds: int
    ) -> list[Group]:
        # The slot is part of the seed, as a question may come twice in a batch.
        return await gather_all(
            self._group(question, derive_seed(self.plan.seed, "rollout", slot, number, *rounds), number)
            for question, slot in zip(questions, slots, strict=True)
        )

    async def _group(self, question: Question, seed: int, step: int) -> Group:
        """Sample `G` trajectories of a question, and score them together."""

        async def sample(index: int) -> Sample:
            attempt_seed = derive_seed(seed, question.dataset, question.id, index)
            rows: tuple[Transcript, ...] = ()
            trajectory, cause = await roll_out(self.engine, question, attempt_seed)
            if trajectory is not None:
                try:
                    rows = transcripts(trajectory, self.chat)
                except LLMError as error:
                    cause = error.cause
            if rows:
                return Sample(question, index, trajectory, tuple(map(self._ended, rows)), Score(None))
            # The policy wrote nothing, or the backend refused; TRL needs a row for each trajectory.
            empty = Row.padding(self.chat.end_of_turn).tokens
            return Sample(question, index, None, (empty,), Score(None, cause=cause or "empty"))

        samples = await gather_all(map(sample, range(self.plan.group_size)))
        return Group(question, tuple(await self._scored(samples, step)))

    def _ended(self, row: Transcript) -> Transcript:
        most = self.settings.rollout.max_trajectory_tokens
        if most is not None and len(row.prompt_ids) + len(row.completion_ids) > most:
            row = replace(row, truncated=True)
        return row.ended(self.chat.end_of_turn)

    async def _scored(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """Return the samples, in order, with the scores of their trajectories; a missing one has a cause."""
        trajectories = [sample.trajectory for sample in samples if sample.trajectory is not None]
        scores = await self.reward.score(trajectories, step=step) if trajectories else []
        if len(scores) != len(trajectories):
            raise RunError(
                f"the reward gave {len(scores)} scores for {len(trajectories)} trajectories, so they cannot be "
                "matched; its `score` has to return one score per trajectory, in their order"
            )
        remaining, scored = iter(scores), []
        for sample in samples:
            score = sample.score if sample.trajectory is None else finite(next(remaining))
            is_unexplained = score.value is None and not score.cause
            scored.append(replace(sample, score=replace(score, cause="unknown") if is_unexplained else score))
        return scored

    def _refuse_outage(self, batch: Batch, step: int) -> None:
        """Raise RunError if too many rewards are missing; below that, such trajectories are left out of the step."""
        missing = [sample for sample in batch.samples if sample.trajectory is None or sample.awaits_reward]
        causes = Counter(sample.score.cause for sample in missing)
        most = self.settings.outage.max_unscored
        if len(missing) > most * len(batch.samples):
            raise RunError(
                f"{len(missing)} of {len(batch.samples)} trajectories of step {step + 1} have no reward "
                f"({dict(causes)}), more than outage.max_unscored {most:g} allows; the state before that step is kept: "
                f"check the reward and its judge{_TOO_LONG if causes['context_overflow'] else ''}, and run the same "
                "command again to resume"
            )


async def roll_out(engine: Engine, question: Question, seed: int) -> tuple[Trajectory | None, str]:
    """Return a trajectory, or None and the cause if the backend refuses this one.

    Raises:
        LLMError, RetrievalError: the backend fails altogether.
    """
    try:
        (trajectory,) = await engine.run([Trajectory(question)], seeds=[seed])
    except (LLMError, RetrievalError) as error:
        # Only this trajectory is at fault: it is too long, or the server refuses its text.
        if error.cause not in ("context_overflow", "refused"):
            raise
        log.warning("trajectory set aside", question=question.id, cause=error.cause, error=excerpt(str(error)))
        return None, error.cause
    return trajectory, ""


def collapse(history: Sequence[Mapping[str, Any]], settings: GuardSettings) -> str:
    """Return why training has to stop, by the metrics that transformers has logged so far; "" if it has not to."""
    # Entries of validations have other names, so the n-th value is that of the n-th batch.
    form, length = _windows(history, "rollout/format_rate"), _windows(history, "rollout/tokens")
    if form and settings.format_rate_drop and form[-1] < max(form) - settings.format_rate_drop:
        return f"well-formed trajectories fell from {max(form):.2f} to {form[-1]:.2f}"
    if length and settings.max_length_growth and length[-1] > settings.max_length_growth * length[0]:
        return f"trajectories grew from {length[0]:.0f} to {length[-1]:.0f} tokens"
    return ""


def _windows(history: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the means of a metric over each `WINDOW` batches in a row."""
    values = [entry[name] for entry in history if name in entry]
    return [fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]


@dataclass
class Validation:
    """Held-out questions, one attempt each, whose metrics choose the best policy."""

    questions: Sequence[Question]
    engine: Engine  # runs the policy with the sampling of validation
    reward: Reward  # scores the attempts, if the reward is the metric
    metric: str  # chooses the best policy
    seed: int
    best: float | None = None
    best_step: int | None = None

    async def run(self, step: int, *, process: int = 0, processes: int = 1) -> Sequence[Metrics]:
        """Return the metrics of each question of this process's share, with the reward if it is the metric.

        A question on which the policy's backend fails is left
        out, and a missing reward is left out of its metrics.
        """

        async def attempt(question: Question) -> Trajectory | None:
            # The same at every step, so that two policies differ by their weights alone.
            seed = derive_seed(self.seed, "validation", question.dataset, question.id)
            return (await roll_out(self.engine, question, seed))[0]

        attempts = await gather_all(map(attempt, self.questions[process::processes]))
        finished = [trajectory for trajectory in attempts if trajectory is not None]
        rows = [trajectory_metrics(trajectory, self.engine.format) for trajectory in finished]
        if self.metric == "reward" and finished:
            for row, score in zip(rows, await self.reward.score(finished, step=step), strict=True):
                row["reward"] = score.value
        return rows

    def is_best(self, means: Mapping[str, float], step: int) -> bool:
        """Return whether these metrics are the best so far, and remember them if they are."""
        value = means.get(self.metric)
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, step
        return True

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]


def mean_metrics(rows: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the rows that know it.

    >>> mean_metrics([{"em": 1.0, "reward": 0.5}, {"em": 0.0, "reward": None}])
    {'em': 0.5, 'reward': 0.5}
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    return {name: fmean(values[name]) for name in sorted(values)}


def batch_metrics(batch: Batch, format: Format) -> dict[str, float]:
    """Return means over a batch, by name.

    `rollout/reward` and `reward/PART` are means over the trajectories
    that have them, `rollout/...` over the trajectories that did not
    fail; `unscored/CAUSE` counts the trajectories without a reward.
    """
    samples, rows = batch.samples, []
    for sample in samples:
        row: dict[str, float | None] = {
            "rollout/reward": sample.score.value,
            "rollout/tokens": sample.policy_tokens,
            "rollout/rows": len(sample.transcripts),
            "rollout/truncated": sample.truncated,
            "rollout/unscored": sample.score.value is None,
        }
        row |= {f"reward/{part}": value for part, value in sample.score.parts.items()}
        if sample.trajectory is not None:
            known = trajectory_metrics(sample.trajectory, format)
            row |= {f"rollout/{name}": value for name, value in known.items()}
        rows.append(row)
    metrics = mean_metrics(rows) | over_under([sample.score.parts for sample in samples])
    metrics |= {f"unscored/{cause}": float(count) for cause, count in sorted(batch.unscored.items())}
    return metrics | {
        "rollout/flat_groups": batch.flat / len(batch.groups),
        "rollout/dropped_groups": float(batch.dropped),
        "rollout/seconds": batch.seconds,
    }


def trajectory_metrics(trajectory: Trajectory, format: Format) -> dict[str, float | None]:
    """Return EM, F1, ACC, retrievals, steps, whether the answer was forced, and whether the form is right.

    `search_share` is the share of searches among the steps as the format separates them
    (arXiv:2510.07794, Fig. 2b).
    """
    known, reading = attempt_values(Attempt(trajectory)), format.read(trajectory)
    metrics: dict[str, float | None] = {name: float(known[name] or 0.0) for name in ANSWER_METRICS}
    search_share = len(reading.queries) / max(1, len(reading.blocks))
    return metrics | {"format_rate": float(reading.well_formed), "search_share": search_share}


def over_under(parts: Sequence[Metrics]) -> dict[str, float]:
    """Return OSR and USR of the known steps (arXiv:2510.07794, eq. 2), from the parts of HiPRAG's scores, and the share
    of judged steps that conclude nothing, behind which needless searches can hide.

    Micro-averages: two trajectories with 1 of 1 and 0 of 3 needless searches
    give 1/4, not the mean of 1 and 0. A step without a readable verdict
    counts in neither number, and a rate without any known step is left out.
    """
    rates = {}
    kinds = (("over", "osr", ("searches_known",)), ("under", "usr", ("own_steps_known",)))
    for counted, name, totals in (*kinds, ("silent", "silent", ("known_steps", "silent"))):
        if known := sum(part.get(total) or 0.0 for part in parts for total in totals):
            rates[f"rollout/{name}"] = sum(part.get(counted) or 0.0 for part in parts) / known
    return rates


def write_rollouts(
    batch: Batch,
    advantages: Sequence[float],
    row_advantages: Sequence[float],
    folder: Path,
    *,
    step: int,
    process: int,
    format: Format,
) -> None:
    """Write this process's rollouts for training step `step + 1`; after a restart, a repeated step replaces its file.

    Args:
        batch: the numbers are in the order of its samples and their transcripts.
        advantages: `[N]`, one per trajectory, as in the loss.
        row_advantages: `[R]`, one per training row: the mean over its tokens if each token has its own.
        folder: of all steps.
        step: steps before this batch.
        process: number of this process.
        format: of the trajectories.
    """
    rows = []
    remaining = iter(row_advantages)
    attempts = Counter[Question]()  # a question may have several groups, if there are few of them
    for sample, advantage in zip(batch.samples, advantages, strict=True):
        attempts[sample.question] += 1
        trajectory = sample.trajectory
        reading = format.read(trajectory) if trajectory else None
        row = {
            "step": step + 1,
            "dataset": sample.question.dataset,
            "question_id": sample.question.id,
            "sample": attempts[sample.question] - 1,
            "reward": sample.score.value,
            "advantage": advantage,
            "row_advantages": [next(remaining) for _ in sample.transcripts],
            "cause": sample.score.cause,
            "parts": sorted(sample.score.parts.items()),
            "well_formed": reading.well_formed if reading else None,
            "reason": reading.reason if reading else "",
            "answer": trajectory.answer if trajectory else None,
            "stop_reason": trajectory.stop_reason.value if trajectory and trajectory.stop_reason else None,
            "question": sample.question.question,
            "golden_answers": list(sample.question.golden_answers),
            "turn": trajectory_text(trajectory) if trajectory else "",
            "tokens": sum(len(transcript.completion_ids) for transcript in sample.transcripts),
            "policy_tokens": sample.policy_tokens,
            "truncated": sample.truncated,
        }
        # Secrets are redacted only here: the trainer needs the exact tokens that the policy sampled.
        rows.append(redact_data(row, "a rollout"))
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"-{process}" if process else ""
    write_parquet(folder / f"step-{step + 1:06d}{suffix}.parquet", rows, rollout_schema())
