"""Settings of the rewards: a section each, with the paper's values as defaults and its ablations as switches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.config import PRM
from reasonrag.core.settings import Flag, Section, Tree, execution, nearest, setting

Share = Annotated[float, Field(ge=0, le=1)]

# Search-R1's release v0.3 (arXiv:2503.09516): an exact match earns 1 if well-formed, else 0.8; a wrong answer 0.2 if
# well-formed, else 0.1; no answer 0.
OUTCOME_PRESETS: dict[str, Tree] = {
    "search-r1-v0.3": {"metric": "em", "format_weight": 0.2, "answer_present": 0.1},
}


class OutcomeSettings(Section):
    """The final answer, and optionally the form: the baseline for process rewards."""

    preset: Annotated[
        str | None,
        Field(description=f"published values, below explicit settings: {', '.join(OUTCOME_PRESETS)}"),
    ] = None
    metric: Annotated[
        Literal["em", "f1", "cem"],
        Field(
            description="metric of the answer: exact match, token F1, or cover match (the answer contains a gold "
            "answer)"
        ),
    ] = "em"
    format_weight: Annotated[Share, Field(description="weight of the format; the answer has the rest of 1")] = 0.0
    answer_present: Annotated[
        Share, Field(description="minimum reward of a trajectory that has any final answer; at most format_weight")
    ] = 0.0
    search_confidence: Annotated[
        Share,
        Field(
            description="beta of beta-GRPO (arXiv:2505.17281): an answer counts as wrong if the policy gave some token "
            "of its searches a lower probability; 0: none does"
        ),
    ] = 0.0

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

    alpha: Annotated[float, Field(gt=0, le=1, description="decay of the reward per step")] = 0.9


class PRMRewardSettings(Section):
    """The answer, and the values of the steps as a process reward model says them."""

    model: str | None = execution(None, PRM, "--prm")
    metric: Literal["em", "f1", "cem"] = setting("f1", "metric of the answer")
    weight: float = setting(0.5, "weight of the values of steps in their advantages", ge=0)


class HiPRAGSettings(Section):
    """HiPRAG, Eq. 1 (arXiv:2510.07794): a bonus for steps that search when they must, and only then."""

    lambda_f: Annotated[Share, Field(description="weight of the format")] = 0.2
    lambda_p: Annotated[
        float, Field(ge=0, description="maximum bonus; 0 needs no judge (the paper's Search-R1-step*)")
    ] = 0.4
    over_search: Annotated[
        bool, Field(description="detect searches whose result the policy already knew; off: none counts as needless")
    ] = True
    under_search: Annotated[
        bool, Field(description="detect false steps without a search; off: none counts as a missing search")
    ] = True
    max_tokens: Annotated[
        int, Field(ge=1, description="maximum tokens of the answer that the policy gives without a search")
    ] = 256

    @property
    def detects(self) -> bool:
        """Whether any step has to be judged."""
        return self.lambda_p > 0 and (self.over_search or self.under_search)


class SearchP1Settings(Section):
    """Search-P1, Eq. 4 to 8: a good plan, carried out, and partial credit for a wrong answer."""

    lambda_p: Annotated[float, Field(ge=0, description="weight of the path")] = 0.3
    lambda_a: Annotated[float, Field(ge=0, description="weight of the outcome")] = 0.6
    lambda_f: Annotated[float, Field(ge=0, description="weight of the format")] = 0.1
    self_track: Annotated[bool, Field(description="score how well the policy follows its own plan (Eq. 6)")] = True
    reference_track: Annotated[bool, Field(description="score how much of the reference plan is covered (Eq. 7)")] = (
        True
    )
    efficiency_factor: Annotated[
        bool, Field(description="multiply both tracks by effective steps per action (Eq. 6 and 7; Alg. 3 does not)")
    ] = True
    format: Annotated[
        Literal["soft", "strict", "none"],
        Field(
            description="format reward. soft: 1 or 0.5, and an invalid trajectory earns 0; strict: a trajectory "
            "out of format earns 0; none: no format reward"
        ),
    ] = "soft"
    outcome: Annotated[
        Literal["soft", "binary"],
        Field(description="soft: a wrong answer can earn part of the outcome (Eq. 8); binary: it cannot"),
    ] = "soft"
    alpha: Annotated[
        Share, Field(description="weight of a partly right answer; the reasoning has the rest of 1 (Eq. 8)")
    ] = 0.8


class WhenToSearchSettings(Section):
    """Learning when to search, Eq. 6 to 12: stage 1 rewards searching if an answer is wrong, stage 2 penalises it."""

    beta: Annotated[float, Field(ge=0, description="reward of one retrieval (Eq. 10 and 11)")] = 0.3
    rc_cap: Annotated[
        int,
        Field(
            ge=0,
            description="maximum retrievals that count in Eq. 10 and 11, so that a wrong answer never earns as much as "
            "a right one of the same form",
        ),
    ] = 3
    eq10_as_printed: Annotated[
        bool,
        Field(
            description="count every retrieval in Eq. 10 and 11, as they are printed, whatever rc_cap is; a wrong "
            "answer can then earn more than a right one"
        ),
    ] = False
    switch_step: Annotated[
        int | Literal["auto"],
        Field(description="optimizer step at which stage 2 begins; auto: once retrievals per question stop rising"),
    ] = "auto"
    auto_window: Annotated[int, Field(ge=1, description="optimizer steps per window of switch_step auto")] = 20
    auto_min_rise: Annotated[
        float, Field(ge=0, description="minimum rise of retrievals per question from one window to the next")
    ] = 0.02
    correct: Annotated[
        Literal["em", "f1", "judge"],
        Field(
            description="what counts as correct: exact match, F1 of at least f1_threshold, or the verdict of --judge, "
            "as in the paper (sec. 4.1)"
        ),
    ] = "em"
    f1_threshold: Annotated[
        float, Field(gt=0, le=1, description="minimum token F1 of a correct answer, if correct is f1")
    ] = 0.8
    eq8_as_printed: Annotated[bool, Field(description="use half of the mean similarity, as Eq. 8 is printed")] = False
    encoder: Annotated[
        str,
        Field(description="what compares queries: lexical, or a sentence-transformers model (a Hub id or a folder)"),
    ] = "lexical"
    no_stage_one: Annotated[bool, Field(description="ablation: begin with stage 2")] = False
    no_stage_two: Annotated[bool, Field(description="ablation: stay in stage 1")] = False
    unified: Annotated[
        bool,
        Field(
            description="ablation: no stages, both terms of Eq. 10 and 11 at once (Table 2); a wrong answer can then "
            "earn more than a right one"
        ),
    ] = False
    no_r_a: Annotated[bool, Field(description="ablation: ignore whether the answer is right (r_a is 0)")] = False
    no_r_s: Annotated[bool, Field(description="ablation: ignore the similarity of queries (Eq. 9 is 0)")] = False

    @field_validator("switch_step")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"step {value} never comes; use 0 or more, or auto")
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> WhenToSearchSettings:
        if self.no_stage_one + self.no_stage_two + self.unified > 1:
            raise ValueError("of no_stage_one, no_stage_two and unified, two leave no stage; choose one of them")
        # The two r_a differ by 2 - beta * rc_cap; r_s, from -1 to 0, can offset 1 of that.
        limit = 2 if self.no_r_s else 1
        if not (self.eq10_as_printed or self.unified) and self.beta * self.rc_cap >= limit:
            raise ValueError(
                f"beta {self.beta} times rc_cap {self.rc_cap} is {limit} or more: a wrong answer would earn as much as "
                "a right one (Eq. 9 to 12); lower one of them, or take the equations as they are printed "
                "(eq10_as_printed)"
            )
        return self


class RewardSettings(Section):
    """The chosen reward, and the weights of each."""

    name: Annotated[
        str,
        Field(
            description="reward function: outcome, spre, prm, hiprag, search-p1, when-to-search, or your own class or "
            "function as python:PACKAGE.MODULE:NAME"
        ),
        Flag("--reward"),
    ] = "outcome"
    outcome: OutcomeSettings = OutcomeSettings()
    spre: SPRESettings = SPRESettings()
    prm: PRMRewardSettings = PRMRewardSettings()
    hiprag: HiPRAGSettings = HiPRAGSettings()
    search_p1: SearchP1Settings = SearchP1Settings()
    when_to_search: WhenToSearchSettings = WhenToSearchSettings()
