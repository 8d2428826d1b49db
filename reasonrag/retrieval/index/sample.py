"""Queries that any index can be tried with: some words in a row out of its own passages."""

from __future__ import annotations

import random

from reasonrag.retrieval.index.passages import PassageStore

_WORDS = 8


def self_queries(store: PassageStore, count: int, *, seed: int = 0) -> list[tuple[int, str]]:
    """Row and piece of `count` passages, or of all where there are fewer; the same for the same seed.

    A piece has at most 8 words, from anywhere in the passage.
    """
    chosen = random.Random(seed)
    rows = chosen.sample(range(len(store)), min(count, len(store)))
    return [(row, _piece(store.passage(row).contents, chosen)) for row in rows]


def _piece(text: str, chosen: random.Random) -> str:
    words = text.split()
    start = chosen.randrange(max(len(words) - _WORDS, 0) + 1)
    return " ".join(words[start : start + _WORDS])
