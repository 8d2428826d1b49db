"""A policy without a neural network: weak, honest and quick. For trying a corpus before renting a GPU, and for tests.

It sees only the prompt and answers in the contract of the `reasonrag` format: names in the question and
in the evidence become queries, the sentence that shares most words with the query becomes evidence, and a
span of the evidence becomes the answer. Each choice is the best one at temperature 0, and sampled above.

Reading is linear in the text and keeps its order; nothing iterates over
a set: its order depends on the interpreter's hash seed. A tree search
reads the same passages again and again, so what a text holds is cached.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import one_line, quotable
from reasonrag.core.types import Completion, Prompt
from reasonrag.formats.base import Stage, last_tag
from reasonrag.formats.reasonrag import ECHOES, OPENINGS, View, read
from reasonrag.llm.base import Sampling

_WORD = re.compile(r"\w+(?:['’.&-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?][\"”’')\]]*\s+(?=\S)")
_QUOTED = re.compile(r"[\"“]([^\"“”]{1,80}[^\"“”\s])[\"”]")
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(rf"\b(?:\d{{1,2}} {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}|{_MONTH} \d{{4}}|[12]\d{{3}})\b")
_YEAR = re.compile(r"\b[12]\d{3}\b")
_WORDS = json.loads(Path(__file__).with_name("reader_words.json").read_text("utf-8"))
# Lower-case words that may stand inside of a name, as in "Lord of the Isles".
_CONNECTORS = frozenset(_WORDS["connectors"].split())
_CALENDAR = frozenset(_WORDS["calendar"].split())
# Words that do not tell one sentence from another; "named" and "called" are in most questions.
_STOP_WORDS = frozenset(_WORDS["stop_words"].split())
# Words of one relation without a common beginning: a question asks "born", a page says "birth".
_IRREGULAR_STEMS: dict[str, str] = _WORDS["irregular_stems"]
_SUFFIX = re.compile(r"(?:ings?|ers?|ors?|ed|es|s)$")

_AUXILIARY = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should)\b", re.IGNORECASE)
_QUESTION_WORD = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_ASKS_DATE = re.compile(r"\b(?:(?:what|which) (?:year|date|month|decade|day)|date of (?:birth|death))\b", re.IGNORECASE)
_BRACKETS = re.compile(r"\([^()]{0,80}\)")
_OR = re.compile(r",? or ")


class Span(NamedTuple):
    """A piece of a text, and the index of its first character."""

    text: str
    start: int


class Kind(StrEnum):
    """The form of an answer."""

    YES_NO = "yes_no"
    CHOICE = "choice"
    DATE = "date"
    NAME = "name"
    BRIDGE = "bridge"  # a name on the way to the answer; no question has this kind


@dataclass(frozen=True, slots=True)
class ParsedQuestion:
    """What a question asks for."""

    text: str
    kind: Kind
    options: tuple[str, ...]  # the two options of a choice
    entities: tuple[str, ...]  # names in the question; the options if there are any
    relation: tuple[str, ...]  # content words outside the entities, as written

    @property
    def relation_stems(self) -> frozenset[str]:
        return stem_set(" ".join(self.relation))


def stem(word: str) -> str:
    """Return a crude stem: enough to see that a director is someone who directed.

    >>> stem("Directors"), stem("directed"), stem("wife's")
    ('direct', 'direct', 'spouse')
    """
    lower = _without_genitive(word.casefold())
    if lower in _IRREGULAR_STEMS:
        return _IRREGULAR_STEMS[lower]
    return _SUFFIX.sub("", lower) if len(lower) > 4 else lower


@lru_cache(maxsize=4_096)
def stems(text: str) -> tuple[str, ...]:
    """Return the stems of the content words, in order, with repeats."""
    return tuple(map(stem, content_words(text)))


@lru_cache(maxsize=4_096)
def stem_set(text: str) -> frozenset[str]:
    """Return the stems of the content words, for membership only."""
    return frozenset(stems(text))


def content_words(text: str) -> list[str]:
    """Return the words as written, without stop words."""
    return [word for word in _WORD.findall(text) if word.casefold() not in _STOP_WORDS]


@lru_cache(maxsize=8_192)
def sentences(text: str) -> tuple[str, ...]:
    """Return the sentences in order; a dot before a lower-case letter or inside of a number does not end one.

    >>> sentences("Bond met M. there. He won 3.5 points!")
    ('Bond met M. there.', 'He won 3.5 points!')
    """
    ended, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        if not text[end.end()].islower():
            ended.append(text[start : end.end()].rstrip())
            start = end.end()
    rest = text[start:].strip()
    return (*ended, rest) if rest else tuple(ended)


@lru_cache(maxsize=4_096)
def names(text: str) -> tuple[Span, ...]:
    """Return capitalised spans and quoted titles, in order; months, weekdays and lone stop words are not names.

    >>> [name.text for name in names('The song "Red hat" is by Bo Lund of the Faroe Islands, not by him.')]
    ['Red hat', 'Bo Lund of the Faroe Islands']
    """
    spans = [Span(quoted[1].strip(" ,."), quoted.start(1)) for quoted in _QUOTED.finditer(text)]
    # Blanks of the same length, so that the positions of later names stay correct.
    unquoted = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), text)
    spans += [_trimmed(unquoted, group) for group in _capitalised_groups(unquoted)]
    return tuple(sorted((span for span in spans if span.text), key=lambda span: span.start))


def _capitalised_groups(text: str) -> list[list[re.Match[str]]]:
    """Return runs of capitalised words, up to ten each, with the connectors and small numbers that follow them."""
    groups: list[list[re.Match[str]]] = [[]]
    for word in _WORD.finditer(text):
        if groups[-1] and (text[groups[-1][-1].end() : word.start()] != " " or len(groups[-1]) == 10):
            groups.append([])
        continues = word[0] in _CONNECTORS or (word[0].isdigit() and len(word[0]) < 3)
        if word[0][0].isupper() or (groups[-1] and continues):
            groups[-1].append(word)
        elif groups[-1]:
            groups.append([])
    return groups


def _trimmed(text: str, group: list[re.Match[str]]) -> Span:
    """Return a group without connectors at its end and stop words at its start; an empty text if nothing is left."""
    while group and group[-1][0] in _CONNECTORS:
        group = group[:-1]
    while group and group[0][0].casefold() in _STOP_WORDS:
        group = group[1:]
    word = group[0][0].casefold() if group else ""
    if not word or word.isdigit() or word in _CALENDAR:
        return Span("", 0)
    start = group[0].start()
    return Span(_without_genitive(text[start : group[-1].end()]), start)


def _without_genitive(text: str) -> str:
    return text.removesuffix("'s").removesuffix("’s")


@lru_cache(maxsize=8_192)
def dates(text: str) -> tuple[Span, ...]:
    """Return full dates, months with a year, and bare years of four digits, in order."""
    return tuple(Span(date[0], date.start()) for date in _DATE.finditer(text))


def mentions(text: str, name: str) -> bool:
    """Return whether every content word of `name` is in `text`; False for a name without content words."""
    wanted = stem_set(name)
    return bool(wanted) and wanted <= stem_set(text)


def about(name: str, pieces: Sequence[str]) -> list[str]:
    """Return the pieces that mention `name`."""
    return [piece for piece in pieces if mentions(piece, name)]


@lru_cache(maxsize=4_096)
def analyse(question: str) -> ParsedQuestion:
    """Return what `question` asks for, from its wording alone.

    >>> analyse("Who is older, Ada Holm or Bo Lind?").options
    ('Ada Holm', 'Bo Lind')
    """
    options = _options(question)
    # "(1996 Film)" distinguishes titles and is not a name itself.
    plain = _BRACKETS.sub(lambda group: group[0].casefold(), question)
    entities = options or tuple(dict.fromkeys(span.text for span in names(plain)))
    taken = stem_set(" ".join(entities))
    relation = tuple(dict.fromkeys(word for word in content_words(question) if stem(word) not in taken))
    return ParsedQuestion(question, Kind.CHOICE if options else _kind(question), options, entities, relation)


def _kind(question: str) -> Kind:
    first = _QUESTION_WORD.search(question)
    if _AUXILIARY.match(question):
        return Kind.YES_NO
    if (first and first[0].casefold() == "when") or _ASKS_DATE.search(question):
        return Kind.DATE
    return Kind.NAME


def _options(question: str) -> tuple[str, ...]:
    """Return the two sides of the last "or" if both look like names, else nothing."""
    *_, last = (None, *_OR.finditer(question))
    if last is None:
        return ()
    # "Who is older, A or B?": the first option begins after the last comma, if that is near enough.
    left, right = question[: last.start()], question[last.end() :].strip(" ?.!")
    named, comma = names(left), left.rfind(", ")
    if comma >= 0 and len(left) - comma < 80:
        left = left[comma + 2 :]
    elif named:
        left = named[-1].text
    else:
        return ()
    sides = tuple(side.strip(" \"“”'?,") for side in (left, right.partition(", ")[0]))
    look_like_names = all(any(char.isupper() or char.isdigit() for char in side) for side in sides)
    return sides if look_like_names else ()


# The reader

Scored = tuple[str, float]

_OPENINGS = {"query": "So the next query is <query>", **OPENINGS}
_STOPS = (("</query>", "</answer>"), ("</evidence>",), ("</answer>",))
_LINKS, _PLAIN = stem_set(_WORDS["links"]), stem_set(_WORDS["plain"])
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

    `temperature` and `seed` (None counts as 0) are honoured; `top_p`
    and `max_tokens` have no meaning here, as there are no tokens.
    Token ids and log-probabilities are None; token counts are words.
    """

    name = "extractive"

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return a completion, which depends on the prompt, the temperature and the seed only.

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
        text = _Reader(view, sampling.temperature, sampling.seed or 0).write()
        if prompt.prefix:  # its tag is open already
            text = text.rpartition(prompt.prefix[prompt.prefix.rfind("<") :])[2]
        return Completion(text, prompt_tokens=prompt_words, completion_tokens=len(text.split()))

    async def aclose(self) -> None:
        pass


class _Reader:
    """One reading of one prompt. Scores become choices in `_choose`; nothing else is random."""

    def __init__(self, view: View, temperature: float, seed: int) -> None:
        self._view = view
        self._temperature = temperature
        self._random = random.Random(seed)
        self._parsed = analyse(view.question)
        self._queries: list[str] = []
        self._evidence: list[str] = []
        for thought in view.thoughts:
            tag, body = last_tag(thought, tuple(_OPENINGS)) or ("evidence", thought)
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
            # Answers with the probability sigmoid(readiness / temperature).
            if queries and self._index((0.0, self._readiness()), sharpness=1.0) == 0:
                return self._say("query", self._choose(queries))
        elif found:
            self._evidence.append(found)
        return self._say("answer", self._choose(candidates(self._parsed, self._evidence, self._queries)))

    def _say(self, kind: str, body: str) -> str:
        body = quotable(body) or "unknown"
        return _OPENINGS[kind] + (f'"{body}"' if body in ECHOES else body) + f"</{kind}>"

    def _choose(self, scored: Sequence[Scored]) -> str:
        return scored[self._index([score for _, score in scored])][0]

    def _index(self, scores: Sequence[float], sharpness: float = 2.0) -> int:
        """Return the (first) best at temperature 0, else a draw from a softmax over score / temperature."""
        top = max(scores)
        if self._temperature <= 0:
            return scores.index(top)
        # Less the best score, so that no exponential overflows.
        weights = [math.exp(sharpness * (score - top) / self._temperature) for score in scores]
        return self._random.choices(range(len(scores)), weights)[0]

    def _readiness(self) -> float:
        """Return the log-odds of answering now: covering evidence raises them, names without a search lower them."""
        wanted = stem_set(self._parsed.text)
        covered = len(wanted & stem_set(" ".join(self._evidence))) / max(len(wanted), 1)
        unfollowed = max(_bridges_wanted(self._parsed) + 1 - len(self._queries), 0)
        return -2.5 + len(self._evidence) + 2.0 * covered - len(self._unseen_names()) - unfollowed

    def _unseen_names(self) -> list[str]:
        """Return the names of the question that no evidence mentions."""
        return [name for name in self._parsed.entities if not any(mentions(note, name) for note in self._evidence)]

    def _new_queries(self) -> list[Scored]:
        """Return queries with a score each; none repeats an earlier one."""
        parsed = self._parsed
        relation = " ".join(parsed.relation[:8])
        scored: list[Scored] = [] if self._queries else [(" ".join(content_words(parsed.text)), 1.5)]
        unseen = self._unseen_names()
        for name in parsed.entities:
            weight = 2.0 if name in unseen else 0.3
            scored += [(f"{name} {relation}", weight), (name, weight - 0.3)]
        # The next hop starts at a name that the evidence brings up, scored as an answer is.
        pieces = list(chain.from_iterable(map(sentences, self._evidence)))
        for name, score in spans(replace(parsed, kind=Kind.BRIDGE), pieces, self._queries):
            if name[0].isupper() and not _DEMONYM.match(name):
                scored += [(f"{name} {relation}", score - 0.5), (name, score - 0.5 - 0.5)]
        earlier = [frozenset(), *map(stem_set, self._queries)]
        new = [(one_line(query), score) for query, score in scored if stem_set(query) not in earlier]
        return new or ([] if self._queries else [(parsed.text, 0.0)])

    def _extract(self) -> str:
        """Return the sentence that best fits the latest query, with its title; "" if none shares a word with it."""
        rows = [(title, text) for title, body in self._view.documents for text in sentences(body)]
        rows = [row for row in rows if not any(row[1] in note for note in self._evidence)] or rows
        scores = _overlap(stem_set(self._queries[-1] if self._queries else self._view.question), rows)
        fitting = [(row, score) for row, score in zip(rows, scores, strict=True) if score > 0]
        if not fitting:
            return ""
        title, text = fitting[self._index([score for _, score in fitting])][0]
        return text if not title or mentions(text, title) else f"{title}: {text}"


def open_reader(address: ModelAddress, config: ModelConfig) -> ExtractiveLLM:
    """Open the reader at `extractive`."""
    return ExtractiveLLM()


def _overlap(query: frozenset[str], rows: Sequence[tuple[str, str]]) -> list[float]:
    """Return `[rows]` the idf-weighted share of the query in each (title, sentence), more if the title is asked for."""
    # Rare words decide: the inverse document frequency is over the sentences of this one search.
    words_of_rows = [tuple(dict.fromkeys(stems(f"{title} {text}"))) for title, text in rows]
    count = Counter(chain.from_iterable(words_of_rows))
    idf = {word: math.log(1 + len(rows) / (1 + n)) for word, n in count.items()}
    # Sorted, because a sum of floats depends on its order, and a set has none.
    total = sum(sorted(idf.get(word, 0.0) for word in query)) or 1.0
    scores = []
    for (title, _), words in zip(rows, words_of_rows, strict=True):
        shared = sum(idf[word] for word in words if word in query)
        title_asked = bool(stem_set(title)) and stem_set(title) <= query
        scores.append(4.0 * shared / total + title_asked if shared else 0.0)
    return scores


def candidates(parsed: ParsedQuestion, evidence: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Return answers with a score each, never empty, in the order of the evidence; a guess if there is no evidence.

    Args:
        parsed: the question.
        evidence: the notes of the thoughts, oldest first.
        queries: the searches so far; a name that was searched for is rarely the answer.
    """
    pieces = list(dict.fromkeys(chain.from_iterable(map(sentences, evidence))))
    if parsed.kind is Kind.YES_NO:
        return _yes_no(parsed, pieces)
    if parsed.kind is Kind.CHOICE:
        # An option scores by the words of the question that the evidence about it shares.
        stated = [stem_set(" ".join(about(option, pieces))) for option in parsed.options]
        shared = (float(len(parsed.relation_stems & stems_here)) for stems_here in stated)
        return list(zip(parsed.options, shared, strict=True))
    return spans(parsed, pieces, queries) or [("unknown", 0.0)]


def _yes_no(parsed: ParsedQuestion, pieces: Sequence[str]) -> list[Scored]:
    """Score yes if the evidence about both sides agrees."""
    sides = [" ".join(about(entity, pieces)) for entity in parsed.entities[:2]]
    if len(sides) < 2 or not all(sides):
        known = len(parsed.relation_stems & stem_set(" ".join(pieces)))
        return [("yes", 0.3 * known), ("no", 0.5)]
    if _SAME.search(parsed.text):
        first, second = ({name.text for name in names(side) if not mentions(parsed.text, name.text)} for side in sides)
        agree = not first.isdisjoint(second)
    else:
        agree = bool(parsed.relation_stems & stem_set(sides[0]) & stem_set(sides[1]))
    return [("yes", 1.5 * agree), ("no", 1.5 * (not agree))]


def spans(parsed: ParsedQuestion, pieces: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Return dates or names of the pieces that are not in the question; repeated ones score higher."""
    scores: dict[str, float] = {}
    wanted = stem_set(parsed.text)
    latest = stem_set(queries[-1]) if queries else wanted
    for number, piece in enumerate(pieces):
        stems_here = stem_set(piece)
        shared = len(wanted & stems_here) / max(len(wanted), 1) + len(latest & stems_here) / max(len(latest), 1)
        for rank, span in enumerate(_spans_of_kind(parsed, piece)):
            score = shared + 0.5 * number / len(pieces) - 0.05 * rank + _fit(parsed, piece, span, rank)
            # What was searched for is rarely the answer.
            if any(stem_set(span.text) <= stem_set(query) for query in queries):
                score -= 0.5
            scores[span.text] = max(score, scores[span.text] + 0.3) if span.text in scores else score
    return list(scores.items())


def _spans_of_kind(parsed: ParsedQuestion, piece: str) -> Sequence[Span]:
    if parsed.kind is Kind.DATE:
        years_only = _YEAR_ONLY.search(parsed.text)
        return [Span(_YEAR.findall(date.text)[0], date.start) if years_only else date for date in dates(piece)]
    return [name for name in names(piece) if stems(name.text) and not mentions(parsed.text, name.text)]


def _fit(parsed: ParsedQuestion, piece: str, span: Span, rank: int) -> float:
    """Return how well a span suits the wording of the question."""
    if parsed.kind is Kind.DATE:
        return 1.0 * (rank == ("die" in parsed.relation_stems))
    before = piece[max(span.start - 12, 0) : span.start]
    after_person, after_place = bool(_AFTER_PERSON.search(before)), bool(_AFTER_PLACE.search(before))
    if parsed.kind is Kind.BRIDGE:
        return 0.6 * after_person
    if _COUNTRY.search(parsed.text):
        return 1.0 * bool(_DEMONYM.match(span.text)) + 0.3 * after_place
    if _WHERE.search(parsed.text):
        return 0.8 * after_place
    if _WHO.search(parsed.text):
        return 0.5 * (" " in span.text) + 0.4 * after_person
    return 0.3 * span.text[0].isupper()


def _bridges_wanted(parsed: ParsedQuestion) -> int:
    """Return how many names the question describes instead of naming them ("the director of ...")."""
    links = parsed.relation_stems & _LINKS
    if not links or not parsed.relation_stems - links - _PLAIN:
        return 0
    return 2 if parsed.kind in (Kind.YES_NO, Kind.CHOICE) else 1
