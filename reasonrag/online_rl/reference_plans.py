"""Search-P1's reference plans, made once before training (sec. 3.2.1, eq. 5).

The policy attempts each question several times with the engine, searches included, so that questions that
need a search get a plan, too. A planner distils the correct attempts into the fewest steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.errors import BackendError, DataError
from reasonrag.core.event_loop import STALL_S
from reasonrag.core.text import exact_match
from reasonrag.core.types import Question, Trajectory
from reasonrag.online_rl.settings import PlanSettings
from reasonrag.pipeline.work import Count, Progress, work_through
from reasonrag.rewards.base import queries
from reasonrag.rewards.judge import JudgeService, ReferencePlan, propose_plan, vote_plan
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, read_parquet, write_parquet
from reasonrag.storage.tables import plan_schema

Plans = dict[tuple[str, str], ReferencePlan]


async def make_plans(
    questions: Sequence[Question],
    engine: Engine,
    judge: JudgeService,
    journal: Journal,
    progress: Progress,
    *,
    settings: PlanSettings | None = None,
    seed: int = 0,
    max_failed: float = 0.05,
    stall_s: float = STALL_S,
) -> list[Row]:
    """Make a reference plan for each question, and return the rows of the plans (`tables.plan_schema`).

    As in eq. 5 of Search-P1 (sec. 3.2.1): K trajectories per question, of
    which the correct ones are kept; the planner sees their plans and
    searches, and votes for the fewest steps. Algorithm 1 and App. D.2
    describe another way, a plan from the golden answer without any
    trajectory: `settings.show_answer` takes it where no trajectory helps.

    A plan depends on the replies of policy, retriever and planner
    alone: after a kill, the same call with the same journal
    resumes, pays for nothing twice, and returns the same.

    Args:
        questions: with ids that are unique in their data set.
        engine: makes the trajectories, in any format; its sampling
            should not be greedy. Its LLM is a `JournaledLLM`.
        judge: the planner, on a `JournaledLLM`.
        journal: of both; it is drained if the run shuts down.
        progress: counts finished and failed questions, and under `written` the plans,
            `no_correct_trajectory` and `no_search` (correct from memory alone).
        settings: K, and what is done if no trajectory helps.
        seed: of the trajectories.
        max_failed: share of questions that may fail; beyond it no further question is started.
        stall_s: seconds without any progress after which the work is ended.

    Raises:
        Interrupted: the run is shutting down; the next call resumes.
        RunError: the journal cannot be written.
    """
    rows: dict[int, Row] = {}
    models: list[Any] = [engine.llm, judge.llm]

    async def work(place: int, question: Question, count: Count) -> None:
        plan = await _plan(question, engine, judge, settings or PlanSettings(), seed)
        progress.written[plan if isinstance(plan, str) else "plans"] += 1
        if not isinstance(plan, str):
            rows[place] = plan

    async def set_aside(*failure: object) -> None:
        """Leave the question without a plan: `progress` counts it."""

    await work_through(
        questions,
        work,
        [model.slots for model in models],
        progress,
        failed=set_aside,
        most_failed=max_failed * len(questions),
        stall_s=stall_s,
    )
    # A question that needs a call of a drained journal is neither done nor failed, and its plan would be missing.
    if progress.done + progress.failed < len(questions):
        journal.admit()
    return [rows[place] for place in sorted(rows)]


async def _plan(
    question: Question, engine: Engine, judge: JudgeService, settings: PlanSettings, seed: int
) -> Row | str:
    """Return the row of a question, or why it has no plan; raise BackendError if no trajectory could be made."""
    failures: list[BackendError] = []

    async def attempt(sample: int) -> Trajectory | None:
        # One seed for each attempt, whatever the order in which questions end.
        seeds = [derive_seed(seed, "plan", question.dataset, question.id, sample)]
        try:
            (trajectory,) = await engine.run([Trajectory(question)], seeds=seeds)
        except BackendError as error:
            failures.append(error)
            return None
        return trajectory

    attempts = await gather_all(map(attempt, range(settings.candidates)))
    trajectories = [trajectory for trajectory in attempts if trajectory is not None]
    if not trajectories:  # nothing is known about the question: it failed, and is tried again next time
        raise failures[0]
    correct = [attempt for attempt in trajectories if exact_match(attempt.answer, question.golden_answers)]
    # A trajectory from memory has no step that could be asked of a policy.
    if searching := [trajectory for trajectory in correct if queries(trajectory)]:
        candidates = [ReferencePlan(engine.format.read(attempt).plan, queries(attempt)) for attempt in searching]
        plan = await vote_plan(judge, question, candidates)
    elif settings.show_answer:
        plan = await propose_plan(judge, question)
    else:
        return "no_search" if correct else "no_correct_trajectory"
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "planner": plan.planner,
        "steps": list(plan.steps),
        "candidates": len(trajectories),
        "correct": len(correct),
        "votes": len(searching),
    }


def save_plans(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of `make_plans` as a Parquet file (`tables.plan_schema`), completely or not at all."""
    write_parquet(path, rows, plan_schema())


def load_plans(path: Path) -> Plans:
    """Read the plans of a file that `save_plans` wrote, by data set and question id.

    Raises:
        DataError: the file cannot be read, or holds no plans.
    """
    plans: Plans = {}
    for row in read_parquet(path, plan_schema()):
        if (row["dataset"], row["question_id"]) in plans:
            raise DataError(f"{path}: two plans for question {row['question_id']!r}; leave one of them out")
        plans[row["dataset"], row["question_id"]] = ReferencePlan(row["planner"], tuple(row["steps"]))
    return plans
