"""What may be done with a data set's questions and paragraphs, as far as it is known (`data/README.md`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import quoted
from reasonrag.storage.questions import HUB_REPOSITORY

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Source:
    """Where part of a data set comes from.

    Attributes:
        name: of the data set, or of the corpus that was searched.
        licences: as the Hub abbreviates them; none where they are unknown.
        note: which licence is of what.
        hub: the Hub repository that it was read from, `original` for what reasonrag invents; None where unknown.
        language: as ISO 639-1 has it; None where unknown.
    """

    name: str
    licences: tuple[str, ...] = ()
    note: str = ""
    hub: str | None = None
    language: str | None = None


# Paragraphs of Wikipedia before June 2023, when its licence went from version 3.0 to 4.0.
_PARAGRAPHS = "cc-by-sa-3.0"
_KNOWN: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "hotpotqa": (("cc-by-sa-4.0",), ""),
        "2wikimultihopqa": (("apache-2.0", _PARAGRAPHS), "paragraphs of Wikipedia: CC BY-SA"),
        "musique": (("cc-by-4.0", _PARAGRAPHS), "paragraphs of Wikipedia: CC BY-SA"),
        "popqa": (("mit",), ""),
        "bamboogle": (("mit",), ""),
        "nq": (("cc-by-sa-3.0",), ""),
        "triviaqa": (("apache-2.0",), ""),
    }
)


def source_of(name: str) -> Source:
    """What is known of a data set by its name; a file of one's own under a known name passes for that one.

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
    """The card's `license`: the one given, else all that the sources have; unknown where one of them has none.

    Which of several is to be obeyed is not ours to say.

    >>> licence_field([source_of("musique"), source_of("hotpotqa")], None)
    ['cc-by-4.0', 'cc-by-sa-3.0', 'cc-by-sa-4.0']
    """
    if given is not None:
        return given
    sources = list(sources)
    if not sources or any(not source.licences for source in sources):
        return UNKNOWN
    found = sorted({licence for source in sources for licence in source.licences})
    return found[0] if len(found) == 1 else found


def check_licence(given: str | None) -> str | None:
    """A licence's identifier on the Hub, in lower case.

    Raises:
        ConfigError: it cannot be one.
    """
    if given is None:
        return None
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{1,63}", given.lower()):
        raise ConfigError(
            f"--license {quoted(given)} is no identifier of a licence; take one of the Hub's, such as cc-by-sa-4.0, "
            "apache-2.0 or mit"
        )
    return given.lower()
