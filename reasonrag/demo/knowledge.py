"""The facts of a demo world, and the claims that a text makes about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from reasonrag.core.text import normalize_answer
from reasonrag.core.types import Question
from reasonrag.demo.lexicon import RELATIONS, SPLITS, words
from reasonrag.demo.world import make_world

_CLASSES = {relation.key: relation.target for relation in RELATIONS if isinstance(relation.target, tuple)}
_MORE = {relation.more: relation.key for relation in RELATIONS if relation.more}
_COMPARES = re.compile(rf"(\w+ \w+) (?:is )?({'|'.join(_MORE)}) than (\w+ \w+)")
_SAME = re.compile(r"(\w+ \w+) and (\w+ \w+) (do not have|have)(?: same| (different)) (\w+)")
_CLAUSE = re.compile(r"\b\d+[.)]|[;.,:!?\n]")  # the number of a plan's item is not part of a clause


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact as a text states it: `query` and `value`, normalised, and whether the claim is true."""

    query: str
    value: str
    true: bool


@dataclass(frozen=True)
class Knowledge:
    """All facts of one world: every split and the famous part."""

    facts: dict[str, str]  # query ("NAME KEY") to value, both normalised
    names: frozenset[str]  # of all entities, normalised
    questions: dict[tuple[str, tuple[str, ...]], Question]  # of all splits, by text and golden answers

    def claims(self, text: str) -> Iterator[Claim]:
        """Yield each fact that the text states, at most one per clause: "NAME KEY" and the words that follow."""
        for clause in _CLAUSE.split(text):
            words = normalize_answer(clause).split()
            for at in range(len(words) - 3):
                query, said = " ".join(words[at : at + 3]), " ".join(words[at + 3 :])
                if query in self.facts:
                    yield Claim(query, said, said == self.facts[query])
                    break

    def compares(self, text: str) -> bool | None:
        """Return whether "A is larger than B" or "A and B have the same KEY" is true; None for any other text."""
        said = normalize_answer(text)
        if found := _COMPARES.fullmatch(said):
            key = _MORE[found[2]]
            first, second = (self.facts.get(f"{name} {key}") for name in (found[1], found[3]))
            classes = _CLASSES[key]
            return None if first is None or second is None else classes.index(first) > classes.index(second)
        if found := _SAME.fullmatch(said):
            first, second = (self.facts.get(f"{name} {found[5]}") for name in (found[1], found[2]))
            apart = (found[4] is not None) != (found[3] != "have")
            return None if first is None or second is None else (first != second) is apart
        return None

    def speaks_of(self, text: str) -> bool:
        """Return whether a text can be judged: it is empty, "none", yes or no, or has a word of this world.

        A policy that guesses combines such words into entities, which are then known not to exist.
        """
        said = normalize_answer(text)
        return said in ("", "none", "yes", "no") or not _WORDS.isdisjoint(said.split())


# Parts of names, and values; names of relations, such as "capital", are words of the real world as well.
_WORDS = frozenset(normalize_answer(word) for word in words()) - {relation.key for relation in RELATIONS}


@lru_cache(maxsize=4)
def knowledge_of(world_seed: int) -> Knowledge:
    """Return the facts of the world with that seed."""
    world = make_world(world_seed)
    parts = (*world.parts.values(), world.famous)
    facts = {
        normalize_answer(f"{name} {key}"): normalize_answer(value)
        for part in parts
        for name, known in part.facts.items()
        for key, value in known.items()
    }
    names = frozenset(normalize_answer(name) for part in parts for name in part.facts)
    questions = {(q.question, q.golden_answers): q for split in SPLITS for q in world.questions(split)}
    return Knowledge(facts, names, questions)
