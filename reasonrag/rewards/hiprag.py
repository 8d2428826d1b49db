"""HiPRAG's reward: detect needless and missing searches, and give a bonus for all other steps (arXiv:2510.07794)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from reasonrag.core.errors import BackendError
from reasonrag.core.text import normalize_answer, one_line, quotable
from reasonrag.core.types import Completion, Prompt
from reasonrag.formats.base import Block, Format, Reading, chat
from reasonrag.llm.base import LLM, Sampling
from reasonrag.rewards.base import BatchReward, Read, RewardSettings, Score
from reasonrag.rewards.judge import JudgeService, same_meaning, step_holds
from reasonrag.rollout import gather_all

_WITHOUT_SEARCH = Sampling(temperature=0.0, max_tokens=256, seed=0)  # of the policy's answers
_NOTHING = re.compile(
    r"(none|nothing|unknown|nil|na|not (found|known|given|mentioned|available|clear)( \w+)*|"
    r"(there is |i have |i found |found )?no (\w+ )?(information|evidence|conclusion|result|mention)s?( \w+)*)?"
)


@dataclass(frozen=True, slots=True)
class StepFlag:
    """Whether one step searched, and whether that was the wrong choice.

    `suboptimal` is None if that is unknown, for this `cause`: `unreadable`, a backend's, or `silent` for a step that
    concludes nothing.
    """

    kind: Literal["search", "own"]
    suboptimal: bool | None
    cause: str = ""


def hiprag_reward(
    answer: float, well_formed: bool, optimal: float | None, *, lambda_f: float, lambda_p: float
) -> tuple[float, float]:
    """Return reward and bonus: `A(1 - lf) + lf F + lp A F Ncorr/N` (arXiv:2510.07794, eq. 1).

    Args:
        answer: A, 0 or 1.
        well_formed: F.
        optimal: Ncorr/N in [0, 1]; None if no step is known, which earns no bonus.
        lambda_f: lf in [0, 1].
        lambda_p: lp, the largest bonus.

    Returns:
        The reward in [0, 1 + lp], and the part of it that is the bonus, in [0, lp].

    Right, well-formed, 3 of 4 steps well chosen: 0.8 + 0.2
    + 0.4 * 3/4. Right but not well-formed: 0.8, no bonus.

    >>> hiprag_reward(1.0, True, 3 / 4, lambda_f=0.2, lambda_p=0.4)
    (1.3, 0.30000000000000004)
    >>> hiprag_reward(1.0, False, 1.0, lambda_f=0.2, lambda_p=0.4)
    (0.8, 0.0)
    """
    bonus = lambda_p * answer * well_formed * (optimal or 0.0)
    return answer * (1 - lambda_f) + lambda_f * well_formed + bonus, bonus


def optimal_share(flags: Iterable[StepFlag]) -> float | None:
    """Return `Ncorr/N` of eq. 1 over the known steps; None if no step is known.

    A silent step counts in N alone: a search that concludes nothing
    has not shown that it was needed, and if it counted as unknown,
    a policy could hide its needless searches behind silence.

    >>> good, needless, unknown = StepFlag("own", False), StepFlag("search", True), StepFlag("search", None)
    >>> optimal_share([good, needless, unknown]), optimal_share([unknown])
    (0.5, None)
    >>> optimal_share([good, StepFlag("search", None, "silent")])
    0.5
    """
    known = [flag.suboptimal is False for flag in flags if flag.suboptimal is not None or flag.cause == "silent"]
    return fmean(known) if known else None


def concludes_nothing(conclusion: str, before: str = "") -> bool:
    """Return whether a conclusion says nothing new: it is empty, says so, or repeats that of the step `before`.

    >>> [concludes_nothing(text) for text in ("", "None.", "No information was found", "No Country for Old Men")]
    [True, True, True, False]
    >>> concludes_nothing("It is Paris", "it is Paris.")
    True
    """
    said = normalize_answer(conclusion)
    return bool(_NOTHING.fullmatch(said)) or said == normalize_answer(before)


async def detect(
    readings: Sequence[Reading],
    *,
    judge: JudgeService | None,
    policy: LLM | None,
    over_search: bool = True,
    under_search: bool = True,
    counts: Counter[str] | None = None,
) -> list[list[StepFlag]]:
    """Return `[B][steps]`, a flag for each step of each reading, in any format (arXiv:2510.07794, sec. 3.2).

    A search is needless if the policy, given the query alone, knows the step's
    conclusion. A step without a search is false if a verifier finds its reasoning or
    conclusion wrong. Both kinds are judged concurrently, equal steps once; each
    distinct query is asked once, greedily. If a judge or a policy fails, or a step concludes nothing, its flag is
    None and counted.

    Args:
        readings: the trajectories as their format reads them.
        judge: compares and verifies; its prompt set has `hiprag/direct`,
            which asks the policy for its own knowledge.
        policy: the model whose knowledge is probed; needed to find needless searches.
        over_search: False takes every search as needed,
            without a call (the ablation "under-search only").
        under_search: False takes every step without a search as right, without a call.
        counts: increased by name: `over.asked`, `over.unknown`
            and `over.CAUSE`, likewise `under`; `regenerated`.

    Raises:
        ConfigError: the prompt set lacks a text.
        Interrupted: the run is draining.
    """
    steps = [_keys(reading.blocks) for reading in readings]
    # Equal steps of a group's attempts are judged once; a dictionary, as its order is theirs.
    to_judge = dict.fromkeys(
        step for keys in steps for step in keys if (over_search if step.is_search else under_search)
    )
    detection = _Detection(judge, policy, Counter() if counts is None else counts)
    flag_of = dict(zip(to_judge, await gather_all(map(detection.flag, to_judge)), strict=True))
    return [[flag_of.get(step, StepFlag(_kind(step), False)) for step in keys] for keys in steps]


def _kind(step: Block) -> Literal["search", "own"]:
    return "search" if step.is_search else "own"


def _keys(blocks: Sequence[Block]) -> list[Block]:
    """Return the texts that the flag of each step depends on; a search that concludes nothing has no conclusion."""
    keys, before = [], ""
    for block in blocks:
        if block.query is None:
            keys.append(Block(block.reasoning, conclusion=block.conclusion))
        else:
            said = "" if concludes_nothing(block.conclusion, before) else block.conclusion
            keys.append(Block(query=one_line(block.query), conclusion=said))
        before = block.conclusion
    return keys


@dataclass(eq=False)
class _Detection:
    """Judges the steps of one batch; the policy answers each query once."""

    judge: Any
    policy: Any
    counts: Counter[str]
    answers: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)  # without a search, by query

    async def flag(self, step: Block) -> StepFlag:
        """Compute Over(step) for a search, Under(step) for any other."""
        detector = "over" if step.is_search else "under"
        if not step.conclusion.strip() and (step.is_search or not step.reasoning.strip()):
            cause = "silent"
        else:
            self.counts[f"{detector}.asked"] += 1
            try:
                return StepFlag(_kind(step), await self._is_suboptimal(step))
            except BackendError as error:
                cause = error.cause
        self.counts.update((f"{detector}.unknown", f"{detector}.{cause}"))
        return StepFlag(_kind(step), None, cause)

    async def _is_suboptimal(self, step: Block) -> bool:
        if step.query is None:
            return not await step_holds(self.judge, step.reasoning, step.conclusion)
        if step.query not in self.answers:
            self.counts["regenerated"] += 1
            # A task, so that another step with the same query waits for the same answer.
            prompt = Prompt(chat(self.judge.prompts.text("hiprag/direct"), quotable(step.query)))
            self.answers[step.query] = asyncio.ensure_future(self.policy.complete(prompt, _WITHOUT_SEARCH))
        answer = (await self.answers[step.query]).text.strip()
        # A policy with nothing to say does not know the answer: the search was needed.
        return bool(answer) and await same_meaning(self.judge, step.conclusion, answer)


class HiPRAGReward(BatchReward):
    """Eq. 1. Only trajectories that are right (cover match) and well-formed are judged; the others cost no call.

    A step that is unknown because the judge's reply was unreadable is
    left out of Ncorr and N; if no step is known, the bonus is 0. A step
    that concludes nothing is in N alone. If no step is known because a
    backend is late or unreachable, the trajectory gets no score.

    Parts: `answer` A, `format` F, `bonus`, `steps`, `searches`, `own_steps`; for judged trajectories also
    `known_steps`, of them `searches_known` and `own_steps_known`, `over`, `under` (how many of each kind are
    suboptimal), and `silent` (how many conclude nothing), which are None for the others.
    """

    @staticmethod
    def needs(settings: RewardSettings, format: Format) -> frozenset[str]:
        hiprag = settings.hiprag
        if hiprag.lambda_p == 0 or not (hiprag.over_search or hiprag.under_search):  # then no step has to be judged
            return frozenset()
        return frozenset({"judge", "policy"} if hiprag.over_search else {"judge"})

    async def _values(self, batch: Sequence[Read], step: int) -> list[Score]:
        settings = self.settings.hiprag
        judged = [read for read in batch if settings.lambda_p and read.answer("cem") and read.reading.well_formed]
        flags = await detect(
            [read.reading for read in judged],
            judge=self.parts.judge,
            policy=self.parts.policy,
            over_search=settings.over_search,
            under_search=settings.under_search,
        )
        # By identity: two equal trajectories have components of their own.
        flags_of = {id(read): steps for read, steps in zip(judged, flags, strict=True)}
        return [self._scored(read, flags_of.get(id(read))) for read in batch]

    def _scored(self, read: Read, flags: Sequence[StepFlag] | None) -> Score:
        settings, well_formed, answer = self.settings.hiprag, read.reading.well_formed, read.answer("cem")
        optimal = optimal_share(flags or ())
        value, bonus = hiprag_reward(
            answer, well_formed, optimal, lambda_f=settings.lambda_f, lambda_p=settings.lambda_p
        )
        steps, searches = len(read.reading.blocks), len(read.reading.queries)
        read.parts.update(answer=answer, format=float(well_formed), bonus=bonus)
        read.parts.update(steps=float(steps), searches=float(searches), own_steps=float(steps - searches))
        suboptimal = Counter(flag.kind for flag in flags or () if flag.suboptimal)
        known = Counter(flag.kind for flag in flags or () if flag.suboptimal is not None)
        counts = {
            "known_steps": known.total(),
            "searches_known": known["search"],
            "own_steps_known": known["own"],
            "over": suboptimal["search"],
            "under": suboptimal["own"],
            "silent": sum(flag.cause == "silent" for flag in flags or ()),
        }
        read.parts.update({name: None if flags is None else float(count) for name, count in counts.items()})
        # An unreadable verdict is the judge's word on this step; an outage decides nothing, and may end.
        failures = [flag.cause for flag in flags or () if flag.cause not in ("", "silent", "unreadable")]
        if failures and optimal is None:
            read.parts["bonus"] = None
            return Score(None, read.parts, failures[0])
        return Score(value, read.parts)
