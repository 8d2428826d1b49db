"""Imperfect demonstrations: a hasty, wasteful searcher works through the demo's questions, written in the real format.

The demonstrator has habits that a tree search can find and preference learning can cure: it searches again when it has
the answer, answers before it has the evidence, and now and then notes the wrong line of a page. Where a habit is the
likelier choice, greedy decoding shows it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random

from reasonrag.demo.lexicon import RELATIONS
from reasonrag.demo.world import Hop, Part, larger
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.types import Answer, Completion, Note, Passage, Prompt, Question, Search, Step

MAX_STEPS = 8

_RELATION = {relation.key: relation for relation in RELATIONS}


@dataclass(frozen=True, slots=True)
class Habits:
    """How likely each fault is, in [0, 1].

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


@cache
def demo_format() -> ReasonRAGFormat:
    """The format that the policy is trained in: its prompts are the shipped `brief` ones."""
    return ReasonRAGFormat(PromptSet.find("brief"))


FAULTLESS = Habits(recall=0, guess=0, hasty=0, early=0, again=(0, 0, 0), aside=0, misread=0, overlook=0)


@dataclass
class Demonstrator:
    """Works through one question. What it believes is only what it noted: a misread line leads it astray."""

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

    def examples(self) -> Iterator[tuple[Prompt, str]]:
        """Each step of one attempt: the prompt, and what the demonstrator writes."""
        format = demo_format()
        steps: tuple[Step, ...] = ()
        while not steps or not isinstance(steps[-1].action, Answer):
            final = len(steps) == self.max_steps - 1
            prompt = format.prompt(self.question, steps, final=final)
            query = steps[-1].action.query if steps and isinstance(steps[-1].action, Search) else None
            text = self._answer() if final else self._ground(query) if query else self._reason()
            yield prompt, text
            action = format.parse(text, steps, final=final)
            passages = (self._page(action.query),) if isinstance(action, Search) else ()
            steps = (*steps, Step(prompt, Completion(text), action, passages))

    def _reason(self) -> str:
        habits, missing = self.habits, self._missing()
        if not missing or self._notes.get(missing[0]) == "":
            again = habits.again[len(self._keys) - 1] / (1 + 2 * self._needless)
            return self._search_needlessly() if self.rng.random() < again else self._answer()
        if not self._notes and self.question.metadata["known"] and self.rng.random() < habits.recall:
            return self._answer()
        early = habits.hasty if len(missing) == 1 and self._keys[-1] in habits.hasty_keys else habits.early
        if self.rng.random() < (early if self._notes else habits.guess):
            return self._answer()
        return self._search_needlessly() if self.rng.random() < habits.aside else _written(Search(missing[0]))

    def _ground(self, query: str) -> str:
        name, _, key = query.rpartition(" ")
        facts = self.pages.facts.get(name, {})
        value = facts.get(key, "")
        others = [other for other in facts.values() if other != value]
        if value and others and self.rng.random() < self.habits.misread:
            value = self.rng.choice(others)
        if self.rng.random() < self.habits.overlook:
            value = ""
        self._notes[query] = value
        return _written(Note(f"{query} {value}" if value else ""))

    def _answer(self) -> str:
        """With what it believes, or knows by heart; a guess where that is nothing."""
        if self.question.metadata["known"] and not self._notes:
            return _written(Answer(self.question.golden_answers[0]))
        if self._pair:
            return _written(Answer(self._guess() if self._missing() else self._verdict()))
        belief = self._belief()
        return _written(Answer(belief if belief != self._names[0] else self._guess()))

    def _verdict(self) -> str:
        hops = [Hop(query, self._notes[query]) for query in self._queries()]
        if self.question.metadata["kind"] == "yes_no":
            return "yes" if hops[0].value == hops[1].value else "no"
        relation = _RELATION[self._keys[0]]
        return larger(relation, *hops) if all(hop.value in relation.target for hop in hops) else self._guess()

    def _guess(self) -> str:
        if self._pair:
            return self.rng.choice(["yes", "no"] if self.question.metadata["kind"] == "yes_no" else self._names)
        target = _RELATION[self._keys[-1]].target
        return self.rng.choice(list(target) if isinstance(target, tuple) else self.pages.named(target))

    def _belief(self) -> str:
        """The entity or value at the end of the chain of notes."""
        belief: str = self._names[0]
        for key in self._keys:
            value = self._notes.get(f"{belief} {key}")
            if not value:
                break
            belief = value
        return belief

    def _queries(self) -> list[str]:
        """The searches that the question needs, as far as the notes tell."""
        if self._pair:
            return [f"{name} {key}" for name, key in zip(self._names, self._keys, strict=True)]
        queries, subject = list[str](), self._names[0]
        for key in self._keys:
            queries.append(f"{subject} {key}")
            subject = self._notes.get(queries[-1], "") or "?"
        return queries

    def _missing(self) -> list[str]:
        """The searches that are still needed; those after a search that found nothing stay missing."""
        return [query for query in self._queries() if not self._notes.get(query)]

    def _search_needlessly(self) -> str:
        self._needless += 1
        asked = list(self._notes)
        if asked and self.rng.random() < 0.4:
            return _written(Search(asked[-1]))
        subject = (asked[-1] if asked else self._queries()[0]).rpartition(" ")[0]
        keys = [key for key in self.pages.facts.get(subject, {}) if f"{subject} {key}" not in self._queries()]
        return _written(Search(f"{subject} {self.rng.choice(keys)}" if keys else self._queries()[0]))

    def _page(self, query: str) -> Passage:
        name = query.rpartition(" ")[0]
        return self.pages.page(name if name in self.pages.facts else self.rng.choice(list(self.pages.facts)))


def _written(action: Search | Note | Answer) -> str:
    """The action as the format asks for it."""
    match action:
        case Search(query):
            return f"So the next query is <query>{query}</query>"
        case Note(""):
            return "<evidence>None</evidence>"
        case Note(evidence):
            return f"Based on the query, the relevant evidence is <evidence>{evidence}</evidence>"
        case Answer(answer):
            return f"So the answer is <answer>{answer}</answer>"
