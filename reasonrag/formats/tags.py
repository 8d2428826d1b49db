"""Reading the tags of a turn: its elements in order, and what a search found sealed off, so that it is never structure.

Everything here is total and takes linear time: texts come from models and passages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

# Stands for what a search found, wherever a trajectory is read. No policy can write it: see `without_seals`.
SEALED = "\ue000"


def without_seals(text: str) -> str:
    """The text with every seal in it made visible; taking seals out instead would join what they part into tags.

    >>> without_seals("<th\\ue000ink>")
    '<th�ink>'
    """
    return text.replace(SEALED, "\N{REPLACEMENT CHARACTER}")


def seal(text: str, names: Sequence[str], *, search: str, found: str) -> tuple[str, list[str]]:
    """A text of unknown origin with its observations sealed, and their stripped bodies in order.

    An observation is what stands in `<found>` where the last tag of `names` before it closes a search, or another
    observation: a policy that only mentions the tag makes none. It ends at the first closing tag, or where the text
    was cut off. A policy that writes one of its own right after its search cannot be told from an engine here.

    >>> seal("<q>a</q> <i>b</q></i>", ["q", "i"], search="q", found="i")[1]
    ['b</q>']
    >>> seal("the <i>tag</i>", ["q", "i"], search="q", found="i")[1]
    []
    """
    text = without_seals(text)
    opening, closing = f"<{found}>", f"</{found}>"
    marks = re.compile(rf"</?(?:{'|'.join(map(re.escape, names))})>")
    pieces: list[str] = []
    bodies: list[str] = []
    kept = place = 0  # the text up to `kept` is in `pieces`; marks are looked for from `place`
    due = False
    while mark := marks.search(text, place):
        place = mark.end()
        if not (due and mark[0] == opening):
            due = mark[0] == f"</{search}>"
            continue
        end = text.find(closing, place)
        pieces += text[kept:place], SEALED
        bodies.append(text[place : end if end >= 0 else len(text)].strip())
        kept = end if end >= 0 else len(text)
        place = kept + len(closing)
    return "".join([*pieces, text[kept:]]), bodies


def elements(text: str, names: Sequence[str]) -> tuple[list[tuple[str, str]], str, bool]:
    """Every well-formed element `<name>body</name>` in order, which tag is broken first, and whether text is stray.

    No element is in another: `broken` names the first tag that is never closed, or closed without having been opened.
    Stray is what stands between elements and is not blank.

    >>> elements("<think>a</think> <answer>b</answer>", ["think", "answer"])
    ([('think', 'a'), ('answer', 'b')], '', False)
    >>> elements("so <answer>b</answer></think>", ["think", "answer"])
    ([('answer', 'b')], 'unopened_think', True)
    """
    found: list[tuple[str, str]] = []
    broken, stray = "", False
    end = 0
    opened: re.Match[str] | None = None
    for mark in re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text):
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


def last_tag(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Name and stripped body of the last well-formed tag `<name>body</name>` among `names`, or None.

    The body may span lines and holds no other tag of `names`, so an unclosed tag before it does no harm. Linear time.

    >>> last_tag("<query>U.S. Navy, 3.5 million</query>", ["query", "answer"])
    ('query', 'U.S. Navy, 3.5 million')
    >>> last_tag("<answer>open <query>x</query>", ["query", "answer"])
    ('query', 'x')
    """
    marks = list(re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text))
    for opening, closing in zip(reversed(marks[:-1]), reversed(marks[1:]), strict=True):
        if not opening[1] and closing[1] and opening[2] == closing[2]:
            return opening[2], text[opening.end() : closing.start()].strip()
    return None


def tags(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Name and stripped body of every well-formed tag among `names`, in order; none within another. Linear time.

    >>> tags("<query>a</query> then <answer> b </answer>", ["query", "answer"])
    [('query', 'a'), ('answer', 'b')]
    """
    return [(name, body) for _, name, body in tags_with_text(text, names)]


def tags_with_text(text: str, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """As `tags`, each with the stripped text between the one before it and itself. Linear time.

    >>> tags_with_text("so <query>a</query> then <answer> b </answer>", ["query", "answer"])
    [('so', 'query', 'a'), ('then', 'answer', 'b')]
    """
    found: list[tuple[str, str, str]] = []
    end = 0
    for opening, closing in itertools.pairwise(re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text)):
        if not opening[1] and closing[1] and opening[2] == closing[2]:
            body = text[opening.end() : closing.start()].strip()
            found.append((text[end : opening.start()].strip(), opening[2], body))
            end = closing.end()
    return found


def before_tag(text: str, name: str) -> str:
    """What stands before the first `<name>`, stripped; all of the text where there is none.

    >>> before_tag("first this <query>a</query>", "query")
    'first this'
    """
    return text.partition(f"<{name}>")[0].strip()
