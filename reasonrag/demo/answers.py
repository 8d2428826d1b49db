"""Candidate answers by the kind of question, scored on the evidence found so far. No model, no knowledge."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reasonrag.demo.heuristics import (
    Asked,
    Kind,
    Span,
    about,
    dates,
    descriptions,
    mentions,
    names,
    numbers,
    sentences,
    stem_set,
    stems,
    word_set,
    word_starts,
    year,
)

Scored = tuple[str, float]

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
_DEMONYM = re.compile(r"[^\W\d_]+(?:an|ish|ese|nch|tch|ss|eek|eli|aqi|ani)\Z")


def candidates(asked: Asked, evidence: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Answers with a score each, never empty, in the order of the evidence; a guess where the evidence gives none.

    Args:
        asked: the question.
        evidence: what the thoughts noted, oldest first.
        queries: asked so far; a name that was searched for is rarely what the question wants.
    """
    pieces = list(dict.fromkeys(piece for note in evidence for piece in sentences(note)))
    if asked.kind is Kind.YES_NO:
        return _yes_no(asked, pieces)
    if asked.kind is Kind.CHOICE:
        return _choice(asked, pieces)
    return spans(asked, pieces, queries) or [("unknown", 0.0)]


def _yes_no(asked: Asked, pieces: Sequence[str]) -> list[Scored]:
    """Yes where what is said about both sides agrees."""
    sides = [" ".join(about(entity, pieces)) for entity in asked.entities[:2]]
    if len(sides) < 2 or not all(sides):
        known = len(asked.relation_stems & stem_set(" ".join(pieces)))
        return [("yes", 0.3 * known), ("no", 0.5)]
    if _SAME.search(asked.text):
        first, second = ([n.text for n in names(side) if not mentions(asked.text, n.text)] for side in sides)
        demonyms = [[name for name in side if is_demonym(name)] for side in (first, second)]
        agree = demonyms[0][0] in demonyms[1] if all(demonyms) else any(name in second for name in first)
    else:
        agree = any(all(word in stem_set(side) for side in sides) for word in asked.relation_stems)
    return [("yes", 1.5 * agree), ("no", 1.5 * (not agree))]


def _choice(asked: Asked, pieces: Sequence[str]) -> list[Scored]:
    """The option whose year or number is the wanted extreme, else the one that shares more of the question's words."""
    words = frozenset(_WORD.findall(asked.text.casefold()))
    count = bool(words & (_MOST | _FEWEST)) and not words & (_EARLIEST | _LATEST)
    sign = bool(words & (_LATEST | _MOST)) - bool(words & (_EARLIEST | _FEWEST))
    values = [_value(asked, option, pieces, count=count) for option in asked.options]
    known = [value for value in values if value is not None]
    if sign and len(set(known)) == len(asked.options):
        best = max(known, key=lambda value: sign * value)
        return [(option, 2.5 * (value == best)) for option, value in zip(asked.options, values, strict=True)]
    said = [stem_set(" ".join(about(option, pieces))) for option in asked.options]
    return [(option, float(len(asked.relation_stems & s))) for option, s in zip(asked.options, said, strict=True)]


def _value(asked: Asked, option: str, pieces: Sequence[str], *, count: bool) -> float | None:
    """A number or a year of `option`; of who made it, where the question asks for the maker."""
    found = about(option, pieces)
    if asked.relation_stems & _MAKERS:
        found = sorted(found, key=lambda piece: mentions(piece, option))
    for piece in found:
        if count:
            values = [float(digits) for n in numbers(piece) if (digits := n.text.replace(",", "")).isdecimal()]
        else:
            values = [float(y) for date in dates(piece) if (y := year(date.text)) is not None]
        if values:
            return values[1] if "die" in asked.relation_stems and len(values) > 1 else values[0]
    return None


def spans(asked: Asked, pieces: Sequence[str], queries: Sequence[str]) -> list[Scored]:
    """Dates, numbers or names of the pieces that the question does not hold already, best evidence of each counted."""
    scores: dict[str, float] = {}
    wanted = stem_set(asked.text)
    latest = stem_set(queries[-1]) if queries else wanted
    for number, piece in enumerate(pieces):
        shared = _share(wanted, piece) + _share(latest, piece)
        anchors = [start for stem, start in word_starts(piece) if stem in asked.relation_stems]
        for rank, span in enumerate(_found(asked, piece)):
            near = 1.5 / (1 + min((abs(span.start - anchor) for anchor in anchors), default=200) / 20)
            score = shared + near + 0.5 * number / len(pieces) - 0.05 * rank + _fit(asked, piece, span, rank)
            if any(stem_set(span.text) <= stem_set(query) for query in queries):
                score -= 0.5
            scores[span.text] = max(score, scores[span.text] + 0.3) if span.text in scores else score
    return list(scores.items())


def bridges_wanted(asked: Asked) -> int:
    """How many names the question describes in place of naming them ("the director of ..."), as far as words tell."""
    links = asked.relation_stems & (_MAKERS | _KIN)
    if not links or not asked.relation_stems - links - _PLAIN:
        return 0
    return 2 if asked.kind in (Kind.YES_NO, Kind.CHOICE) else 1


def _share(wanted: frozenset[str], piece: str) -> float:
    return len(wanted & stem_set(piece)) / max(len(wanted), 1)


def _found(asked: Asked, piece: str) -> list[Span]:
    if asked.kind is Kind.DATE:
        return [Span(str(year(d.text)), d.start) if _YEAR_ONLY.search(asked.text) else d for d in dates(piece)]
    if asked.kind is Kind.NUMBER:
        return list(numbers(piece))
    new = [name for name in names(piece) if stems(name.text) and not mentions(asked.text, name.text)]
    return new if _WHO.match(asked.text) or _WHERE.match(asked.text) else new + list(descriptions(piece))


def is_demonym(name: str) -> bool:
    """Whether a single word looks like one for a people: American, Irish, Dutch."""
    return bool(_DEMONYM.match(name))


def _fit(asked: Asked, piece: str, span: Span, rank: int) -> float:
    """How well a span suits the wording of the question."""
    if asked.kind is Kind.DATE:
        return 1.0 * (rank == ("die" in asked.relation_stems))
    if asked.kind is Kind.NUMBER:
        return 0.0
    before = piece[max(span.start - 12, 0) : span.start]
    if asked.kind is Kind.BRIDGE:
        return 0.6 * bool(_AFTER_PERSON.search(before))
    if _COUNTRY.search(asked.text):
        return 1.0 * is_demonym(span.text) + 0.3 * bool(_AFTER_PLACE.search(before))
    if _WHERE.search(asked.text):
        return 0.8 * bool(_AFTER_PLACE.search(before))
    if _WHO.search(asked.text):
        return 0.5 * (" " in span.text) + 0.4 * bool(_AFTER_PERSON.search(before))
    return 0.3 * span.text[0].isupper()
