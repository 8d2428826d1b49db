"""Shards of a run: parts of its questions that processes on any machines build, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError
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
        """Return the shard that `--shard I/S` names.

        Raises:
            ConfigError: the text is not I/S with 0 <= I < S.
        """
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
            raise ConfigError(f"--shard {text!r} is not I/S; the 8 shards of a run are 0/8, 1/8, ..., 7/8")
        return cls(int(number), int(of))

    def folder(self, run: Path) -> Path:
        """Return where this shard of a run is built."""
        return run if self.of == 1 else run / "shards" / f"{self.number}-of-{self.of}"

    def cut(self, questions: Sequence[Question]) -> list[Question]:
        """Return this shard's part of all questions: the shards one after another are the same list for any `of`.

        They keep their order, but questions of equal text follow the first of them: only their pairs can be duplicates,
        which are then dropped within a shard.
        """
        first: dict[str, int] = {}
        for position, question in enumerate(questions):
            first.setdefault(_bare(question), position)
        mine = [q for q in questions if first[_bare(q)] * self.of // len(questions) == self.number]
        return sorted(mine, key=lambda question: first[_bare(question)])


WHOLE = Shard(0, 1)


def _bare(question: Question) -> str:
    return " ".join(question.question.casefold().split())
