"""Reading without a model: sentences, names, dates and numbers of a text, and what a question asks for.

Everything is linear in the text, keeps the text's order (nothing iterates over a set) and is cached by text, as a tree
search reads the same passages and thoughts again and again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


def word_set(words: str) -> frozenset[str]:
    """The words of a blank-separated list, for membership only."""
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
_STOP = word_set(
    "a about above after again against all also although am an and any are as at be because been before being below "
    "between both but by can could did do does doing down during each either few following for former from further "
    "had has have having he her here hers him his how however i if in into is it its itself just later like made many "
    "may me more most much my near no nor not now of off on once one only or other our out over own part same several "
    "she should since so some such than that the their them then there these they this those through to too two under "
    "until up upon us very was we well were what when where which while who whom whose why will with would yes you "
    "your name named called known s t"
)
_FORMS = {
    "died": "die", "dies": "die", "death": "die", "born": "birth", "wife": "spouse", "husband": "spouse",
    "married": "spouse", "wrote": "writ", "written": "writ", "writer": "writ", "son": "child", "daughter": "child",
    "children": "child", "movie": "film", "nationality": "country", "located": "locat", "location": "locat",
    "university": "college", "starring": "star", "sang": "sing", "singer": "sing", "founder": "found",
}  # fmt: skip
_SUFFIX = re.compile(r"(?:ings?|ers?|ors?|ed|es|s)$")


def stem(word: str) -> str:
    """A crude stem: enough to see that a director is someone who directed.

    >>> stem("Directors"), stem("directed"), stem("wife's")
    ('direct', 'direct', 'spouse')
    """
    lower = word.casefold().removesuffix("'s").removesuffix("’s")
    if lower in _FORMS:
        return _FORMS[lower]
    return _SUFFIX.sub("", lower) if len(lower) > 4 else lower


@lru_cache(maxsize=32_768)
def stems(text: str) -> tuple[str, ...]:
    """Stems of the content words, in order, with repeats."""
    return tuple(stem(word) for word in content_words(text))


@lru_cache(maxsize=32_768)
def stem_set(text: str) -> frozenset[str]:
    """For membership only: its order depends on the interpreter's hash seed."""
    return frozenset(stems(text))


def content_words(text: str) -> list[str]:
    """Words as written, without stop words."""
    return [word for word in _WORD.findall(text) if word.casefold() not in _STOP]


@lru_cache(maxsize=8_192)
def sentences(text: str) -> tuple[str, ...]:
    """Sentences in order. A dot after an initial or a usual abbreviation ends none.

    >>> sentences("Dr. No met J. Bond. He won 3.5 points!")
    ('Dr. No met J. Bond.', 'He won 3.5 points!')
    """
    found, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        before = text[max(start, end.start() - 12) : end.start()].rpartition(" ")[2].lstrip("(\"“'")
        if not (text[end.start()] == "." and _abbreviated(before)) and not text[end.end()].islower():
            found.append(text[start : end.end()].rstrip())
            start = end.end()
    return (*found, text[start:].strip()) if text[start:].strip() else tuple(found)


def _abbreviated(word: str) -> bool:
    return (len(word) == 1 and word.isupper()) or word.casefold() in _ABBREVIATIONS


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text and where it starts, in characters."""

    text: str
    start: int


@lru_cache(maxsize=32_768)
def names(text: str) -> tuple[Span, ...]:
    """Capitalised spans and quoted titles, in order; months, weekdays and lone stop words are no names.

    >>> [name.text for name in names('The song "Red hat" is by J. R. Lund of the Faroe Islands, not by him.')]
    ['Red hat', 'J. R. Lund of the Faroe Islands']
    """
    quoted = [Span(match[1].strip(" ,."), match.start(1)) for match in _QUOTED.finditer(text)]
    plain = _QUOTED.sub(lambda match: " " * len(match[0]), text)
    found = [span for span in (*quoted, *_capitalised(plain)) if span.text]
    return tuple(sorted(found, key=lambda span: span.start))


def _capitalised(text: str) -> Iterable[Span]:
    words: list[re.Match[str]] = []  # the open span; it may end in connectors, which are cut off when it closes
    for word in _WORD.finditer(text):
        if words:
            gap = text[words[-1].end() : word.start()]
            if gap not in (" ", ". ") or (gap == ". " and not _abbreviated(words[-1][0])) or len(words) == 10:
                yield from _closed(text, words)
                words = []
        if word[0][0].isupper() or (words and (word[0] in _CONNECTORS or (word[0].isdigit() and len(word[0]) < 3))):
            words.append(word)
        elif words:
            yield from _closed(text, words)
            words = []
    if words:
        yield from _closed(text, words)


def _closed(text: str, words: list[re.Match[str]]) -> Iterable[Span]:
    while words and words[-1][0] in _CONNECTORS:
        words = words[:-1]
    while words and words[0][0].casefold() in _STOP:
        words = words[1:]
    first = words[0][0].casefold() if words else ""
    if first and not first.isdigit() and first not in _CALENDAR and not (len(words) == 1 and _abbreviated(first)):
        end = words[-1].end()
        yield Span(text[words[0].start() : end].removesuffix("'s").removesuffix("’s"), words[0].start())


@lru_cache(maxsize=8_192)
def dates(text: str) -> tuple[Span, ...]:
    """Full dates, months with a year, and bare years of four digits, in order."""
    return tuple(Span(match[0], match.start()) for match in _DATE.finditer(text))


@lru_cache(maxsize=8_192)
def numbers(text: str) -> tuple[Span, ...]:
    """Numbers in digits (with %, million, ...) or as a word, years left out where anything else is there."""
    found = [Span(match[0].rstrip(","), match.start()) for match in _NUMBER.finditer(text)]
    return tuple([span for span in found if not _YEAR.fullmatch(span.text)] or found)


@lru_cache(maxsize=8_192)
def descriptions(text: str) -> tuple[Span, ...]:
    """What something is said to be, up to four words.

    >>> [span.text for span in descriptions("Kiba is a genus of moss, not a fern.")]
    ['genus of moss']
    """
    return tuple(Span(match[1], match.start(1)) for match in _IS_A.finditer(text))


@lru_cache(maxsize=8_192)
def word_starts(text: str) -> tuple[tuple[str, int], ...]:
    """Stem and first character of each word, stop words included."""
    return tuple((stem(word[0]), word.start()) for word in _WORD.finditer(text))


def year(text: str) -> int | None:
    """The first year of four digits."""
    found = _YEAR.search(text)
    return int(found[0]) if found else None


class Kind(StrEnum):
    """What an answer looks like."""

    YES_NO = "yes_no"
    CHOICE = "choice"
    DATE = "date"
    NUMBER = "number"
    NAME = "name"
    BRIDGE = "bridge"  # a name on the way to the answer: no question has this kind


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question asks for."""

    text: str
    kind: Kind
    options: tuple[str, ...]  # of a choice: two
    entities: tuple[str, ...]  # names in the question; the options where there are any
    relation: tuple[str, ...]  # content words outside the entities, as written

    @property
    def relation_stems(self) -> frozenset[str]:
        """For membership only."""
        return stem_set(" ".join(self.relation))


_AUXILIARY = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should)\b", re.IGNORECASE)
_ASKING = re.compile(r"\b(who|whom|whose|what|which|when|where|why|how)\b", re.IGNORECASE)
_ASKS_DATE = re.compile(r"\b(?:(?:what|which) (?:year|date|month|decade|day)|date of (?:birth|death))\b", re.IGNORECASE)
_ASKS_NUMBER = re.compile(
    r"\bhow (?:many|much|old|long|far|tall|high|large|big)\b|\b(?:population|percentage|number) of\b", re.IGNORECASE
)
_BRACKETS = re.compile(r"\([^()]{0,80}\)")
_OR = re.compile(r",? or ")


@lru_cache(maxsize=4_096)
def analyse(question: str) -> Asked:
    """What `question` asks for, from its wording alone.

    >>> analyse("Who is older, Ada Holm or Bo Lind?").options
    ('Ada Holm', 'Bo Lind')
    """
    first = _ASKING.search(question)
    if options := _options(question):
        kind = Kind.CHOICE
    elif _AUXILIARY.match(question):
        kind = Kind.YES_NO
    elif (first and first[0].casefold() == "when") or _ASKS_DATE.search(question):
        kind = Kind.DATE
    elif _ASKS_NUMBER.search(question):
        kind = Kind.NUMBER
    else:
        kind = Kind.NAME
    # "(1996 Film)" tells titles apart, it names nothing.
    plain = _BRACKETS.sub(lambda group: group[0].casefold(), question)
    entities = options or _distinct(span.text for span in names(plain))
    taken = stem_set(" ".join(entities))
    relation = tuple(word for word in _distinct(content_words(question)) if stem(word) not in taken)
    return Asked(question, kind, options, entities, relation)


def _options(question: str) -> tuple[str, ...]:
    """The two sides of the last "or", where both read like names."""
    *_, last = (None, *_OR.finditer(question))
    if last is None:
        return ()
    left, right = question[: last.start()], question[last.end() :].strip(" ?.!")
    spans = names(left)
    comma = left.rfind(", ")
    left = left[comma + 2 :] if comma >= 0 and len(left) - comma < 80 else spans[-1].text if spans else ""
    right = right.partition(", ")[0]
    both = tuple(side.strip(" \"“”'?,") for side in (left, right))
    return both if all(side and any(char.isupper() or char.isdigit() for char in side) for side in both) else ()


def _distinct(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


def mentions(text: str, name: str) -> bool:
    """Whether every content word of `name` is in `text`; a name without one is nowhere."""
    wanted = stem_set(name)
    return bool(wanted) and wanted <= stem_set(text)


def about(name: str, pieces: Sequence[str]) -> list[str]:
    """Pieces that mention `name`, then those that mention a name which the first ones bring up (a bridge)."""
    direct = [piece for piece in pieces if mentions(piece, name)]
    bridges = _distinct(span.text for piece in direct for span in names(piece) if not mentions(name, span.text))
    return direct + [p for p in pieces if p not in direct and any(mentions(p, bridge) for bridge in bridges)]
