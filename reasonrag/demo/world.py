"""An invented encyclopedia from a seed: one infobox-like page per entity, and questions that the pages answer.

A world has four closed parts: train, dev, test and famous. Facts link entities of the
same part only, so a test question never involves an entity of training. The famous part
is the same in every world: a policy trained on many worlds can answer its questions
from memory, and then a search is needless. Each split asks about famous entities of its
own; an answer, though, may be a famous entity that another split asks about.

`vocabulary.json` holds the words: two lists for the names of each type of entity, the first words of
famous names, and the relations. The split of a name does not depend on a seed, so a test name never
occurs in training, in any world.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Passage, Question

Split = Literal["train", "dev", "test"]
DemoSplit = Literal["train", "dev", "test", "train-famous", "train-list", "dev-list", "test-list"]
Kind = Literal["person", "film", "city", "band", "company", "country"]

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
# `train-famous`: the training questions, thinned out so that a third of them need no search.
# `train-list`, `dev-list`, `test-list`: questions with several answers, all of which have to be given.
DEMO_SPLITS: tuple[DemoSplit, ...] = (*SPLITS, "train-famous", "train-list", "dev-list", "test-list")

_ENTITIES: dict[Kind, int] = {"person": 48, "film": 30, "city": 24, "band": 20, "company": 20, "country": 8}
_QUESTIONS: dict[Split, int] = {"train": 600, "dev": 300, "test": 1200}
# One round of question kinds, repeated, so that any prefix of a question list has nearly this mix.
_ROUND = (*["one_hop"] * 3, *["known"] * 2, *["bridge"] * 7, *["three_hop"] * 4, *["comparison"] * 2, *["yes_no"] * 2)
# Which of the shuffled famous entities a split asks about: enough facts for two questions in twenty.
_FAMOUS_SHARE: dict[Split, tuple[float, float]] = {"train": (0.0, 0.28), "dev": (0.28, 0.43), "test": (0.43, 1.0)}
# The split of a name: the sum of its two words' places, modulo ten.
_SPLIT_OF_RESIDUE = ("dev", "test", "test", "test", "train", "dev", "train", "train", "train", "train")


@dataclass(frozen=True, slots=True)
class Relation:
    """One attribute of a page.

    `target` is the type of entity that it leads to, or the classes that are its values; `ask` and
    `phrase` are how a question names it, with `{x}` for the subject. `more` is the comparative of ordered
    classes (least first), else "".
    """

    key: str
    subject: Kind
    target: Kind | tuple[str, ...]
    ask: str
    phrase: str = ""
    more: str = ""


_VOCABULARY = json.loads(Path(__file__).with_name("vocabulary.json").read_text("utf-8"))
_NAMES: dict[Kind, list[str]] = _VOCABULARY["names"]
_FAMOUS: dict[Kind, str] = _VOCABULARY["famous"]
KINDS: tuple[Kind, ...] = tuple(_NAMES)


def _relation(entry: dict[str, Any]) -> Relation:
    target = entry["target"]
    return Relation(**entry | {"target": tuple(target) if isinstance(target, list) else target})


RELATIONS: tuple[Relation, ...] = tuple(map(_relation, _VOCABULARY["relations"]))


def relations_of(kind: Kind) -> tuple[Relation, ...]:
    """Return the attributes of a page of this type, in page order."""
    return tuple(relation for relation in RELATIONS if relation.subject == kind)


def names(kind: Kind, split: Split) -> tuple[str, ...]:
    """Return every name of the type that belongs to the split; the three splits share no name."""
    first_words, last_words = map(str.split, _NAMES[kind])
    chosen = []
    for first_place, first in enumerate(first_words):
        for last_place, last in enumerate(last_words):
            if _SPLIT_OF_RESIDUE[(first_place + last_place) % len(_SPLIT_OF_RESIDUE)] == split:
                chosen.append(f"{first} {last}")
    return tuple(chosen)


def famous_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the type that every world has. Each begins with a word that no other name has."""
    last_words = _NAMES[kind][1].split()
    return tuple(f"{first} {last_words[-1 - n % len(last_words)]}" for n, first in enumerate(_FAMOUS[kind].split()))


def words() -> tuple[str, ...]:
    """Return every word that a page or a query can hold, once each, in a fixed order."""
    of_names = " ".join(chain(*_NAMES.values(), _FAMOUS.values())).split()
    classes = [relation.target for relation in RELATIONS if isinstance(relation.target, tuple)]
    return (*of_names, *(relation.key for relation in RELATIONS), *chain(*classes))


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
    def draw(cls, names_of: Callable[[Kind], tuple[str, ...]], generator: Random, *, sizes: dict[Kind, int]) -> Part:
        """Draw `sizes` entities of each type (or all if fewer names exist), with random facts among them."""
        # The order of the draws is part of the data: another order gives another world for every seed.
        chosen: dict[Kind, list[str]] = {}
        kinds: dict[str, Kind] = {}
        for kind in KINDS:
            pool = names_of(kind)
            chosen[kind] = generator.sample(pool, min(sizes[kind], len(pool)))
            kinds |= dict.fromkeys(chosen[kind], kind)
        facts: dict[str, dict[str, str]] = {}
        for name, kind in kinds.items():
            facts[name] = {}
            for relation in relations_of(kind):
                values = relation.target if isinstance(relation.target, tuple) else chosen[relation.target]
                facts[name][relation.key] = generator.choice([value for value in values if value != name])
        return cls(kinds, facts)

    def named(self, kind: Kind) -> list[str]:
        """Return the entities of a type, in the order drawn."""
        return [name for name, its_kind in self.kinds.items() if its_kind == kind]

    def hop(self, name: str, key: str) -> Hop:
        """Return the search for one attribute of an entity."""
        return Hop(f"{name} {key}", self.facts[name][key])

    def page(self, name: str, passage_id: str = "") -> Passage:
        """Return the entity's page in FlashRAG's form: the title, a newline, the text."""
        # Every fact repeats the name: otherwise BM25 often ranks
        # a page that mentions the entity above its own page.
        text = "; ".join(self.hop(name, key).evidence for key in self.facts[name])
        return Passage(passage_id or name, f"{name}\n{text}")


@dataclass(frozen=True)
class World:
    """The parts of one world, its questions and its corpus."""

    seed: int
    parts: dict[Split, Part]
    famous: Part

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts of the three splits, then the famous one."""
        return (*self.parts.values(), self.famous)

    def questions(self, split: Split, kinds: Sequence[str] = _ROUND) -> list[Question]:
        """Return the questions of a split, in a fixed order: about its own entities, and some about famous ones.

        No entity is named by questions of two splits. The `kinds` follow each other in turn.
        """
        part = split if kinds is _ROUND else f"{split}-{kinds[0]}"
        generator = Random(f"demo questions {self.seed} {part}")
        entities = list(self.famous.facts)
        Random("demo famous entities").shuffle(entities)
        first, last = (round(share * len(entities)) for share in _FAMOUS_SHARE[split])
        facts = [fact for fact in famous_facts() if fact[0] in entities[first:last]]
        Random("demo famous questions").shuffle(facts)
        known = iter(facts)
        drawn: dict[str, Question] = {}
        while len(drawn) < _QUESTIONS[split]:
            kind = kinds[len(drawn) % len(kinds)]
            if kind == "known":
                question = one_hop(self.famous, *next(known), known=True)
            else:
                question = ask(self.parts[split], kind, generator)
            text = question.question
            if text not in drawn:  # one that comes twice is drawn again
                metadata = {**question.metadata, "split": split}
                drawn[text] = replace(question, id=f"{self.stem}-{part}-{len(drawn):06d}", metadata=metadata)
        return list(drawn.values())

    def named(self, questions: Iterable[Question]) -> set[str]:
        """Return the entities that the texts of some questions name."""
        texts = "\n".join(question.question for question in questions)
        return {name for part in self.all_parts for name in part.facts if name in texts}

    @property
    def stem(self) -> str:
        """Prefix of ids: worlds of other seeds have other ids, so that their data sets can be merged."""
        return "demo" if self.seed == 0 else f"demo-{self.seed}"


@lru_cache(maxsize=4)
def make_world(seed: int = 0) -> World:
    """Return the world of a seed. Another seed draws other entities and facts from the same words."""
    parts: dict[Split, Part] = {}
    for split in SPLITS:
        parts[split] = Part.draw(partial(names, split=split), Random(f"demo world {seed} {split}"), sizes=_ENTITIES)
    return World(seed, parts, famous_part())


@lru_cache(maxsize=1)
def famous_part() -> Part:
    """Return the part that every world shares."""
    return Part.draw(famous_names, Random("demo famous"), sizes={kind: len(famous_names(kind)) for kind in KINDS})


def famous_facts() -> list[tuple[str, Relation]]:
    """Return every fact about a famous entity, as its name and the relation."""
    return [(name, relation) for name, kind in famous_part().kinds.items() for relation in relations_of(kind)]


def demo_questions(split: DemoSplit, *, seed: int = 0, limit: int | None = None) -> list[Question]:
    """Return the first `limit` questions of a split (600 train, 300 dev, 1200 test) of the world with that seed."""
    name, _, part = split.partition("-")
    questions = make_world(seed).questions(cast(Split, name), ("list",) if part == "list" else _ROUND)
    return (_with_famous(questions) if part == "famous" else questions)[:limit]


def demo_corpus(seed: int = 0) -> list[Passage]:
    """Return the pages of the world with that seed, shuffled: one corpus for all splits."""
    world = make_world(seed)
    entities = [(part, name) for part in world.all_parts for name in part.facts]
    Random(f"demo corpus {seed}").shuffle(entities)
    return [part.page(name, f"{world.stem}-page-{number:05d}") for number, (part, name) in enumerate(entities)]


def _with_famous(questions: list[Question]) -> list[Question]:
    """Drop questions from the end until a third is about famous entities; keep the order.

    A search is known to be needless only if the policy knows the answer, and such questions are few.
    """
    room = 2 * sum(question.metadata["known"] for question in questions)
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


def ask(part: Part, kind: str, generator: Random) -> Question:
    """Draw a question of one kind (`one_hop`, `bridge`, `three_hop`, `comparison`, `yes_no`, `list`), without an id.

    `metadata` holds `kind`, `hops` (searches needed), `path` (the searches in order, each with query and
    evidence) and `known` (whether the facts are famous).
    """
    match kind:
        case "one_hop":
            relation = generator.choice(RELATIONS)
            return one_hop(part, generator.choice(part.named(relation.subject)), relation)
        case "bridge" | "three_hop":
            return _chain(part, kind, generator)
        case "comparison" | "yes_no" | "list":
            return _pair(part, kind, generator)
    raise ValueError(f"no such kind of question: {kind!r}")


def _chain(part: Part, kind: str, generator: Random) -> Question:
    """Draw a question that follows two or three relations from a random entity and visits none twice."""
    length = 2 if kind == "bridge" else 3
    while True:
        passed = [generator.choice(list(part.facts))]
        phrase, hops = passed[0], list[Hop]()
        for place in range(length):
            is_last = place == length - 1
            relations = relations_of(part.kinds[passed[-1]])
            relation = generator.choice([relation for relation in relations if is_last or relation.phrase])
            hops.append(part.hop(passed[-1], relation.key))
            if hops[-1].value in passed:
                break
            passed.append(hops[-1].value)
            phrase = (relation.ask if is_last else relation.phrase).format(x=phrase)
        else:
            return _question(kind, phrase, passed[-1], hops)


def _pair(part: Part, kind: str, generator: Random) -> Question:
    """Draw a question about two entities: which one comes later in ordered classes, whether they share a class, or
    which two others a relation leads to, as a list in any order.
    """
    compares, lists = kind == "comparison", kind == "list"
    of_type = [relation for relation in RELATIONS if isinstance(relation.target, str) is lists]
    relation = generator.choice([relation for relation in of_type if bool(relation.more) is compares])
    same = kind == "yes_no" and generator.random() < 0.5
    while True:
        # Sampled again until the two values differ, or are equal, as the question needs it.
        first_name, second_name = generator.sample(part.named(relation.subject), 2)
        first, second = part.hop(first_name, relation.key), part.hop(second_name, relation.key)
        if (first.value == second.value) is same:
            break
    if lists:
        question = _question(kind, relation.ask.format(x=f"{first_name} and {second_name}"), "", [first, second])
        golden = (f"{first.value} and {second.value}", f"{second.value} and {first.value}")
        return replace(question, golden_answers=golden, items=((first.value,), (second.value,)))
    if compares:
        text, answer = f"Which is {relation.more}, {first_name} or {second_name}?", larger(relation, first, second)
    else:
        text, answer = f"Do {first_name} and {second_name} have the same {relation.key}?", "yes" if same else "no"
    return _question(kind, text, answer, [first, second])


def larger(relation: Relation, first: Hop, second: Hop) -> str:
    """Return the entity with the later value among the relation's classes."""
    return max(first, second, key=lambda hop: relation.target.index(hop.value)).query.removesuffix(f" {relation.key}")


def _question(kind: str, text: str, answer: str, hops: list[Hop], *, known: bool = False) -> Question:
    path = [{"query": hop.query, "evidence": hop.evidence} for hop in hops]
    return Question("", text, (answer,), "demo", {"kind": kind, "hops": len(hops), "path": path, "known": known})


def write_world(source: Path, out: Path) -> dict[str, int]:
    """Write questions and corpus of the world as FlashRAG's files into a folder; return the rows of each.

    A third of the questions of `train-famous` need no search.
    """
    from reasonrag.storage.files import write_text
    from reasonrag.storage.folder import Folder

    if str(source) != "demo":
        raise ConfigError(f"only the demo world is written as FlashRAG's files, not {source}: name it demo")
    # Its first file identifies the folder: many folders of other people have a corpus.jsonl.
    Folder(out, "demo world", "train-famous.jsonl").claim()
    files: dict[str, list[dict[str, Any]]] = {}
    for split in sorted(DEMO_SPLITS, key="train-famous".__ne__):
        columns = ["id", "question", "golden_answers", "metadata", *["items"] * split.endswith("-list")]
        files[split] = [{name: getattr(question, name) for name in columns} for question in demo_questions(split)]
    files["corpus"] = [{"id": passage.id, "contents": passage.contents} for passage in demo_corpus()]
    for name, rows in files.items():
        write_text(out / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}
