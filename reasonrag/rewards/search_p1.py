"""The reward of Search-P1: a good plan, carried out, that covers the reference path (eq. 4 to 8, Alg. 3)."""

from __future__ import annotations

from dataclasses import astuple
from typing import Literal

from reasonrag.formats.base import Format
from reasonrag.rewards.base import BatchReward, Read, RewardSettings, trajectory_text
from reasonrag.rewards.judge import ReferencePlan, path_scores

# The best planner score is also the largest R_path.
MOST = 1.2


def self_consistency(planner: float, executed: int, planned: int, actions: int) -> float:
    """Return S_self, how well the policy follows its plan: `r_planner * n_exec/n_plan * n_exec/n_actions` (eq. 6).

    Algorithm 3 omits the last factor.

    Args:
        planner: r_planner, one of 0.2, 0.6, 1.0 and 1.2.
        executed: n_exec, steps of the plan that were carried out; capped at `planned`.
        planned: n_plan.
        actions: n_actions, searches of the trajectory.

    Returns:
        At least 0; 0 without a plan or an action. Above
        `planner` only if one search carries out several steps.

    A good plan of 3 steps, 2 carried out in 4 searches: 1.0 * 2/3 * 2/4.

    >>> round(self_consistency(1.0, 2, 3, 4), 4)
    0.3333
    """
    return planner * reference_alignment(executed, planned, actions)


def reference_alignment(covered: int, reference: int, actions: int) -> float:
    """Return S_ref, how much of the reference path is covered, in any order: `n_cov/|R_ref| * n_cov/n_actions` (eq. 7).

    Args:
        covered: n_cov, steps of the reference path that were done; capped at `reference`.
        reference: |R_ref|.
        actions: n_actions, searches of the trajectory.

    Both of 2 steps done in 4 searches: 2/2 * 2/4.

    >>> reference_alignment(2, 2, 4)
    0.5
    """
    if reference <= 0 or actions <= 0:
        return 0.0
    covered = min(covered, reference)
    return covered / reference * covered / actions


def path_reward(s_self: float | None, s_ref: float | None) -> float:
    """Return R_path, the better of the two tracks, in [0, 1.2] (sec. 3.2.2). A track that is None is ignored.

    >>> path_reward(0.3, 0.5), path_reward(0.3, None), path_reward(None, None), path_reward(1.8, 0.5)
    (0.5, 0.3, 0.0, 1.2)
    """
    return min(MOST, max(s_self or 0.0, s_ref or 0.0, 0.0))


def outcome_score(correct: bool, accuracy: float, reasoning: float, *, alpha: float = 0.8) -> float:
    """Return R_outcome in [0, 1]: 1 if the answer is right, else `alpha * r_acc + (1 - alpha) * r_reason` (eq. 8).

    Half right and well reasoned: 0.8 * 0.5 + 0.2 * 0.8.

    >>> round(outcome_score(False, 0.5, 0.8), 4), outcome_score(True, 0.0, 0.0)
    (0.56, 1.0)
    """
    return 1.0 if correct else alpha * accuracy + (1 - alpha) * reasoning


def search_p1_format(
    well_formed: bool, answered: bool, called: bool, responded: bool, *, strictness: Literal["soft", "strict", "none"]
) -> float | None:
    """Return R_format: 1 if well-formed, 0.5 with an answer and some search, None if the trajectory is invalid.

    Algorithm 3's 0.1 and 0.05 already include the weight lf = 0.1; eq. 4 would apply it twice.

    Args:
        well_formed: whether the trajectory is well-formed.
        answered: there is a final answer.
        called: there is a tool call.
        responded: there is a tool response.
        strictness: `soft` as above; `strict`: anything below 1 is
            invalid; `none` (the ablation): always 0, and valid.

    >>> [search_p1_format(form, True, True, True, strictness="soft") for form in (True, False)]
    [1.0, 0.5]
    >>> search_p1_format(False, True, True, True, strictness="strict") is None
    True
    >>> search_p1_format(True, True, False, False, strictness="soft") is None
    True
    """
    if strictness == "none":
        return 0.0
    if well_formed and answered and called:
        return 1.0
    return 0.5 if strictness == "soft" and answered and (called or responded) else None


def search_p1_reward(
    path: float,
    outcome: float,
    form: float | None,
    *,
    lambda_p: float = 0.3,
    lambda_a: float = 0.6,
    lambda_f: float = 0.1,
) -> float:
    """Return R_total = `lp * R_path + la * R_outcome + lf * R_format` (eq. 4); 0 if the trajectory is invalid (Alg. 3).

    With the paper's weights: 0, or from 0.05 (soft form alone) to 0.3 * 1.2 + 0.6 + 0.1 = 1.06.

    >>> round(search_p1_reward(0.5, 0.56, 0.5), 4), round(search_p1_reward(1.2, 1.0, 1.0), 4)
    (0.536, 1.06)
    >>> search_p1_reward(1.2, 1.0, None)
    0.0
    """
    return 0.0 if form is None else lambda_p * path + lambda_a * outcome + lambda_f * form


class SearchP1Reward(BatchReward):
    """Eq. 4, with one evaluator call per trajectory, and none if no part of the reward depends on it.

    Parts: `format` (None if invalid), `correct`, `n_actions`, `plan_missing` (1
    without a reference plan, where only the policy's own plan counts), `n_reference`;
    from the evaluator `planner`, `n_plan`, `n_self`, `n_ref`, `accuracy`, `reasoning`;
    computed `s_self`, `s_ref`, `path`, `outcome`. A part that was not needed is None.
    """

    @staticmethod
    def needs(settings: RewardSettings, format: Format) -> frozenset[str]:
        chosen = settings.search_p1
        if chosen.reference_track:
            return frozenset({"judge", "plans"})
        return frozenset({"judge"} if chosen.self_track or chosen.outcome == "soft" else ())

    async def _value(self, read: Read, step: int) -> float:
        settings, parts, question = self.settings.search_p1, read.parts, read.trajectory.question
        actions, correct = int(parts["rc"] or 0), read.answer("em") == 1.0
        parts.update(dict.fromkeys((*_EVALUATOR_PARTS, *_COMPUTED_PARTS)))
        parts.update(correct=float(correct), n_actions=float(actions))
        form = parts["format"] = search_p1_format(
            read.reading.well_formed,
            read.trajectory.answer is not None,
            called=actions > 0,
            responded=any(block.context for block in read.reading.blocks),
            strictness=settings.format,
        )
        if form is None:  # invalid: no call is paid for
            return 0.0
        plan = _NO_PLAN
        if settings.reference_track:
            plan = self.parts.plans.get((question.dataset, question.id), _NO_PLAN)
            parts.update(plan_missing=float(not plan.steps), n_reference=float(len(plan.steps)))
        has_tracks = actions > 0 and (settings.self_track or plan.steps)
        is_soft = settings.outcome == "soft"
        if has_tracks or (is_soft and not correct):
            scores = await path_scores(self.parts.judge, question, plan, trajectory_text(read.trajectory))
            parts.update(zip(_EVALUATOR_PARTS, map(float, astuple(scores)), strict=True))
        # Eq. 6 and 7 of the evaluator's counts.
        score = {part: parts[part] or 0.0 for part in _EVALUATOR_PARTS}  # without a call they are not needed
        if settings.self_track:
            parts["s_self"] = self_consistency(score["planner"], int(score["n_self"]), int(score["n_plan"]), actions)
        if plan.steps:
            parts["s_ref"] = reference_alignment(int(score["n_ref"]), len(plan.steps), actions)
        path = parts["path"] = path_reward(parts["s_self"], parts["s_ref"])
        accuracy, reasoning = (score["accuracy"], score["reasoning"]) if is_soft else (0.0, 0.0)
        outcome = parts["outcome"] = outcome_score(correct, accuracy, reasoning, alpha=settings.alpha)
        weights = {"lambda_p": settings.lambda_p, "lambda_a": settings.lambda_a, "lambda_f": settings.lambda_f}
        return search_p1_reward(path, outcome, form, **weights)


_NO_PLAN = ReferencePlan("", ())
# The evaluator's scores as components, in the order of `PathScores`.
_EVALUATOR_PARTS = ("planner", "n_plan", "n_self", "n_ref", "accuracy", "reasoning")
_COMPUTED_PARTS = ("plan_missing", "n_reference", "s_self", "s_ref", "path", "outcome")
