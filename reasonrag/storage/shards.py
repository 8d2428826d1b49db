"""Shards of a run: parts of its questions that processes on any machines build, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import common_text
from reasonrag.core.types import Question


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `of` parts of a run, counted from 0. A run that is not cut is the shard 0/1.

    >>> Shard.parse("2/8")
    Shard(number=2, of=8)
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `--shard I/S` names; raise ConfigError if it is not of that form with 0 <= I < S."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise ConfigError(f"--shard {text!r} is not I/S; the 8 shards of a run are 0/8, 1/8, ..., 7/8")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def folder(self, run: Path) -> Path:
        """Return where this shard of a run is built."""
        return run if self.of == 1 else run / "shards" / f"{self.number}-of-{self.of}"


WHOLE = Shard(0, 1)


def cut(questions: Sequence[Question], of: int) -> list[list[Question]]:
    """Return the questions of each of `of` shards: one after another they are the same list for any `of`.

    Questions keep their order, but those of equal text (`common_text`) follow the first of them: only their pairs can
    be duplicates, which are then dropped within a shard.
    """
    alike: dict[str, list[Question]] = {}
    first: list[int] = []
    for position, question in enumerate(questions):
        family = alike.setdefault(common_text(question.question), [])
        if not family:
            first.append(position)
        family.append(question)
    shards: list[list[Question]] = [[] for _ in range(of)]
    for position, family in zip(first, alike.values(), strict=True):
        shards[position * of // len(questions)] += family
    return shards
