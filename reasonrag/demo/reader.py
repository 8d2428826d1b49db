"""A policy without a neural network: weak, honest and quick. For trying a corpus before renting a GPU, and for tests.

It sees only the prompt and answers in the contract of the `reasonrag` format: names in the question and in the evidence
become queries, the sentence that shares most words with the query becomes evidence, and a span of the evidence becomes
the answer. Each choice is the best one at temperature 0, and sampled above.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import one_line, quotable
from reasonrag.core.types import Completion, Prompt
from reasonrag.demo.wording import (
    Asked,
    Kind,
    Span,
    about,
    analyse,
    content_words,
    dates,
    descriptions,
    mentions,
    names,
    numbers,
    sentences,
    stem_set,
    stem_starts,
    stems,
    word_set,
    year,
)
from reasonrag.formats.base import Stage
from reasonrag.formats.reasonrag import ECHOES, View, read
from reasonrag.formats.tags import last_tag
from reasonrag.llm.base import Sampling

Scored = tuple[str, float]

_TEMPLATES = {
    "query": "So the next query is <query>{}</query>",
    "evidence": "Based on the query, the relevant evidence is <evidence>{}</evidence>",
    "answer": "So the answer is <answer>{}</answer>",
}
_STOPS = (("</query>", "</answer>"), ("</evidence>",), ("</answer>",))
_EARLIEST = word_set("first earlier earliest older oldest before")
_LATEST = word_set("later latest younger youngest recently recent newer newest last")
_MOST = word_set("more most larger largest bigger higher highest longer")
_FEWEST = word_set("fewer less fewest smaller smallest lower shorter")
_MAKERS = stem_set("director performer composer producer writer author singer founder")
_KIN = stem_set("father mother wife husband spouse son daughter sibling brother sister uncle")
_PLAIN = stem_set("film song movie album book person")
_WORD = re.compile(r"\w+")
_SAME = re.compile(r"\b(?:same|share[sd]?|common)\b", re.IGNORECASE)
_YEAR_ONLY = re.compile(r"\b(?:what|which) years?\b", re.IGNORECASE)
_WHO = re.compile(r"\b(?:who|whom|whose)\b", re.IGNORECASE)
_WHERE = re.compile(r"\b(?:where|place|city|town|county|state)\b", re.IGNORECASE)
_COUNTRY = re.compile(r"\b(?:country|nationality|nation)\b", re.IGNORECASE)
_AFTER_PLACE = re.compile(r"\b(?:in|at|near|from|of) $")
_AFTER_PERSON = re.compile(r"\b(?:by|with|of|wife|husband|starring|star|actor|singer|director) $")
_DEMONYM = re.compile(r"[^\W\d_]+(?:an|ish|ese|nch|tch|ss|eek|eli|aqi|ani)\Z")  # American, Irish, Dutch


class ExtractiveLLM:
    """Serves prompts of the `reasonrag` format. A pure function of the prompt and the sampling.

    `temperature`, `seed` (None counts as 0) and `n` are honoured; `top_p` and `max_tokens` have no meaning here, as
    there are no tokens. Token ids and log-probabilities are None; token counts are words.
    """

    name = "extractive"

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """Return `[n]` completions; sample `i` depends on the prompt, the temperature and `seed + i` only.

        Raises:
            LLMError: the prompt is a judge's or of another format.
        """
        try:
            if prompt.stop not in _STOPS:
                raise ValueError(f"its stop strings are {prompt.stop!r}")
            view = read(prompt)
        except (ValueError, IndexError) as error:
            raise LLMError(
                "the extractive policy reads prompts of the reasonrag format and cannot serve another format or a "
                f"judge: choose format reasonrag, or a model for this task ({error})",
                cause="refused",
            ) from error
        prompt_words = sum(len(message.content.split()) for message in prompt.messages)
        completions = []
        for number in range(sampling.n):
            text = _Reader(view, sampling.temperature, (sampling.seed or 0) + number).write()
            completions.append(Completion(text, prompt_tokens=prompt_words, completion_tokens=len(text.split())))
        return tuple(completions)

    async def aclose(self) -> None:
        pass


class _Reader:
    """One reading of one prompt. Scores become choices in `_choose`; nothing else is random."""

    def __init__(self, view: View, temperature: float, seed: int) -> None:
        self._view = view
        self._temperature = temperature
        self._random = random.Random(seed)
        self._asked = analyse(view.question)
        self._queries: list[str] = []
        self._evidence: list[str] = []
        for thought in view.thoughts:
            tag, body = last_tag(thought, tuple(_TEMPLATES)) or ("evidence", thought)
            if tag == "query":
                self._queries.append(body)
            elif tag == "evidence" and body.lower().rstrip(".") != "none":
                self._evidence.append(body)

    def write(self) -> str:
        """Return the next step in the format's words."""
        view, found = self._view, self._extract()
        if view.stage is Stage.GROUNDING:
            return self._say("evidence", found) if found else "<evidence>None</evidence>"
        if not view.final:
            queries = self._new_queries()
            if queries and not self._decide(self._readiness()):
                return self._say("query", self._choose(queries))
        elif found:
            self._evidence.append(found)
        return self._say("answer", self._choose(candidates(self._asked, self._evidence, self._queries)))

    def _say(self, kind: str, body: str) -> str:
        body = quotable(body) or "unknown"
        return _TEMPLATES[kind].format(f'"{body}"' if body in ECHOES else body)

    def _choose(self, scored: Sequence[Scored]) -> str:
        return scored[self._index([score for _, score in scored])][0]

    def _index(self, scores: Sequence[float], sharpness: float = 2.0) -> int:
        """Return the (first) best at temperature 0, else a draw from a softmax over score / temperature."""
        top = max(scores)
        if self._temperature <= 0:
            return scores.index(top)
        weights = [math.exp(sharpness * (score - top) / self._temperature) for score in scores]
        return self._random.choices(range(len(scores)), weights)[0]

    def _decide(self, logit: float) -> bool:
        """Return True with probability sigmoid(logit / temperature)."""
        return self._index((0.0, logit), sharpness=1.0) == 1

    def _readiness(self) -> float:
        """Return the log-odds of answering now: covering evidence raises them, an unseen name lowers them."""
        wanted = stem_set(self._asked.text)
        covered = len(wanted & stem_set(" ".join(self._evidence))) / max(len(wanted), 1)
        followed = sum(not stem_set(query) <= wanted for query in self._queries)
        missing = len(self._unseen_names()) + max(_bridges_wanted(self._asked) - followed, 0)
        return -2.5 + len(self._evidence) + 2.0 * covered - missing + 0.3 * len(self._queries)

    def _unseen_names(self) -> list[str]:
        """Return the names of the question that no evidence mentions."""
        return [name for name in self._asked.entities if not any(mentions(note, name) for note in self._evidence)]

    def _new_queries(self) -> list[Scored]:
        """Return queries with a score each; none repeats an earlier one."""
        asked = self._asked
        relation = " ".join(asked.relation[:8])
        scored: list[Scored] = []
        if not self._queries:
            scored.append((" ".join(content_words(asked.text)), 1.5))
        unseen = self._unseen_names()
        for name in asked.entities:
            weight = 2.0 if name in unseen else 0.3
            scored += [(f"{name} {relation}", weight), (name, weight - 0.3)]
        # The next hop starts at a name that the evidence brings up, scored as an answer is.
        pieces = [piece for note in self._evidence for piece in sentences(note)]
        for name, score in spans(replace(asked, kind=Kind.BRIDGE), pieces, self._queries):
            if name[0].isupper() and not _DEMONYM.match(name):
                scored += [(f"{name} {relation}", score - 0.5), (name, score - 0.5 - 0.5)]
        earlier = [stem_set(query) for query in self._queries]
        new: list[Scored] = []
        for query, score in scored:
            if stem_set(query) and stem_set(query) not in earlier:
                new.append((one_line(query), score))
        return new or ([] if self._queries else [(asked.text, 0.0)])

    def _extract(self) -> str:
        """Return the sentence, at times two, that best fit the latest query; "" if none shares a word with it."""
        query = self._queries[-1] if self._queries else self._view.question
        rows = [(title, text) for title, body in self._view.documents for text in sentences(body)]
        rows = [row for row in rows if not any(row[1] in note for note in self._evidence)] or rows
        scores = _overlap(stem_set(query), stem_set(self._view.question), rows)
        fitting = [(row, score) for row, score in zip(rows, scores, strict=True) if score > 0]
        if not fitting:
            return ""
        row, score = fitting.pop(self._index([score for _, score in fitting]))
        chosen = [row]
        if fitting:
            second, second_score = fitting[self._index([score for _, score in fitting])]
            if self._decide(2.0 * (second_score - 0.7 * score)):
                chosen.append(second)
        return " ".join(text if not title or mentions(text, title) else f"{title}: {text}" for title, text in chosen)


def open_reader(address: ModelAddress, config: ModelConfig) -> ExtractiveLLM:
    """Open the reader at `extractive`."""
    return ExtractiveLLM()


def _overlap(query: frozenset[str], question: frozenset[str], rows: Sequence[tuple[str, str]]) -> list[float]:
    """Return `[rows]` the idf-weighted share of the query in each (title, sentence), more if the title is asked for."""
    words_of_rows = [tuple(dict.fromkeys(stems(f"{title} {text}"))) for title, text in rows]
    count = Counter(word for words in words_of_rows for word in words)
    idf = {word: math.log(1 + len(rows) / (1 + n)) for word, n in count.items()}
    total = sum(sorted(idf.get(word, 0.0) for word in query)) or 1.0
    scores = []
    for (title, _), words in zip(rows, words_of_rows, strict=True):
        shared = sum(idf[word] for word in words if word in query)
        extra = sum(idf[word] for word in words if word in question and word not in query)
        title_asked = bool(stem_set(title)) and stem_set(title) <= query
        scores.append((4.0 * shared + extra) / total + title_asked if shared else 0.0)
    return scores


def candidates(asked: Asked, evidence: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Return answers with a score each, never empty, in the order of the evidence; a guess if there is no evidence.

    Args:
        asked: the question.
        evidence: the notes of the thoughts, oldest first.
        queries: the searches so far; a name that was searched for is rarely the answer.
    """
    pieces = list(dict.fromkeys(piece for note in evidence for piece in sentences(note)))
    if asked.kind is Kind.YES_NO:
        return _yes_no(asked, pieces)
    if asked.kind is Kind.CHOICE:
        return _choice(asked, pieces)
    return spans(asked, pieces, queries) or [("unknown", 0.0)]


def _yes_no(asked: Asked, pieces: Sequence[str]) -> list[Scored]:
    """Score yes if the evidence about both sides agrees."""
    sides = [" ".join(about(entity, pieces)) for entity in asked.entities[:2]]
    if len(sides) < 2 or not all(sides):
        known = len(asked.relation_stems & stem_set(" ".join(pieces)))
        return [("yes", 0.3 * known), ("no", 0.5)]
    if _SAME.search(asked.text):
        new_names: list[list[str]] = []
        demonyms: list[list[str]] = []
        for side in sides:
            new_names.append([name.text for name in names(side) if not mentions(asked.text, name.text)])
            demonyms.append([name for name in new_names[-1] if _DEMONYM.match(name)])
        # A nationality comes first in the description of a person.
        agree = demonyms[0][0] in demonyms[1] if all(demonyms) else not set(new_names[0]).isdisjoint(new_names[1])
    else:
        agree = bool(asked.relation_stems & stem_set(sides[0]) & stem_set(sides[1]))
    return [("yes", 1.5 * agree), ("no", 1.5 * (not agree))]


def _choice(asked: Asked, pieces: Sequence[str]) -> list[Scored]:
    """Score the option whose year or number is the wanted extreme, else by words shared with the question."""
    words = frozenset(_WORD.findall(asked.text.casefold()))
    count = bool(words & (_MOST | _FEWEST)) and not words & (_EARLIEST | _LATEST)
    sign = bool(words & (_LATEST | _MOST)) - bool(words & (_EARLIEST | _FEWEST))
    values = [_value(asked, option, pieces, count=count) for option in asked.options]
    known = [value for value in values if value is not None]
    if sign and len(set(known)) == len(asked.options):
        best = max(known, key=lambda value: sign * value)
        return [(option, 2.5 * (value == best)) for option, value in zip(asked.options, values, strict=True)]
    scored: list[Scored] = []
    for option in asked.options:
        said = stem_set(" ".join(about(option, pieces)))
        scored.append((option, float(len(asked.relation_stems & said))))
    return scored


def _value(asked: Asked, option: str, pieces: Sequence[str], *, count: bool) -> float | None:
    """Return a number or a year of `option`; of its maker if the question asks for the maker."""
    relevant = about(option, pieces)
    if asked.relation_stems & _MAKERS:
        relevant = sorted(relevant, key=lambda piece: mentions(piece, option))
    for piece in relevant:
        if count:
            digits = [number.text.replace(",", "") for number in numbers(piece)]
            values = [float(text) for text in digits if text.isdecimal()]
        else:
            years = [year(date.text) for date in dates(piece)]
            values = [float(known) for known in years if known is not None]
        if values:
            # Of two dates of a person, the second is that of the death.
            return values[1] if "die" in asked.relation_stems and len(values) > 1 else values[0]
    return None


def spans(asked: Asked, pieces: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Return dates, numbers or names of the pieces that are not in the question; repeated ones score higher."""
    scores: dict[str, float] = {}
    wanted = stem_set(asked.text)
    latest = stem_set(queries[-1]) if queries else wanted
    for number, piece in enumerate(pieces):
        stems_here = stem_set(piece)
        shared = len(wanted & stems_here) / max(len(wanted), 1) + len(latest & stems_here) / max(len(latest), 1)
        anchors = [word.start for word in stem_starts(piece) if word.text in asked.relation_stems]
        for rank, span in enumerate(_spans_of_kind(asked, piece)):
            near = 1.5 / (1 + min((abs(span.start - anchor) for anchor in anchors), default=200) / 20)
            score = shared + near + 0.5 * number / len(pieces) - 0.05 * rank + _fit(asked, piece, span, rank)
            if any(stem_set(span.text) <= stem_set(query) for query in queries):
                score -= 0.5
            scores[span.text] = max(score, scores[span.text] + 0.3) if span.text in scores else score
    return list(scores.items())


def _spans_of_kind(asked: Asked, piece: str) -> Sequence[Span]:
    if asked.kind is Kind.DATE:
        years_only = _YEAR_ONLY.search(asked.text)
        return [Span(str(year(date.text)), date.start) if years_only else date for date in dates(piece)]
    if asked.kind is Kind.NUMBER:
        return numbers(piece)
    new = [name for name in names(piece) if stems(name.text) and not mentions(asked.text, name.text)]
    return new if _WHO.match(asked.text) or _WHERE.match(asked.text) else new + descriptions(piece)


def _fit(asked: Asked, piece: str, span: Span, rank: int) -> float:
    """Return how well a span suits the wording of the question."""
    if asked.kind is Kind.DATE:
        return 1.0 * (rank == ("die" in asked.relation_stems))
    if asked.kind is Kind.NUMBER:
        return 0.0
    before = piece[max(span.start - 12, 0) : span.start]
    after_person, after_place = bool(_AFTER_PERSON.search(before)), bool(_AFTER_PLACE.search(before))
    if asked.kind is Kind.BRIDGE:
        return 0.6 * after_person
    if _COUNTRY.search(asked.text):
        return 1.0 * bool(_DEMONYM.match(span.text)) + 0.3 * after_place
    if _WHERE.search(asked.text):
        return 0.8 * after_place
    if _WHO.search(asked.text):
        return 0.5 * (" " in span.text) + 0.4 * after_person
    return 0.3 * span.text[0].isupper()


def _bridges_wanted(asked: Asked) -> int:
    """Return how many names the question describes instead of naming them ("the director of ...")."""
    links = asked.relation_stems & (_MAKERS | _KIN)
    if not links or not asked.relation_stems - links - _PLAIN:
        return 0
    return 2 if asked.kind in (Kind.YES_NO, Kind.CHOICE) else 1
