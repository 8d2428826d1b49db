"""What is true in a demo world, and what a text claims of it."""

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
_CLAUSE = re.compile(r"\b\d+[.)]|[;.,:!?\n]")  # the number of a plan's item belongs to no clause


@dataclass(frozen=True, slots=True)
class Claim:
    """A fact that a text states: `query` and `value` as the text has them, normalised, and whether it is so."""

    query: str
    value: str
    true: bool


@dataclass(frozen=True)
class Knowledge:
    """All facts of one world, of every split and the famous part.

    Args:
        facts: query ("NAME KEY") to value, both normalised.
        names: of all entities, normalised.
        questions: of all splits, by their text and golden answers.
    """

    facts: dict[str, str]
    names: frozenset[str]
    questions: dict[tuple[str, tuple[str, ...]], Question]

    def claims(self, text: str) -> Iterator[Claim]:
        """Each fact that the text states, at most one in a clause: "NAME KEY" and the words behind it.

        A clause that ends there asks and states nothing.
        """
        for clause in _CLAUSE.split(text):
            words = normalize_answer(clause).split()
            for at in range(len(words) - 3):
                query, said = " ".join(words[at : at + 3]), " ".join(words[at + 3 :])
                if query in self.facts:
                    yield Claim(query, said, said == self.facts[query])
                    break

    def compares(self, text: str) -> bool | None:
        """Whether a comparison is right ("A is larger than B", "A and B have the same KEY"); None where it is none."""
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
        """Whether a text says nothing, yes or no, or has a word of this world in it: what can be judged here.

        A thing that is made up of such words, as a policy does when it guesses, is known not to be there.
        """
        said = normalize_answer(text)
        return said in ("", "none", "yes", "no") or not _WORDS.isdisjoint(said.split())


# Parts of names, and values; what relations are called, such as "capital", is said of the real world as well.
_WORDS = frozenset(normalize_answer(word) for word in words()) - {relation.key for relation in RELATIONS}


@lru_cache(maxsize=4)
def knowledge_of(world_seed: int) -> Knowledge:
    """What is true in the world of that seed."""
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
