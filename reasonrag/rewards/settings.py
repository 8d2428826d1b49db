"""Settings of the rewards: a section each, with the paper's values as defaults and its ablations as switches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from reasonrag.core.config import PRM
from reasonrag.core.settings import Section, Tree, constants, execution, nearest, setting

# Search-R1's release v0.3 (arXiv:2503.09516): an exact match earns 1 if well-formed, else 0.8; a wrong answer 0.2 if
# well-formed, else 0.1; no answer 0.
OUTCOME_PRESETS: dict[str, Tree] = {
    "search-r1-v0.3": {"metric": "em", "format_weight": 0.2, "answer_present": 0.1},
}


class OutcomeSettings(Section):
    """The final answer, and optionally the form: the baseline for process rewards."""

    preset: str | None = setting(None, f"published values, below explicit settings: {', '.join(OUTCOME_PRESETS)}")
    metric: Literal["em", "f1", "cem"] = setting(
        "em", "metric of the answer: exact match, token F1, or cover match (the answer contains a gold answer)"
    )
    format_weight: float = setting(0.0, "weight of the format; the answer has the rest of 1", ge=0, le=1)
    answer_present: float = setting(
        0.0, "minimum reward of a trajectory that has any final answer; at most format_weight", ge=0, le=1
    )
    search_confidence: float = setting(
        0.0,
        "beta of beta-GRPO (arXiv:2505.17281): an answer counts as wrong if the policy gave some token of its searches "
        "a lower probability; 0 disables",
        ge=0,
        le=1,
    )

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = given["preset"]
        if name not in OUTCOME_PRESETS:
            raise ValueError(f"preset {name!r} is unknown{nearest(str(name), OUTCOME_PRESETS)}")
        return {**OUTCOME_PRESETS[name], **given}

    @model_validator(mode="after")
    def _form_is_worth_more(self) -> OutcomeSettings:
        if self.answer_present > self.format_weight:
            raise ValueError(
                f"answer_present {self.answer_present} is above format_weight {self.format_weight}: a malformed wrong "
                "answer would earn more than a well-formed one; lower it"
            )
        return self


class SPRESettings(Section):
    """Shortest Path Reward Estimation, Eq. 1 (arXiv:2505.14069), of a finished trajectory."""

    alpha: float = setting(0.9, "decay of the reward per step", gt=0, le=1)


class PRMRewardSettings(Section):
    """The F1 of the answer, and the values that a process reward model gives the steps."""

    former = constants(metric="f1")

    model: str | None = execution(None, PRM, "--prm")
    weight: float = setting(0.5, "weight of the values of steps in their advantages", ge=0)


class HiPRAGSettings(Section):
    """HiPRAG, Eq. 1 (arXiv:2510.07794): a bonus for steps that search when they must, and only then."""

    former = constants(max_tokens=256)

    lambda_f: float = setting(0.2, "weight of the format", ge=0, le=1)
    lambda_p: float = setting(0.4, "maximum bonus; 0 needs no judge (the paper's Search-R1-step*)", ge=0)
    over_search: bool = setting(True, "detect searches for facts that the policy already knew")
    under_search: bool = setting(True, "detect false steps without a search")

    @property
    def detects(self) -> bool:
        """Whether any step has to be judged."""
        return self.lambda_p > 0 and (self.over_search or self.under_search)


class SearchP1Settings(Section):
    """Search-P1, Eq. 4 to 8: a good plan, carried out, and partial credit for a wrong answer."""

    lambda_p: float = setting(0.3, "weight of the path", ge=0)
    lambda_a: float = setting(0.6, "weight of the outcome", ge=0)
    lambda_f: float = setting(0.1, "weight of the format", ge=0)
    self_track: bool = setting(True, "score how well the policy follows its own plan (Eq. 6)")
    reference_track: bool = setting(True, "score how much of the reference plan is covered (Eq. 7)")
    efficiency_factor: bool = setting(
        True, "multiply both tracks by effective steps per action (Eq. 6 and 7; Alg. 3 does not)"
    )
    format: Literal["soft", "strict", "none"] = setting(
        "soft",
        "format reward. soft: 1 or 0.5, and an invalid trajectory earns 0; strict: a trajectory out of format earns 0; "
        "none: no format reward",
    )
    outcome: Literal["soft", "binary"] = setting(
        "soft", "soft: a wrong answer can earn part of the outcome (Eq. 8); binary: it cannot"
    )
    alpha: float = setting(0.8, "weight of a partly right answer; the reasoning has the rest of 1 (Eq. 8)", ge=0, le=1)


class WhenToSearchSettings(Section):
    """Learning when to search, Eq. 6 to 12: stage 1 rewards searching if an answer is wrong, stage 2 penalises it."""

    former = constants(
        auto_window=20, auto_min_rise=0.02, f1_threshold=0.8, no_stage_one=False, no_stage_two=False, unified=False
    )

    beta: float = setting(0.3, "reward of one retrieval (Eq. 10 and 11)", ge=0)
    rc_cap: int = setting(
        3,
        "maximum retrievals that count in Eq. 10 and 11, so that a wrong answer never earns as much as a right one of "
        "the same form",
        ge=0,
    )
    eq10_as_printed: bool = setting(
        False,
        "count every retrieval in Eq. 10 and 11, as they are printed, whatever rc_cap is; a wrong answer can then earn "
        "more than a right one",
    )
    stages: Literal["both", "one", "two", "unified"] = setting(
        "both",
        "ablations: stay in stage one, begin with stage two, or have no stages and both terms of Eq. 10 and 11 at once "
        "(unified, Table 2; a wrong answer can then earn more than a right one)",
    )
    switch_step: int | Literal["auto"] = setting(
        "auto", "optimizer step at which stage 2 begins; auto: once retrievals per question stop rising"
    )
    correct: Literal["em", "f1", "judge"] = setting(
        "em",
        "what counts as correct: exact match, an F1 of at least 0.8, or the verdict of --judge, as in the paper "
        "(sec. 4.1)",
    )
    eq8_as_printed: bool = setting(False, "use half of the mean similarity, as Eq. 8 is printed")
    encoder: str = setting(
        "lexical", "encoder that compares queries: lexical, or a sentence-transformers model (a Hub id or a folder)"
    )
    no_r_a: bool = setting(False, "ablation: ignore whether the answer is right (r_a is 0)")
    no_r_s: bool = setting(False, "ablation: ignore the similarity of queries (Eq. 9 is 0)")

    @field_validator("switch_step")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"step {value} never comes; use 0 or more, or auto")
        return value

    @model_validator(mode="after")
    def _right_answers_earn_more(self) -> WhenToSearchSettings:
        # The two r_a differ by 2 - beta * rc_cap; r_s, from -1 to 0, can offset 1 of that.
        limit = 2 if self.no_r_s else 1
        if not (self.eq10_as_printed or self.stages == "unified") and self.beta * self.rc_cap >= limit:
            raise ValueError(
                f"beta {self.beta} times rc_cap {self.rc_cap} is {limit} or more: a wrong answer would earn as much as "
                "a right one (Eq. 9 to 12); lower one of them, or take the equations as they are printed "
                "(eq10_as_printed)"
            )
        return self


class RewardSettings(Section):
    """The chosen reward, and the weights of each."""

    name: str = setting(
        "outcome",
        "reward function: outcome, spre, prm, hiprag, search-p1, when-to-search, or your own class or function as "
        "python:PACKAGE.MODULE:NAME",
        "--reward",
    )
    outcome: OutcomeSettings = OutcomeSettings()
    spre: SPRESettings = SPRESettings()
    prm: PRMRewardSettings = PRMRewardSettings()
    hiprag: HiPRAGSettings = HiPRAGSettings()
    search_p1: SearchP1Settings = SearchP1Settings()
    when_to_search: WhenToSearchSettings = WhenToSearchSettings()
