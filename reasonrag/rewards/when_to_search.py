"""The reward of "Learning when to search": cost and benefit of a retrieval, in two stages (eq. 6 to 12)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from reasonrag.core.text import one_line
from reasonrag.formats.base import Format
from reasonrag.rewards.base import BatchReward, Read, RewardParts, RewardSettings, Score, queries

MOST_WORDS = 12
_QUESTION_WORDS = frozenset({"who", "whom", "whose", "what", "which", "when", "where", "why", "how"})
_FUNCTION_WORDS = (
    "a an the this that these those it its he him his she her they them their we us our you your i me my and or but "
    "nor if as of in on at by for from to into onto with without about over under between through during before after "
    "against within upon is are was were be been being am do does did has have had can could will would shall should "
    "may might must not no so than then there here very just also only some any all each such please tell find"
)
_STOP_WORDS = _QUESTION_WORDS.union(_FUNCTION_WORDS.split())


def is_concise(query: str) -> bool:
    """Return whether a query is concise: a rule that the paper describes and does not define (sec. 3.3).

    At most 12 words, no question word in front, and at most a third
    of the words are stop-words. Words are separated by white space;
    a query in which no word has a letter or a digit is not concise.

    >>> is_concise("director of Jaws"), is_concise("Crimson Harbor 1975 film director birthplace")
    (True, True)
    >>> is_concise("Who directed Jaws?"), is_concise("the director of the film"), is_concise("???")
    (False, False, False)
    >>> is_concise(" ".join(["film"] * 12)), is_concise(" ".join(["film"] * 13))
    (True, False)
    """
    words = [word for word in map(_bare, query.split()) if word]
    if not words or len(words) > MOST_WORDS or words[0].partition("'")[0] in _QUESTION_WORDS:
        return False
    return 3 * sum(word in _STOP_WORDS for word in words) <= len(words)


def _bare(word: str) -> str:
    """Return the word in lower case, without punctuation around it.

    >>> _bare("(Who’s"), _bare("--")
    ("who's", '')
    """
    marks = "".join(char for char in word if not char.isalnum())
    return word.strip(marks).lower().replace("’", "'")


def cosine_similarity(vector: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors of one length, in [-1, 1] (eq. 7); 0 if one of them is zero.

    >>> cosine_similarity([3.0, 4.0], [4.0, 3.0]), cosine_similarity([1.0, 0.0], [0.0, 0.0])
    (0.96, 0.0)
    """
    if not (length := math.hypot(*vector) * math.hypot(*other)):
        return 0.0
    # fsum: the sum does not depend on the order of the words in a vector.
    cosine = math.fsum(x * y for x, y in zip(vector, other, strict=True)) / length
    # Rounding can exceed 1; NaN stays NaN.
    return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))


def average_similarity(vectors: Sequence[Sequence[float]]) -> float:
    """Return avg_sim of `[N][d]` vectors, one per query: the mean of eq. 7 over all pairs; 0 for fewer than two.

    Eq. 8 as it is printed divides by N(N - 1), twice the number of pairs, so it is half the mean.

    Pairs 1, 0 and 0: their mean is 1/3.

    >>> round(average_similarity([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 4)
    0.3333
    """
    similarities = [cosine_similarity(vector, other) for vector, other in combinations(vectors, 2)]
    return math.fsum(similarities) / len(similarities) if similarities else 0.0


def search_reward(concise: bool, rc: int, avg_sim: float) -> float:
    """Return r_s: `-avg_sim` from two retrievals on; before that 0, or -1 for a query that is not concise (eq. 9).

    In [-1, 0] if similarities are not negative. Without a retrieval no query can be long-winded.

    >>> search_reward(True, 1, 0.0), search_reward(False, 1, 0.0), search_reward(False, 2, 0.25)
    (0.0, -1.0, -0.25)
    """
    if rc > 1:
        return -avg_sim
    return 0.0 if concise or rc == 0 else -1.0


def answer_reward_1(correct: bool, rc: int, *, beta: float = 0.3, rc_cap: int = 3) -> float:
    """Return r_a of stage 1: 1 if the answer is right, else `-1 + beta * RC`, with RC at most `rc_cap` (eq. 10).

    Without the cap, as it is printed, a wrong answer after
    7 retrievals would be worth more than a right one.

    >>> answer_reward_1(True, 2), round(answer_reward_1(False, 2), 4), round(answer_reward_1(False, 7), 4)
    (1.0, -0.4, -0.1)
    """
    return 1.0 if correct else -1.0 + beta * min(rc, rc_cap)


def answer_reward_2(correct: bool, rc: int, *, beta: float = 0.3, rc_cap: int = 3) -> float:
    """Return r_a of stage 2: `1 - beta * RC` if the answer is right, else -1, with RC at most `rc_cap` (eq. 11).

    >>> answer_reward_2(True, 2), answer_reward_2(False, 2), round(answer_reward_2(True, 7), 4)
    (0.4, -1.0, 0.1)
    """
    return 1.0 - beta * min(rc, rc_cap) if correct else -1.0


def answer_reward_unified(correct: bool, rc: int, *, beta: float = 0.3, rc_cap: int = 3) -> float:
    """Return r_a without stages, for Table 2: the second term of eq. 10 if the answer is wrong, else that of eq. 11.

    >>> round(answer_reward_unified(True, 2), 4), round(answer_reward_unified(False, 2), 4)
    (0.4, -0.4)
    """
    return (answer_reward_2 if correct else answer_reward_1)(correct, rc, beta=beta, rc_cap=rc_cap)


# By stage; 0 is a reward without stages.
_ANSWER_REWARDS = (answer_reward_unified, answer_reward_1, answer_reward_2)


def when_to_search_format(well_formed: bool) -> float:
    """Return r_f: 1 for a well-formed trajectory, else -1 (eq. 6).

    >>> when_to_search_format(True), when_to_search_format(False)
    (1.0, -1.0)
    """
    return 1.0 if well_formed else -1.0


def when_to_search_reward(r_a: float, r_s: float, r_f: float) -> float:
    """Return r_sum = `r_a + r_s + r_f` (eq. 12).

    With equal form, similarities that are not negative and `beta * rc_cap`
    below 1, a right answer is worth more than a wrong one in both stages,
    by at least `1 - beta * rc_cap` (0.1 as published): r_s then lies in
    [-1, 0] and the two r_a differ by at least `2 - beta * rc_cap`. With
    unequal form this is not guaranteed: r_f alone differs by 2.

    Right, one good query, well-formed; wrong, the same.

    >>> when_to_search_reward(1.0, 0.0, 1.0), round(when_to_search_reward(-0.7, 0.0, 1.0), 4)
    (2.0, 0.3)
    """
    return r_a + r_s + r_f


@dataclass
class RiseDetector:
    """Detects when a number that is reported once per training step stops rising.

    It has stopped at the first step after which the mean of the
    last `window` numbers is at most `min_rise` above the mean of
    the `window` before them. Steps that were reported before are
    ignored, so that a step repeated after a restart counts once.

    >>> rise = RiseDetector(window=2, min_rise=0.1)
    >>> for step, rc in enumerate([0.0, 0.5, 1.0, 1.5, 1.5, 1.5, 1.5]):
    ...     rise.add(rc, step)
    >>> rise.stopped_at  # two windows of 1.5; a step before it was 1.25, then 1.5
    6
    """

    window: int
    min_rise: float
    stopped_at: int | None = None
    last: int = -1  # step that was reported
    numbers: list[float] = field(default_factory=list)

    def add(self, number: float, step: int) -> None:
        """Take the number of a step into account."""
        if self.stopped_at is not None or step <= self.last:
            return
        self.last = step
        self.numbers = [*self.numbers, number][-2 * self.window :]
        before, recent = self.numbers[: self.window], self.numbers[self.window :]
        if len(recent) == self.window and math.fsum(recent) - math.fsum(before) <= self.min_rise * self.window:
            self.stopped_at = step


class WhenToSearchReward(BatchReward):
    """Eq. 12. The stage follows `switch_step`, or the retrievals per question that `observe` reports.

    Parts: `correct`, `r_f`, `r_s`, `r_a`, `stage` 1 or 2 (0 if it is `unified`), `concise` (for a single
    query), `avg_sim` (for several, as in eq. 9). A part that does not apply is None.
    """

    @staticmethod
    def needs(settings: RewardSettings, format: Format) -> frozenset[str]:
        return frozenset() if settings.when_to_search.no_r_s else frozenset({"encoder"})

    def __init__(self, settings: RewardSettings, parts: RewardParts) -> None:
        super().__init__(settings, parts)
        self._retrievals = RiseDetector(window=20, min_rise=0.02)

    def stage(self, step: int) -> int:
        """Return 1 or 2, the stage at a training step; 0 without stages."""
        settings = self.settings.when_to_search
        if settings.stages != "both":
            return {"unified": 0, "one": 1, "two": 2}[settings.stages]
        if settings.switch_step == "auto":
            return 1 if self._retrievals.stopped_at is None else 2
        return 1 if step < settings.switch_step else 2

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        """Take the mean RC of a training step into account."""
        # Trajectories that failed have no components, and count in no mean.
        known = [rc for score in scores if (rc := score.parts.get("rc")) is not None]
        if known:
            self._retrievals.add(math.fsum(known) / len(known), step)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self._retrievals, name) for name in ("stopped_at", "last", "numbers")}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._retrievals = replace(self._retrievals, **state)

    async def _value(self, read: Read, step: int) -> float:
        settings, parts = self.settings.when_to_search, read.parts
        stage = self.stage(step)
        parts.update(dict.fromkeys(("correct", "r_a", "r_s", "concise", "avg_sim")), stage=float(stage))
        r_f = parts["r_f"] = when_to_search_format(read.reading.well_formed)
        r_s = parts["r_s"] = 0.0 if settings.no_r_s else await self._search_reward(read)
        correct = read.answer("em") == 1.0
        parts["correct"] = float(correct)
        earned = _ANSWER_REWARDS[stage](correct, int(parts["rc"] or 0), beta=settings.beta, rc_cap=settings.rc_cap)
        r_a = parts["r_a"] = 0.0 if settings.no_r_a else earned
        return when_to_search_reward(r_a, r_s, r_f)

    async def _search_reward(self, read: Read) -> float:
        sent = [one_line(query) for query in queries(read.trajectory)]
        concise, avg_sim = True, 0.0
        if len(sent) == 1:
            concise = is_concise(sent[0])
            read.parts["concise"] = float(concise)
        elif sent:
            # All queries in one call: only vectors of the same call can be compared.
            avg_sim = read.parts["avg_sim"] = average_similarity(await self.parts.encoder.encode(sent))
        return search_reward(concise, len(sent), avg_sim)
