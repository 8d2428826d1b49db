"""Licences of the known data sets' questions and paragraphs (`data/README.md`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
    split: str | None = None  # of its questions; None if unknown


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


def source_of(name: str, splits: Mapping[str, str], given: Mapping[str, str] = MappingProxyType({})) -> Source:
    """Return what is known of a data set that was read by its name (`splits_of_names`), and of no file.

    `given` are the known data sets that some files are, by their names, as the publisher says.

    >>> source_of("hotpotqa", {"hotpotqa": "dev"}).licences, source_of("hotpotqa", {}).licences
    (('cc-by-sa-4.0',), ())
    >>> source_of("mine", {}, {"mine": "nq"}).note
    'questions of nq, according to the publisher'
    """
    if name not in splits and name not in given:
        return Source(name, note="a file")
    if name == "demo" and name not in given:
        return Source(name, ("apache-2.0",), "invented by reasonrag", "original", "en", splits.get(name))
    licences, note = _KNOWN[given.get(name, name)]
    said = f"questions of {given[name]}, according to the publisher" if name in given else ""
    return Source(name, licences, "; ".join(filter(None, [said, note])), HUB_REPOSITORY, "en", splits.get(name))


def known_sources(given: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Return what `--source NAME=KNOWN` says, by name.

    Raises:
        ConfigError: there is no such data set in the data, or it is said to be one that is not known.
    """
    said: dict[str, str] = {}
    for text in given:
        name, _, known = text.partition("=")
        said[name] = known
        if name not in names or known not in _KNOWN:
            raise ConfigError(
                f"--source {quoted(text)}: give NAME=KNOWN, of the sets in the data ({', '.join(names)}) "
                f"and of the known ones ({', '.join(_KNOWN)})"
            )
    return said


def licence_field(sources: Iterable[Source], given: str | None) -> str | list[str]:
    """Return the card's `license`: the given one, else all licences of the sources; unknown if a source has none.

    Several licences are listed together, as only the publisher can say which one applies.

    >>> read = {"musique": "train", "hotpotqa": "train"}
    >>> licence_field([source_of(name, read) for name in read], None)
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
