"""Parse tags: a turn's elements in order, with observations sealed so that nothing in them is parsed as a tag.

Nothing here raises, and everything takes linear time: texts come from models and passages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache

# Replaces an observation wherever a trajectory is parsed. No policy can write it: see `without_seals`.
SEALED = "\ue000"


def without_seals(text: str) -> str:
    """Return the text with every seal replaced by a visible character; removing them could join text into tags.

    >>> without_seals("<th\\ue000ink>")
    '<th�ink>'
    """
    return text.replace(SEALED, "\N{REPLACEMENT CHARACTER}")


def seal(text: str, names: Sequence[str], *, search: str, found: str) -> tuple[str, list[str]]:
    """Replace each observation by a seal, so that nothing in it is parsed as a tag; also return the observations.

    An observation is the text in `<found>` if the last tag of `names` before it closes a search or another observation,
    so a policy that only mentions the tag makes none. It ends at the first closing tag, or at the end of a text that
    was cut off. If another observation begins before that, it was never closed: it ends at the next tag, and stays
    unclosed, so the steps after it are not part of it. An observation that a policy writes right after its search
    cannot be distinguished from an engine's.

    >>> seal("<q>a</q> <i>b</q></i>", ["q", "i"], search="q", found="i")[1]
    ['b</q>']
    >>> seal("the <i>tag</i>", ["q", "i"], search="q", found="i")[1]
    []
    >>> seal("<q>a</q><i>b <q>c</q><i>d</i>", ["q", "i"], search="q", found="i")[1]
    ['b', 'd']
    """
    text = without_seals(text)
    opening, closing = f"<{found}>", f"</{found}>"
    marks = re.compile(rf"</?(?:{'|'.join(map(re.escape, names))})>")
    pieces: list[str] = []
    bodies: list[str] = []
    copied = position = 0  # the text up to `copied` is in `pieces`; the next mark is searched from `position`
    closed = -1  # where the next closing tag begins; searched once, or many open tags would take quadratic time
    after_search = False
    while mark := marks.search(text, position):
        position = mark.end()
        if not (after_search and mark[0] == opening):
            after_search = mark[0] == f"</{search}>"
            continue
        if closed < position:
            closed = text.find(closing, position)
            closed = len(text) if closed < 0 else closed
        end = _end_of_unclosed(marks, text, position, closed, search=f"</{search}>", opening=opening)
        pieces += text[copied:position], SEALED
        bodies.append(text[position : closed if end is None else end].strip())
        copied, position = (closed, closed + len(closing)) if end is None else (end, end)
        after_search = end is None
    return "".join([*pieces, text[copied:]]), bodies


def observed(text: str, names: Sequence[str], *, search: str, found: str) -> list[tuple[str, str]]:
    """Return the text before each observation with the observation, then the rest of the text with "".

    >>> observed("<q>a</q> <i>b</i> so", ["q", "i"], search="q", found="i")
    [('<q>a</q> ', 'b'), (' so', '')]
    """
    sealed, observations = seal(text, names, search=search, found=found)
    written = re.split(f"<{found}>{SEALED}(?:</{found}>)?", sealed)
    return list(zip(written, [*observations, ""], strict=True))


def _end_of_unclosed(
    marks: re.Pattern[str], text: str, start: int, end: int, *, search: str, opening: str
) -> int | None:
    """Return the end of an observation with the start of another one in its body; None without such a start."""
    first, before = None, ""
    for mark in marks.finditer(text, start, end):
        first = mark.start() if first is None else first
        if mark[0] == opening and before == search:
            return first
        before = mark[0]
    return None


def elements(text: str, names: Sequence[str]) -> tuple[list[tuple[str, str]], str, bool]:
    """Return every well-formed element `<name>body</name>` in order, the first broken tag, and whether text is stray.

    Elements are not nested. A broken tag is never closed, or closed without having been opened. Stray text is text
    between elements that is not white space.

    >>> elements("<think>a</think> <answer>b</answer>", ["think", "answer"])
    ([('think', 'a'), ('answer', 'b')], '', False)
    >>> elements("so <answer>b</answer></think>", ["think", "answer"])
    ([('answer', 'b')], 'unopened_think', True)
    """
    found: list[tuple[str, str]] = []
    broken, stray = "", False
    end = 0
    opened: re.Match[str] | None = None
    for mark in _marks(text, names):
        closes = bool(mark[1])
        if opened is None:
            stray = stray or bool(text[end : mark.start()].strip())
        if closes and opened is not None and opened[2] == mark[2]:
            found.append((mark[2], text[opened.end() : mark.start()].strip()))
        elif closes:
            broken = broken or f"unopened_{mark[2]}"
        elif opened is not None:
            broken = broken or f"unclosed_{opened[2]}"
        opened, end = None if closes else mark, mark.end()
    if opened is not None:
        broken = broken or f"unclosed_{opened[2]}"
    return found, broken, stray or (opened is None and bool(text[end:].strip()))


def _marks(text: str, names: Sequence[str]) -> Iterator[re.Match[str]]:
    """Find every opening and closing tag; group 1 is the slash, group 2 the name."""
    return _pattern(tuple(names)).finditer(text)


@cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, names))})>")


def last_tag(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return name and stripped body of the last well-formed tag `<name>body</name>` among `names`, or None.

    The body may span lines and holds no other tag of `names`, so an unclosed tag before it does no harm. Linear time.

    >>> last_tag("<query>U.S. Navy, 3.5 million</query>", ["query", "answer"])
    ('query', 'U.S. Navy, 3.5 million')
    >>> last_tag("<answer>open <query>x</query>", ["query", "answer"])
    ('query', 'x')
    """
    marks = list(_marks(text, names))
    for opening, closing in zip(reversed(marks[:-1]), reversed(marks[1:]), strict=True):
        if not opening[1] and closing[1] and opening[2] == closing[2]:
            return opening[2], text[opening.end() : closing.start()].strip()
    return None


def tags(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and stripped body of every well-formed tag among `names`, in order; none within another.

    >>> tags("<query>a</query> then <answer> b </answer>", ["query", "answer"])
    [('query', 'a'), ('answer', 'b')]
    """
    return [(name, body) for _, name, body in tags_with_text(text, names)]


def tags_with_text(text: str, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the same as `tags`, each with the stripped text before it.

    >>> tags_with_text("so <query>a</query> then <answer> b </answer>", ["query", "answer"])
    [('so', 'query', 'a'), ('then', 'answer', 'b')]
    """
    found: list[tuple[str, str, str]] = []
    end = 0
    for opening, closing in itertools.pairwise(_marks(text, names)):
        if not opening[1] and closing[1] and opening[2] == closing[2]:
            body = text[opening.end() : closing.start()].strip()
            found.append((text[end : opening.start()].strip(), opening[2], body))
            end = closing.end()
    return found
