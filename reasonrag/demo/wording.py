"""Facts that the wording of a text shows: sentences, names, dates, numbers, and the kind of answer wanted.

Everything is linear in the text and keeps its order; nothing iterates over a set: its order depends on the
interpreter's hash seed. A tree search reads the same passages again and again, so results are cached by text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


def word_set(words: str) -> frozenset[str]:
    """Return the words of a blank-separated list, for membership only."""
    return frozenset(words.split())


_WORD = re.compile(r"\w+(?:['’.&-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?][\"”’')\]]*\s+(?=\S)")
_QUOTED = re.compile(r"[\"“]([^\"“”]{1,80}[^\"“”\s])[\"”]")
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(rf"\b(?:\d{{1,2}} {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}|{_MONTH} \d{{4}}|[12]\d{{3}})\b")
_YEAR = re.compile(r"\b[12]\d{3}\b")
_NUMBER = re.compile(
    r"\b\d[\d,]{0,14}(?:\.\d{1,6})?(?: (?:million|billion|thousand|percent)\b|%)?"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred)\b"
)
_IS_A = re.compile(r"\b(?:is|was|are|were) (?:an?|the) ([\w-]+(?: [\w-]+){0,3})")
_ABBREVIATIONS = word_set("mr mrs ms dr st jr sr inc co ltd no vol vs prof gen col capt sgt rev hon ca")
_CONNECTORS = word_set("of the de la le les von van der du del di da dos bin ibn al el")
_CALENDAR = word_set(
    "january february march april may june july august september october november december monday tuesday wednesday "
    "thursday friday saturday sunday"
)
_STOP_WORDS = word_set(
    "a about above after again against all also although am an and any are as at be because been before being below "
    "between both but by can could did do does doing down during each either few following for former from further "
    "had has have having he her here hers him his how however i if in into is it its itself just later like made many "
    "may me more most much my near no nor not now of off on once one only or other our out over own part same several "
    "she should since so some such than that the their them then there these they this those through to too two under "
    "until up upon us very was we well were what when where which while who whom whose why will with would yes you "
    "your name named called known s t"
)
_IRREGULAR_STEMS = {
    "died": "die", "dies": "die", "death": "die", "born": "birth", "wife": "spouse", "husband": "spouse",
    "married": "spouse", "wrote": "writ", "written": "writ", "writer": "writ", "son": "child", "daughter": "child",
    "children": "child", "movie": "film", "nationality": "country", "located": "locat", "location": "locat",
    "university": "college", "starring": "star", "sang": "sing", "singer": "sing", "founder": "found",
}  # fmt: skip
_SUFFIX = re.compile(r"(?:ings?|ers?|ors?|ed|es|s)$")

_AUXILIARY = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should)\b", re.IGNORECASE)
_QUESTION_WORD = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_ASKS_DATE = re.compile(r"\b(?:(?:what|which) (?:year|date|month|decade|day)|date of (?:birth|death))\b", re.IGNORECASE)
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|old|long|far|tall|high|large|big)\b|\b(?:population|percentage|number) of\b", re.IGNORECASE
)
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
    NUMBER = "number"
    NAME = "name"
    BRIDGE = "bridge"  # a name on the way to the answer; no question has this kind


@dataclass(frozen=True, slots=True)
class Asked:
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
    return tuple(stem(word) for word in content_words(text))


@lru_cache(maxsize=4_096)
def stem_set(text: str) -> frozenset[str]:
    """Return the stems of the content words, for membership only."""
    return frozenset(stems(text))


@lru_cache(maxsize=8_192)
def stem_starts(text: str) -> tuple[Span, ...]:
    """Return the stem and the start of each word, stop words included."""
    return tuple(Span(stem(word[0]), word.start()) for word in _WORD.finditer(text))


def content_words(text: str) -> list[str]:
    """Return the words as written, without stop words."""
    return [word for word in _WORD.findall(text) if word.casefold() not in _STOP_WORDS]


@lru_cache(maxsize=8_192)
def sentences(text: str) -> tuple[str, ...]:
    """Return the sentences in order. A dot after an initial or a usual abbreviation does not end one.

    >>> sentences("Dr. No met J. Bond. He won 3.5 points!")
    ('Dr. No met J. Bond.', 'He won 3.5 points!')
    """
    ended, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        last_word = text[max(start, end.start() - 12) : end.start()].rpartition(" ")[2].lstrip("(\"“'")
        if not (text[end.start()] == "." and _is_abbreviation(last_word)) and not text[end.end()].islower():
            ended.append(text[start : end.end()].rstrip())
            start = end.end()
    rest = text[start:].strip()
    return (*ended, rest) if rest else tuple(ended)


@lru_cache(maxsize=4_096)
def names(text: str) -> tuple[Span, ...]:
    """Return capitalised spans and quoted titles, in order; months, weekdays and lone stop words are not names.

    >>> [name.text for name in names('The song "Red hat" is by J. R. Lund of the Faroe Islands, not by him.')]
    ['Red hat', 'J. R. Lund of the Faroe Islands']
    """
    spans = [Span(quoted[1].strip(" ,."), quoted.start(1)) for quoted in _QUOTED.finditer(text)]
    unquoted = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), text)
    spans += [_trimmed(unquoted, group) for group in _capitalised_groups(unquoted)]
    return tuple(sorted((span for span in spans if span.text), key=lambda span: span.start))


def _capitalised_groups(text: str) -> list[list[re.Match[str]]]:
    """Return runs of capitalised words, up to ten each, with the connectors and small numbers that follow them."""
    groups: list[list[re.Match[str]]] = [[]]
    for word in _WORD.finditer(text):
        if groups[-1]:
            last = groups[-1][-1]
            gap = text[last.end() : word.start()]
            joined = gap == " " or (gap == ". " and _is_abbreviation(last[0]))
            if not joined or len(groups[-1]) == 10:
                groups.append([])
        continues = word[0] in _CONNECTORS or (word[0].isdigit() and len(word[0]) < 3)
        if word[0][0].isupper() or (groups[-1] and continues):
            groups[-1].append(word)
        elif groups[-1]:
            groups.append([])
    return groups


def _trimmed(text: str, group: list[re.Match[str]]) -> Span:
    """Return a group without connectors at its end and stop words at its start; an empty text if nothing is left."""
    first, end = 0, len(group)
    while end > 0 and group[end - 1][0] in _CONNECTORS:
        end -= 1
    while first < end and group[first][0].casefold() in _STOP_WORDS:
        first += 1
    word = group[first][0].casefold() if first < end else ""
    if not word or word.isdigit() or word in _CALENDAR or (end - first == 1 and _is_abbreviation(word)):
        return Span("", 0)
    start = group[first].start()
    return Span(_without_genitive(text[start : group[end - 1].end()]), start)


def _is_abbreviation(word: str) -> bool:
    return (len(word) == 1 and word.isupper()) or word.casefold() in _ABBREVIATIONS


def _without_genitive(text: str) -> str:
    return text.removesuffix("'s").removesuffix("’s")


@lru_cache(maxsize=8_192)
def dates(text: str) -> tuple[Span, ...]:
    """Return full dates, months with a year, and bare years of four digits, in order."""
    return tuple(Span(date[0], date.start()) for date in _DATE.finditer(text))


@lru_cache(maxsize=8_192)
def numbers(text: str) -> tuple[Span, ...]:
    """Return numbers in digits (with %, million, ...) or as a word; years only if there is nothing else."""
    spans = [Span(number[0].rstrip(","), number.start()) for number in _NUMBER.finditer(text)]
    return tuple([span for span in spans if not _YEAR.fullmatch(span.text)] or spans)


def descriptions(text: str) -> list[Span]:
    """Return the descriptions after "is a" and the like, up to four words.

    >>> [span.text for span in descriptions("Kiba is a genus of moss, not a fern.")]
    ['genus of moss']
    """
    return [Span(said[1], said.start(1)) for said in _IS_A.finditer(text)]


def year(text: str) -> int | None:
    """Return the first year from 1000 to 2999."""
    first = _YEAR.search(text)
    return int(first[0]) if first else None


def mentions(text: str, name: str) -> bool:
    """Return whether every content word of `name` is in `text`; False for a name without content words."""
    wanted = stem_set(name)
    return bool(wanted) and wanted <= stem_set(text)


def about(name: str, pieces: Sequence[str]) -> list[str]:
    """Return the pieces that mention `name`, then those that mention another name which the first ones bring up."""
    direct = [piece for piece in pieces if mentions(piece, name)]
    bridges = _distinct(span.text for piece in direct for span in names(piece) if not mentions(name, span.text))
    indirect = [piece for piece in pieces if piece not in direct and any(mentions(piece, bridge) for bridge in bridges)]
    return direct + indirect


@lru_cache(maxsize=4_096)
def analyse(question: str) -> Asked:
    """Return what `question` asks for, from its wording alone.

    >>> analyse("Who is older, Ada Holm or Bo Lind?").options
    ('Ada Holm', 'Bo Lind')
    """
    options = _options(question)
    # "(1996 Film)" distinguishes titles and is not a name itself.
    plain = _BRACKETS.sub(lambda group: group[0].casefold(), question)
    entities = options or _distinct(span.text for span in names(plain))
    taken = stem_set(" ".join(entities))
    relation = tuple(word for word in _distinct(content_words(question)) if stem(word) not in taken)
    return Asked(question, Kind.CHOICE if options else _kind(question), options, entities, relation)


def _kind(question: str) -> Kind:
    first = _QUESTION_WORD.search(question)
    if _AUXILIARY.match(question):
        return Kind.YES_NO
    if (first and first[0].casefold() == "when") or _ASKS_DATE.search(question):
        return Kind.DATE
    return Kind.NUMBER if _ASKS_NUMBER.search(question) else Kind.NAME


def _options(question: str) -> tuple[str, ...]:
    """Return the two sides of the last "or" if both look like names, else nothing."""
    *_, last = (None, *_OR.finditer(question))
    if last is None:
        return ()
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


def _distinct(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
