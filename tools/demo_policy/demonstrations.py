"""Imperfect demonstrations: the decisions of a hasty, wasteful searcher on the demo's questions, step by step.

The demonstrator has habits that a tree search can find and preference learning can cure: it searches again although it
has the answer, answers before it has the evidence, and sometimes notes the wrong line of a page. If a habit is the
likelier choice, greedy decoding shows it too. `examples` writes the decisions in ReasonRAG's format,
`tools.demo_policy.writing` in the formats of one growing turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from reasonrag.core.types import Answer, Completion, Note, Passage, Prompt, Question, Search, Step
from reasonrag.demo.judge import demo_format
from reasonrag.demo.world import RELATIONS, Hop, Part, Relation, larger

MAX_STEPS = 8

_RELATION = {relation.key: relation for relation in RELATIONS}


@dataclass(frozen=True, slots=True)
class Habits:
    """The probability of each fault, in [0, 1].

    Args:
        recall: answers a question about a famous entity from memory.
        guess: answers before the first search.
        hasty: answers one search early, with what it has, where the last search is for one of `hasty_keys`.
        early: answers early in any other case.
        again: searches once more although nothing is missing, by the number of searches needed (1, 2, 3).
        aside: searches for something needless on the way.
        misread: notes another line of the page.
        overlook: notes nothing although the page has it.
    """

    recall: float = 0.35
    guess: float = 0.06
    hasty: float = 0.74
    hasty_keys: frozenset[str] = frozenset(
        (
            *("birthplace", "employer", "instrument", "mayor", "country", "founder"),
            *("revenue", "capital", "studio", "style", "genre"),
        )
    )
    early: float = 0.07
    again: tuple[float, float, float] = (0.6, 0.3, 0.2)
    aside: float = 0.05
    misread: float = 0.03
    overlook: float = 0.02


FAULTLESS = Habits(recall=0, guess=0, hasty=0, early=0, again=(0, 0, 0), aside=0, misread=0, overlook=0)


@dataclass
class Demonstrator:
    """Works through one question. It believes only its notes, so a misread line leads it astray."""

    question: Question
    pages: Part
    rng: Random
    habits: Habits = field(default_factory=Habits)
    max_steps: int = MAX_STEPS

    def __post_init__(self) -> None:
        path = [hop["query"].rsplit(" ", 1) for hop in self.question.metadata["path"]]
        self._names: list[str] = [name for name, _ in path]
        self._keys: list[str] = [key for _, key in path]
        self._pair = self.question.metadata["kind"] in ("comparison", "yes_no")
        self._notes: dict[str, str] = {}  # query -> value noted, "" where nothing was found
        self._needless = 0
        self._own = False  # whether a note was made without a page

    def examples(self) -> Iterator[tuple[Prompt, str]]:
        """Yield each step of one attempt: the prompt, and the text of the demonstrator."""
        format = demo_format()
        steps: tuple[Step, ...] = ()
        while not steps or not isinstance(steps[-1].action, Answer):
            final = len(steps) == self.max_steps - 1
            prompt = format.prompt(self.question, steps, final=final)
            query = steps[-1].action.query if steps and isinstance(steps[-1].action, Search) else None
            text = _written(self.answer() if final else self.note(query) if query else self.move())
            yield prompt, text
            action = format.parse(text, steps, final=final)
            passages = (self.page(action.query),) if isinstance(action, Search) else ()
            steps = (*steps, Step(prompt, Completion(text), action, passages))

    def move(self) -> Search | Answer:
        """Decide the next step after the result of a search is noted."""
        habits, missing = self.habits, self._missing()
        if not missing or self._notes.get(missing[0]) == "":
            again = habits.again[len(self._keys) - 1] / (1 + 2 * self._needless)
            return self._search_needlessly() if self.rng.random() < again else self.answer()
        if not self._notes and self.question.metadata["known"] and self.rng.random() < habits.recall:
            return self.answer()
        early = habits.hasty if len(missing) == 1 and self._keys[-1] in habits.hasty_keys else habits.early
        if self.rng.random() < (early if self._notes else habits.guess):
            return self.answer()
        return self._search_needlessly() if self.rng.random() < habits.aside else Search(missing[0])

    def note(self, query: str) -> Note:
        """Write a note on the page found."""
        name, _, key = query.rpartition(" ")
        facts = self.pages.facts.get(name, {})
        value = facts.get(key, "")
        others = [other for other in facts.values() if other != value]
        if value and others and self.rng.random() < self.habits.misread:
            value = self.rng.choice(others)
        if self.rng.random() < self.habits.overlook:
            value = ""
        self._notes[query] = value
        return Note(f"{query} {value}" if value else "")

    def answer(self) -> Answer:
        """Answer with what it believes or has memorised; guess if that is nothing."""
        if self.question.metadata["known"] and not self._notes:
            return Answer(self.question.golden_answers[0])
        if self._pair:
            return Answer(self._guess() if self._missing() else self._verdict())
        belief = self._belief()
        return Answer(belief if belief != self._names[0] else self._guess())

    def _verdict(self) -> str:
        hops = [Hop(query, self._notes[query]) for query in self._queries()]
        if self.question.metadata["kind"] == "yes_no":
            return "yes" if hops[0].value == hops[1].value else "no"
        relation = _RELATION[self._keys[0]]
        return larger(relation, *hops) if all(hop.value in relation.target for hop in hops) else self._guess()

    def _guess(self) -> str:
        if self._pair:
            return self.rng.choice(["yes", "no"] if self.question.metadata["kind"] == "yes_no" else self._names)
        return self.rng.choice(possible_values(_RELATION[self._keys[-1]], self.pages))

    def _belief(self) -> str:
        """Return the entity or value at the end of the chain of notes."""
        belief: str = self._names[0]
        for key in self._keys:
            value = self._notes.get(f"{belief} {key}")
            if not value:
                break
            belief = value
        return belief

    def _queries(self) -> list[str]:
        """Return the searches that the question needs, as far as the notes show."""
        if self._pair:
            return [f"{name} {key}" for name, key in zip(self._names, self._keys, strict=True)]
        queries, subject = list[str](), self._names[0]
        for key in self._keys:
            queries.append(f"{subject} {key}")
            subject = self._notes.get(queries[-1], "") or "?"
        return queries

    def _missing(self) -> list[str]:
        """Return the searches that are still needed; if one found nothing, the later ones stay missing."""
        return [query for query in self._queries() if not self._notes.get(query)]

    def _search_needlessly(self) -> Search:
        self._needless += 1
        asked = list(self._notes)
        if asked and self.rng.random() < 0.4:
            return Search(asked[-1])
        subject = (asked[-1] if asked else self._queries()[0]).rpartition(" ")[0]
        keys = [key for key in self.pages.facts.get(subject, {}) if f"{subject} {key}" not in self._queries()]
        return Search(f"{subject} {self.rng.choice(keys)}" if keys else self._queries()[0])

    def page(self, query: str) -> Passage:
        """Return the page of the entity asked for; a random page if it has none."""
        name = query.rpartition(" ")[0]
        return self.pages.page(name if name in self.pages.facts else self.rng.choice(list(self.pages.facts)))


@dataclass(frozen=True, slots=True)
class Whims:
    """The probability of writing down a remembered or invented fact instead of searching, in [0, 1].

    Args:
        recall: remembers a famous fact.
        invent: invents a fact before its first search.
        complete: invents the last fact if its key is one of `complete_keys`.
        sketch: plans only the searches that it will make, if it answers early.
    """

    recall: float = 0.25
    invent: float = 0.1
    complete: float = 0.8
    complete_keys: frozenset[str] = frozenset(("instrument", "genre", "style", "mayor", "country", "founder"))
    sketch: float = 0.7


NO_WHIMS = Whims(recall=0, invent=0, complete=0, sketch=0)
# The keys that whims invent are not answered early as well.
STREAM_HABITS = Habits(recall=0, hasty=0.8, hasty_keys=Habits().hasty_keys - Whims().complete_keys)


@dataclass(frozen=True, slots=True)
class Finding:
    """A query, the note on it ("" for nothing), and the page found; None if no search was made."""

    query: str
    evidence: str
    page: Passage | None = None

    @property
    def key(self) -> str:
        return self.query.rpartition(" ")[2]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The decisions on one question, in order.

    `key` is the attribute asked for first; `plan` names the intended searches, each by what is known of it beforehand.
    """

    findings: tuple[Finding, ...]
    answer: str
    key: str
    plan: tuple[str, ...]


@dataclass
class Improviser(Demonstrator):
    """A demonstrator that also writes down facts without looking them up."""

    whims: Whims = field(default_factory=Whims)

    def attempt(self, *, budget: int, own_count: bool) -> Attempt:
        """One attempt at the question.

        Args:
            budget: number of findings, after which it has to answer.
            own_count: whether findings without a search count towards the budget.
        """
        findings, used = list[Finding](), 0
        while used < budget and isinstance(step := self._step(), Finding):
            findings.append(step)
            used += own_count or step.page is not None
        answer = step if used < budget and isinstance(step, Answer) else self.answer()
        return Attempt(tuple(findings), answer.answer, self._keys[0], self._plan())

    def _step(self) -> Finding | Answer:
        missing = self._missing()
        if not missing and self._own:
            return self.answer()
        if missing and self._notes.get(missing[0]) != "" and self.rng.random() < self._whim(missing):
            return self._from_memory(missing[0])
        move = self.move()
        if isinstance(move, Answer):
            return move
        return Finding(move.query, self.note(move.query).evidence, self.page(move.query))

    def _whim(self, missing: list[str]) -> float:
        if self.question.metadata["known"]:
            return 0.0 if self._notes else self.whims.recall
        if not self._notes:
            return self.whims.invent
        return self.whims.complete if len(missing) == 1 and self._keys[-1] in self.whims.complete_keys else 0.0

    def _from_memory(self, query: str) -> Finding:
        """Return a famous fact as it is; for any other, a possible value."""
        name, _, key = query.rpartition(" ")
        if self.question.metadata["known"]:
            value = self.pages.facts[name][key]
        else:
            value = self.rng.choice(possible_values(_RELATION[key], self.pages))
        self._notes[query], self._own = value, True
        return Finding(query, f"{query} {value}")

    def _plan(self) -> tuple[str, ...]:
        """Return every search that the question needs, or at random only those that were made."""
        plan = [f"{self._names[0]} {self._keys[0]}", *self._keys[1:]]
        if self._pair:
            plan = self._queries()
        made = len(plan) - len(self._missing())
        return tuple(plan[: max(1, made)] if made < len(plan) and self.rng.random() < self.whims.sketch else plan)


def possible_values(relation: Relation, pages: Part) -> list[str]:
    """Return the possible values of the relation among those pages."""
    return list(relation.target) if isinstance(relation.target, tuple) else pages.named(relation.target)


def _written(action: Search | Note | Answer) -> str:
    """Return the action as ReasonRAG's format expects it."""
    match action:
        case Search(query):
            return f"So the next query is <query>{query}</query>"
        case Note(""):
            return "<evidence>None</evidence>"
        case Note(evidence):
            return f"Based on the query, the relevant evidence is <evidence>{evidence}</evidence>"
        case Answer(answer):
            return f"So the answer is <answer>{answer}</answer>"
