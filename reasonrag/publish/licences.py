"""Licences of the known data sets' questions and paragraphs (`data/README.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import quoted
from reasonrag.storage.questions import HUB_REPOSITORY

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a part of the data."""

    name: str  # of the data set, or of the corpus that was searched
    licences: tuple[str, ...] = ()  # the Hub's abbreviations; empty if unknown
    note: str = ""  # which licence covers what
    hub: str | None = None  # the Hub repository that it was read from, `original` if invented; None if unknown
    language: str | None = None  # ISO 639-1 code; None if unknown


# Wikipedia changed its licence from version 3.0 to 4.0 in June 2023; these paragraphs are older.
_PARAGRAPHS = "cc-by-sa-3.0"
_KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "hotpotqa": (("cc-by-sa-4.0",), ""),
    "2wikimultihopqa": (("apache-2.0", _PARAGRAPHS), "paragraphs of Wikipedia: CC BY-SA"),
    "musique": (("cc-by-4.0", _PARAGRAPHS), "paragraphs of Wikipedia: CC BY-SA"),
    "popqa": (("mit",), ""),
    "bamboogle": (("mit",), ""),
    "nq": (("cc-by-sa-3.0",), ""),
    "triviaqa": (("apache-2.0",), ""),
}


def source_of(name: str) -> Source:
    """Return what is known of a data set by its name. A local file with a known name is taken for that data set.

    >>> source_of("hotpotqa").licences, source_of("mine").licences
    (('cc-by-sa-4.0',), ())
    """
    if name == "demo":
        return Source(name, ("apache-2.0",), "invented by reasonrag", "original", "en")
    if name not in _KNOWN:
        return Source(name)
    licences, note = _KNOWN[name]
    return Source(name, licences, note, HUB_REPOSITORY, "en")


def licence_field(sources: Iterable[Source], given: str | None) -> str | list[str]:
    """Return the card's `license`: the given one, else all licences of the sources; unknown if a source has none.

    Several licences are listed together, as only the publisher can say which one applies.

    >>> licence_field([source_of("musique"), source_of("hotpotqa")], None)
    ['cc-by-4.0', 'cc-by-sa-3.0', 'cc-by-sa-4.0']
    """
    if given is not None:
        return given
    sources = list(sources)
    if not sources or any(not source.licences for source in sources):
        return UNKNOWN
    licences = sorted({licence for source in sources for licence in source.licences})
    return licences[0] if len(licences) == 1 else licences


def check_licence(given: str | None) -> str | None:
    """Return a licence's identifier on the Hub, in lower case.

    Raises:
        ConfigError: it is not an identifier.
    """
    if given is None:
        return None
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{1,63}", given.lower()):
        raise ConfigError(
            f"--license {quoted(given)} is not a licence's identifier; give one of the Hub's, such as cc-by-sa-4.0, "
            "apache-2.0 or mit"
        )
    return given.lower()
