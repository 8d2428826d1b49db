"""An invented encyclopedia from a seed: one infobox-like page per entity, and questions that the pages answer.

A world has four closed parts: train, dev, test and famous. Facts link entities of the same part only, so a test
question never involves an entity of training. The famous part is the same in every world: a policy trained on many
worlds can answer its questions from memory, and then a search is needless. Each split asks about famous entities of
its own; an answer, though, may be a famous entity that another split asks about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Passage, Question
from reasonrag.demo.lexicon import KINDS, RELATIONS, SPLITS, Kind, Relation, Split, famous_names, names, relations_of

DemoSplit = Literal["train", "dev", "test", "train-famous"]

_ENTITIES: dict[Kind, int] = {"person": 48, "film": 30, "city": 24, "band": 20, "company": 20, "country": 8}
_QUESTIONS: dict[Split, int] = {"train": 600, "dev": 300, "test": 1200}
# One round of question kinds, repeated, so that any prefix of a question list has nearly this mix.
_ROUND = (*["one_hop"] * 3, *["known"] * 2, *["bridge"] * 7, *["three_hop"] * 4, *["comparison"] * 2, *["yes_no"] * 2)
# Which of the shuffled famous entities a split asks about: enough facts for two questions in twenty.
_FAMOUS_SHARE: dict[Split, tuple[float, float]] = {"train": (0.0, 0.28), "dev": (0.28, 0.43), "test": (0.43, 1.0)}


@dataclass(frozen=True, slots=True)
class Hop:
    """One search that a question needs, and the value that the page states."""

    query: str
    value: str

    @property
    def evidence(self) -> str:
        """The note that a policy should take: the query and the value."""
        return f"{self.query} {self.value}"


@dataclass(frozen=True)
class Part:
    """A closed set of entities: `facts[name][key]` is a value, `kinds[name]` a type."""

    kinds: dict[str, Kind]
    facts: dict[str, dict[str, str]]

    @classmethod
    def draw(cls, names_of: Callable[[Kind], tuple[str, ...]], rng: Random, *, sizes: dict[Kind, int]) -> Part:
        """Draw `sizes` entities of each type (or all if fewer names exist), with random facts among them."""
        chosen = {kind: rng.sample(pool, min(sizes[kind], len(pool))) for kind in KINDS for pool in [names_of(kind)]}
        kinds = {name: kind for kind in KINDS for name in chosen[kind]}
        facts: dict[str, dict[str, str]] = {}
        for name, kind in kinds.items():
            facts[name] = {
                relation.key: rng.choice([value for value in _values(relation, chosen) if value != name])
                for relation in relations_of(kind)
            }
        return cls(kinds, facts)

    def named(self, kind: Kind) -> list[str]:
        """Return the entities of a type, in the order drawn."""
        return [name for name, its in self.kinds.items() if its == kind]

    def hop(self, name: str, key: str) -> Hop:
        """Return the search for one attribute of an entity."""
        return Hop(f"{name} {key}", self.facts[name][key])

    def page(self, name: str, passage_id: str = "") -> Passage:
        """Return the entity's page in FlashRAG's form: the title, a newline, the text."""
        # Every fact repeats the name: otherwise BM25 often ranks a page that mentions the entity above its own page.
        text = "; ".join(self.hop(name, key).evidence for key in self.facts[name])
        return Passage(passage_id or name, f"{name}\n{text}")


@dataclass(frozen=True)
class World:
    """The parts of one world, its questions and its corpus."""

    seed: int
    parts: dict[Split, Part]
    famous: Part

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, in a fixed order: about its own entities, and some about famous ones.

        No entity is named by questions of two splits.
        """
        rng = Random(f"demo questions {self.seed} {split}")
        names = list(self.famous.facts)
        Random("demo famous entities").shuffle(names)
        low, high = (round(share * len(names)) for share in _FAMOUS_SHARE[split])
        facts = [fact for fact in famous_facts() if fact[0] in names[low:high]]
        Random("demo famous questions").shuffle(facts)
        known = (one_hop(self.famous, name, relation, known=True) for name, relation in facts)
        drawn: dict[str, Question] = {}
        while len(drawn) < _QUESTIONS[split]:
            kind = _ROUND[len(drawn) % len(_ROUND)]
            question = next(known) if kind == "known" else ask(self.parts[split], kind, rng)
            if question.question not in drawn:
                drawn[question.question] = Question(
                    f"{self._stem}-{split}-{len(drawn):06d}",
                    question.question,
                    question.golden_answers,
                    "demo",
                    {**question.metadata, "split": split},
                )
        return list(drawn.values())

    def named(self, questions: Iterable[Question]) -> set[str]:
        """Return the entities that the texts of some questions name."""
        entities = [name for part in (*self.parts.values(), self.famous) for name in part.facts]
        return {name for question in questions for name in entities if name in question.question}

    def corpus(self) -> list[Passage]:
        """Return the pages of all parts, shuffled: one corpus for all splits."""
        pages = [(part, name) for part in (*self.parts.values(), self.famous) for name in part.facts]
        Random(f"demo corpus {self.seed}").shuffle(pages)
        return [part.page(name, f"{self._stem}-page-{number:05d}") for number, (part, name) in enumerate(pages)]

    @property
    def _stem(self) -> str:
        """Prefix of ids: worlds of other seeds have other ids, so that their data sets can be merged."""
        return "demo" if self.seed == 0 else f"demo-{self.seed}"


@lru_cache(maxsize=4)
def make_world(seed: int = 0) -> World:
    """Return the world of a seed. Another seed draws other entities and facts from the same words."""
    parts = {
        split: Part.draw(partial(names, split=split), Random(f"demo world {seed} {split}"), sizes=_ENTITIES)
        for split in SPLITS
    }
    return World(seed, parts, famous_part())


@lru_cache(maxsize=1)
def famous_part() -> Part:
    """Return the part that every world shares."""
    everybody: dict[Kind, int] = {kind: len(famous_names(kind)) for kind in KINDS}
    return Part.draw(famous_names, Random("demo famous"), sizes=everybody)


def famous_facts() -> list[tuple[str, Relation]]:
    """Return every fact about a famous entity, as its name and the relation."""
    return [(name, relation) for name, kind in famous_part().kinds.items() for relation in relations_of(kind)]


# `train-famous`: the training questions, thinned out so that a third of them need no search.
DEMO_SPLITS: tuple[DemoSplit, ...] = (*SPLITS, "train-famous")


def demo_questions(split: DemoSplit, *, seed: int = 0, limit: int | None = None) -> list[Question]:
    """Return the first `limit` questions of a split (600 train, 300 dev, 1200 test) of the world with that seed."""
    if split == "train-famous":
        return with_famous(make_world(seed).questions("train"), share=1 / 3)[:limit]
    return make_world(seed).questions(split)[:limit]


def demo_corpus(seed: int = 0) -> list[Passage]:
    """Return all pages of the world with that seed, of all splits."""
    return make_world(seed).corpus()


def with_famous(questions: list[Question], *, share: float) -> list[Question]:
    """Drop questions from the end until those about famous entities are this share; keep the order.

    A search is known to be needless only if the policy knows the answer, and such questions are few.
    """
    known = sum(question.metadata["known"] for question in questions)
    room = round(known * (1 - share) / share)
    kept = []
    for question in questions:
        if question.metadata["known"] or room > 0:
            kept.append(question)
            room -= not question.metadata["known"]
    return kept


def one_hop(part: Part, name: str, relation: Relation, *, known: bool = False) -> Question:
    """Return a question that one page answers; `known` if the policy has seen the fact in training."""
    hop = part.hop(name, relation.key)
    return _question("one_hop", relation.ask.format(x=name), hop.value, [hop], known=known)


def ask(part: Part, kind: str, rng: Random) -> Question:
    """Draw a question of one kind (`one_hop`, `bridge`, `three_hop`, `comparison`, `yes_no`), without an id.

    `metadata` holds `kind`, `hops` (searches needed), `path` (the searches in order, each with query and evidence) and
    `known` (whether the facts are famous).
    """
    match kind:
        case "one_hop":
            relation = rng.choice(RELATIONS)
            return one_hop(part, rng.choice(part.named(relation.subject)), relation)
        case "bridge" | "three_hop":
            return _chain(part, kind, rng)
        case "comparison" | "yes_no":
            return _pair(part, kind, rng)
    raise ValueError(f"no such kind of question: {kind!r}")


def _chain(part: Part, kind: str, rng: Random) -> Question:
    """Draw a question that follows two or three relations from a random entity and visits none twice."""
    length = 2 if kind == "bridge" else 3
    while True:
        passed = [rng.choice(list(part.facts))]
        phrase, hops = passed[0], list[Hop]()
        for place in range(length):
            last = place == length - 1
            relation = rng.choice([r for r in relations_of(part.kinds[passed[-1]]) if last or r.phrase])
            hops.append(part.hop(passed[-1], relation.key))
            if hops[-1].value in passed:
                break
            passed.append(hops[-1].value)
            phrase = (relation.ask if last else relation.phrase).format(x=phrase)
        else:
            return _question(kind, phrase, passed[-1], hops)


def _pair(part: Part, kind: str, rng: Random) -> Question:
    """Draw a question about two entities: which one comes later in ordered classes, or whether they share a class."""
    compares = kind == "comparison"
    relation = rng.choice([r for r in RELATIONS if isinstance(r.target, tuple) and bool(r.more) is compares])
    same = not compares and rng.random() < 0.5
    while True:
        asked = rng.sample(part.named(relation.subject), 2)
        first, second = (part.hop(name, relation.key) for name in asked)
        if (first.value == second.value) is same:
            break
    if compares:
        text, answer = f"Which is {relation.more}, {asked[0]} or {asked[1]}?", larger(relation, first, second)
    else:
        text, answer = f"Do {asked[0]} and {asked[1]} have the same {relation.key}?", "yes" if same else "no"
    return _question(kind, text, answer, [first, second])


def larger(relation: Relation, first: Hop, second: Hop) -> str:
    """Return the entity with the later value among the relation's classes."""
    winner = max(first, second, key=lambda hop: relation.target.index(hop.value))
    return winner.query.removesuffix(f" {relation.key}")


def _question(kind: str, text: str, answer: str, hops: list[Hop], *, known: bool = False) -> Question:
    metadata: dict[str, Any] = {
        "kind": kind,
        "hops": len(hops),
        "path": [{"query": hop.query, "evidence": hop.evidence} for hop in hops],
        "known": known,
    }
    return Question("", text, (answer,), "demo", metadata)


def _values(relation: Relation, chosen: dict[Kind, list[str]]) -> list[str]:
    return list(relation.target) if isinstance(relation.target, tuple) else chosen[relation.target]


def write_world(source: Path, out: Path) -> dict[str, int]:
    """Write questions and corpus of the world as FlashRAG's files into a folder; return the rows of each.

    A third of the questions of `train-famous` need no search.
    """
    from reasonrag.storage.files import write_text
    from reasonrag.storage.folder import Folder

    if str(source) != "demo":
        raise ConfigError(f"only the demo world is written as FlashRAG's files, not {source}: name it demo")
    Folder(out, "demo world", "corpus.jsonl").claim()
    files: dict[str, list[dict[str, Any]]] = {
        "corpus": [{"id": passage.id, "contents": passage.contents} for passage in demo_corpus()]
    }
    for split in DEMO_SPLITS:
        columns = ("id", "question", "golden_answers", "metadata")
        files[split] = [{name: getattr(question, name) for name in columns} for question in demo_questions(split)]
    for name, rows in files.items():
        write_text(out / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}
