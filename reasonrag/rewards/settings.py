"""What a reward weighs: a section each, with its paper's values as defaults and its ablations as switches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from reasonrag.core.settings import Flag, Section, Tree, nearest

Share = Annotated[float, Field(ge=0, le=1)]

# Values of Search-R1's release v0.3 (arXiv:2503.09516): an exact match earns 1 in form and 0.8 out of form; a wrong
# answer 0.2 in form and 0.1 out of form; no answer 0.
OUTCOME_PRESETS: dict[str, Tree] = {
    "search-r1-v0.3": {"metric": "em", "format_weight": 0.2, "answer_present": 0.1},
}


class OutcomeSettings(Section):
    """The final answer alone, and perhaps its form: what process rewards are compared with."""

    preset: Annotated[
        str | None, Field(description=f"published values, below what is given: {', '.join(OUTCOME_PRESETS)}")
    ] = None
    metric: Annotated[
        Literal["em", "f1", "cem"], Field(description="exact match, token F1, or cover match (a gold answer is in it)")
    ] = "em"
    format_weight: Annotated[
        Share, Field(description="weight of the form; the answer's weight is what is left of 1")
    ] = 0.0
    answer_present: Annotated[
        Share, Field(description="least value of a trajectory that has some final answer; at most format_weight")
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
                f"answer_present {self.answer_present} is above format_weight {self.format_weight}: a wrong answer out "
                "of form would earn more than one in form; lower it"
            )
        return self


class HiPRAGSettings(Section):
    """HiPRAG, Eq. 1 (arXiv:2510.07794): a bonus for steps that search when they must, and only then."""

    lambda_f: Annotated[Share, Field(description="weight of the form")] = 0.2
    lambda_p: Annotated[
        float, Field(ge=0, description="largest bonus; 0 asks no judge (the paper's Search-R1-step*)")
    ] = 0.4
    over_search: Annotated[bool, Field(description="find searches whose result the policy knew; off: all are good")] = (
        True
    )
    under_search: Annotated[
        bool, Field(description="find false steps taken without a search; off: all of them are good")
    ] = True
    max_tokens: Annotated[
        int, Field(ge=1, description="tokens of an answer that the policy gives without a search")
    ] = 256

    @property
    def detects(self) -> bool:
        """Whether any step has to be looked at."""
        return self.lambda_p > 0 and (self.over_search or self.under_search)


class SearchP1Settings(Section):
    """Search-P1, Eq. 4 to 8: is the plan good, is it followed, and how near is a wrong answer."""

    lambda_p: Annotated[float, Field(ge=0, description="weight of the path")] = 0.3
    lambda_a: Annotated[float, Field(ge=0, description="weight of the outcome")] = 0.6
    lambda_f: Annotated[float, Field(ge=0, description="weight of the form")] = 0.1
    self_track: Annotated[bool, Field(description="how well the policy's own plan is carried out (Eq. 6)")] = True
    reference_track: Annotated[bool, Field(description="how much of the reference plan is covered (Eq. 7)")] = True
    efficiency_factor: Annotated[
        bool, Field(description="multiply both tracks by effective steps per action (Eq. 6 and 7; Alg. 3 does not)")
    ] = True
    format: Annotated[
        Literal["soft", "strict", "none"],
        Field(description="soft: 1 or 0.5, worthless where invalid; strict: worthless unless in form; none: no matter"),
    ] = "soft"
    outcome: Annotated[
        Literal["soft", "binary"], Field(description="whether a wrong answer can earn some of the outcome (Eq. 8)")
    ] = "soft"
    alpha: Annotated[
        Share, Field(description="weight of a partly right answer; what is left of 1 is the reasoning's (Eq. 8)")
    ] = 0.8


class WhenToSearchSettings(Section):
    """Learning when to search, Eq. 6 to 12: first search more where an answer is wrong, then less where it is right."""

    beta: Annotated[float, Field(ge=0, description="worth of one retrieval (Eq. 10 and 11)")] = 0.3
    rc_cap: Annotated[int, Field(ge=0, description="retrievals that count in Eq. 10 and 11")] = 3
    switch_step: Annotated[
        int | Literal["auto"],
        Field(description="optimizer step at which stage 2 begins; auto: retrievals per question have stopped rising"),
    ] = "auto"
    auto_window: Annotated[int, Field(ge=1, description="steps that are averaged over to tell whether they rise")] = 20
    auto_min_rise: Annotated[
        float, Field(ge=0, description="a smaller rise from one window to the next is none, in retrievals")
    ] = 0.02
    correct: Annotated[
        Literal["em", "f1", "judge"],
        Field(description="exact match, F1 from f1_threshold on, or a judge's yes (LasJ)"),
    ] = "em"
    f1_threshold: Annotated[
        float, Field(gt=0, le=1, description="least token F1 of a right answer, where correct is f1")
    ] = 0.8
    eq8_as_printed: Annotated[bool, Field(description="half of the mean similarity, as Eq. 8 computes it")] = False
    encoder: Annotated[
        str, Field(description="compares queries: lexical, or a sentence-transformers model (id or folder)")
    ] = "lexical"
    no_stage_one: Annotated[bool, Field(description="ablation: stage 2 from the first step on")] = False
    no_stage_two: Annotated[bool, Field(description="ablation: stage 1 to the end")] = False
    no_r_s: Annotated[bool, Field(description="ablation: queries are not looked at (Eq. 9 is 0)")] = False

    @field_validator("switch_step")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError(f"step {value} never comes; give 0 or more, or auto")
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> WhenToSearchSettings:
        if self.no_stage_one and self.no_stage_two:
            raise ValueError("no_stage_one and no_stage_two leave no stage; choose one of them")
        # The two r_a are 2 - beta * rc_cap apart; r_s, from -1 to 0, can take 1 of that.
        apart = 2 if self.no_r_s else 1
        if self.beta * self.rc_cap >= apart:
            raise ValueError(
                f"beta {self.beta} times rc_cap {self.rc_cap} is {apart} or more: a wrong answer would earn as much as "
                "a right one (Eq. 9 to 12); lower one of them"
            )
        return self


class RewardSettings(Section):
    """Which reward, and the weights of each."""

    name: Annotated[
        str,
        Field(
            description="reward function: outcome, hiprag, search-p1, when-to-search, or your own class or function as "
            "python:PACKAGE.MODULE:NAME"
        ),
        Flag("--reward"),
    ] = "outcome"
    outcome: OutcomeSettings = OutcomeSettings()
    hiprag: HiPRAGSettings = HiPRAGSettings()
    search_p1: SearchP1Settings = SearchP1Settings()
    when_to_search: WhenToSearchSettings = WhenToSearchSettings()
