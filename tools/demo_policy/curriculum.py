"""Training data of the tiny policies: demonstrations in new worlds, copying drills, and facts to memorise.

A policy of a million parameters learns to copy from documents only by drills: several (query, evidence) pairs on the
same pages, in worlds that it never sees twice. No world here uses a name of the dev or test split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar

from reasonrag.core.types import Prompt, Question, Trajectory
from reasonrag.demo.world import RELATIONS, Kind, Part, ask, famous_facts, famous_part, names, one_hop, words
from tools.demo_policy.demonstrations import (
    FAULTLESS,
    NO_WHIMS,
    STREAM_HABITS,
    Demonstrator,
    Habits,
    Improviser,
    Whims,
    possible_values,
)
from tools.demo_policy.tokens import ASSISTANT, END, PHRASES, REASONRAG, STREAM, Alphabet
from tools.demo_policy.writing import STREAM_FORMATS, STREAM_STEPS, demonstrate, direct_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SIZES: dict[Kind, int] = {"person": 40, "film": 26, "city": 20, "band": 18, "company": 18, "country": 8}
_QUESTION_KINDS = (
    *["one_hop"] * 4,
    *["known"] * 2,
    *["bridge"] * 6,
    *["three_hop"] * 4,
    *["comparison"] * 2,
    *["yes_no"] * 2,
)
_FORCED_KINDS = ("known", "known", "comparison", "yes_no")
# Names in a prompt cannot be predicted; a small loss on them still teaches what names look like.
_PROMPT_WEIGHT = 0.15
# Passages repeat each name, so there is something to learn in them, but they are most of a row.
_FOUND_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One training text: `[T]` token ids and the weight of each token's loss."""

    ids: list[int]
    weights: list[float]


@dataclass
class Curriculum:
    """An endless stream of training rows that depends on `rng` alone.

    Args:
        tokenizer: encodes the rows.
        rng: source of all randomness.
        habits: habits of the demonstrator.
        drill_share: share of tokens in copying drills, in [0, 1).
        forced_answers: number per world of answers without a search: from memory, or from two notes.
    """

    alphabet: ClassVar[Alphabet] = REASONRAG

    tokenizer: PreTrainedTokenizerFast
    rng: Random
    habits: Habits = field(default_factory=Habits)
    drill_share: float = 0.5
    forced_answers: int = 80

    def chunk(self, *, questions: int = 60) -> list[Row]:
        """Return the rows of one new world: demonstrations, forced answers and drills."""
        part, pages = self._world()
        texts = [text for _ in range(questions) for text in self._demonstration(part, pages)]
        texts += [self._forced_answer(part, pages) for _ in range(self.forced_answers)]
        return self._with_drills([self._row(*text) for text in texts], pages)

    def _world(self) -> tuple[Part, Part]:
        """Draw a new part; also return all pages, which include the famous ones."""
        part = Part.draw(partial(names, split="train"), self.rng, sizes=_SIZES)
        famous = famous_part()
        return part, Part({**part.kinds, **famous.kinds}, {**part.facts, **famous.facts})

    def _with_drills(self, rows: list[Row], pages: Part) -> list[Row]:
        budget = sum(len(row.ids) for row in rows) * self.drill_share / (1 - self.drill_share)
        while budget > 0:
            rows.append(self._drill(pages))
            budget -= len(rows[-1].ids)
        return rows

    def batches(self, *, tokens: int) -> Iterator[list[Row]]:
        """Yield batches of rows of similar length, at most `tokens` each with padding, shuffled within a chunk."""
        while True:
            rows = sorted(self.chunk(), key=lambda row: len(row.ids))
            cut, batch = list[list[Row]](), list[Row]()
            for row in rows:
                if batch and len(row.ids) * (len(batch) + 1) > tokens:
                    cut.append(batch)
                    batch = []
                batch.append(row)
            self.rng.shuffle(cut)
            yield from cut

    def _demonstration(self, part: Part, pages: Part) -> Iterator[tuple[str, str]]:
        question = self._question(self.rng.choice(_QUESTION_KINDS), part)
        for prompt, text in Demonstrator(question, pages, self.rng, self.habits).examples():
            yield self._prompt(prompt), text

    def _forced_answer(self, part: Part, pages: Part) -> tuple[str, str]:
        """Return prompt and text of a last step, which has to answer: from memory, or by comparing two notes."""
        kind = self.rng.choice(_FORCED_KINDS)
        demonstrator = Demonstrator(
            self._question(kind, part), pages, self.rng, FAULTLESS, max_steps=1 if kind == "known" else 5
        )
        *_, (prompt, text) = demonstrator.examples()
        return self._prompt(prompt), text

    def _question(self, kind: str, part: Part) -> Question:
        if kind != "known":
            return ask(part, kind, self.rng)
        name, relation = self.rng.choice(famous_facts())
        return one_hop(famous_part(), name, relation, known=True)

    def _drill(self, pages: Part) -> Row:
        """Return one text of two pages and six searches on them; only the notes count fully in the loss."""
        first = self.rng.choice(list(pages.facts))
        second = self.rng.choice([name for name in pages.named(pages.kinds[first]) if name != first])
        before, between, after = self._drill_tags()
        ids, weights = list[int](), list[float]()
        for number, name in enumerate((first, second), 1):
            self._append(ids, weights, f"[{number}] {pages.page(name).contents}\n", 0.0)
        for _ in range(6):
            name = self.rng.choice((first, second))
            hop = pages.hop(name, self.rng.choice(list(pages.facts[name])))
            self._append(ids, weights, f"{before}{hop.query}{between}", 0.0)
            self._append(ids, weights, f"{hop.evidence}{after}", 1.0)
            self._append(ids, weights, "\n", 0.0)
        return Row(ids, weights)

    def _drill_tags(self) -> tuple[str, str, str]:
        """Return the texts before a drill's query, between query and note, and after the note."""
        return PHRASES[0], f"</query>\n{PHRASES[1]}", "</evidence>"

    def _append(self, ids: list[int], weights: list[float], text: str, weight: float) -> None:
        new = self.tokenizer.convert_tokens_to_ids(self.alphabet.pieces(text))
        ids += new
        weights += [weight] * len(new)

    def _row(self, prompt: str, completion: str) -> Row:
        ids, weights = list[int](), list[float]()
        self._append(ids, weights, prompt, _PROMPT_WEIGHT)
        ids.append(self.tokenizer.convert_tokens_to_ids(ASSISTANT))
        weights.append(0.0)
        self._append(ids, weights, completion, 1.0)
        return Row([*ids, self.tokenizer.convert_tokens_to_ids(END)], [*weights, 1.0])

    def _prompt(self, prompt: Prompt) -> str:
        """Return the prompt as the chat template renders it, up to the mark where the policy begins."""
        return "".join(f"{message.content}\n" for message in prompt.messages)


@dataclass
class StreamCurriculum(Curriculum):
    """Training rows for the formats of one growing turn: each row is a whole trajectory.

    Args:
        habits: habits of the improviser.
        whims: whims of the improviser.
        forced_answers: number per world of faultless trajectories that must answer as soon as they can.
        direct_answers: number per world of replies to a query alone; half of them are about famous entities.
        verdicts: number per world of short faultless trajectories that compare two entities.
    """

    alphabet: ClassVar[Alphabet] = STREAM

    habits: Habits = STREAM_HABITS
    drill_share: float = 0.35
    forced_answers: int = 8
    whims: Whims = field(default_factory=Whims)
    direct_answers: int = 60
    verdicts: int = 40

    def chunk(self, *, questions: int = 60) -> list[Row]:
        """Return the rows of one new world: trajectories, forced and direct answers, and drills."""
        part, pages = self._world()
        rows = [self._attempt(part, pages) for _ in range(questions)]
        rows += [self._forced(part, pages) for _ in range(self.forced_answers)]
        rows += [self._verdict(part) for _ in range(self.verdicts)]
        rows += [self._direct(part, pages) for _ in range(self.direct_answers)]
        return self._with_drills(rows, pages)

    def _attempt(self, part: Part, pages: Part) -> Row:
        question = self._question(self.rng.choice(_QUESTION_KINDS), part)
        improviser = Improviser(question, pages, self.rng, self.habits, whims=self.whims)
        return self._trajectory(demonstrate(improviser, self.rng.choice(STREAM_FORMATS)))

    def _forced(self, part: Part, pages: Part) -> Row:
        question = self._question(self.rng.choice((*_FORCED_KINDS, "bridge")), part)
        limit = 1 if question.metadata["known"] else question.metadata["hops"] + 1
        return self._faultless(question, pages, max_steps=limit)

    def _verdict(self, part: Part) -> Row:
        # Pages that hold only the facts asked for keep the rows short, so that there can be many.
        question = ask(part, self.rng.choice(("comparison", "yes_no")), self.rng)
        asked = [hop["query"].rsplit(" ", 1) for hop in question.metadata["path"]]
        pages = Part(
            {name: part.kinds[name] for name, _ in asked}, {name: {key: part.facts[name][key]} for name, key in asked}
        )
        return self._faultless(question, pages)

    def _faultless(self, question: Question, pages: Part, *, max_steps: int = STREAM_STEPS) -> Row:
        improviser = Improviser(question, pages, self.rng, FAULTLESS, whims=NO_WHIMS)
        return self._trajectory(demonstrate(improviser, self.rng.choice(STREAM_FORMATS), max_steps=max_steps))

    def _trajectory(self, done: Trajectory) -> Row:
        """Return one row: the last prompt, which holds all earlier steps, and the last completion."""
        last = done.steps[-1]
        row = self._row(self._prompt(last.prompt), "")
        ids, weights = row.ids[:-1], row.weights[:-1]
        for span in last.prompt.turn:
            self._append(ids, weights, span.text, 1.0 if span.by_policy else _FOUND_WEIGHT)
        self._append(ids, weights, last.completion.text, 1.0)
        return Row([*ids, row.ids[-1]], [*weights, 1.0])

    def _direct(self, part: Part, pages: Part) -> Row:
        """Return the reply to a query alone: the fact if it is famous, else a possible value."""
        if self.rng.random() < 0.5:
            name, relation = self.rng.choice(famous_facts())
            value = pages.facts[name][relation.key]
        else:
            name = self.rng.choice(list(part.facts))
            relation = self.rng.choice([r for r in RELATIONS if r.key in part.facts[name]])
            value = self.rng.choice(possible_values(relation, pages))
        query = f"{name} {relation.key}"
        return self._row(self._prompt(direct_prompt(query)), f"{query} {value}")

    def _drill_tags(self) -> tuple[str, str, str]:
        search = self.rng.choice(("search", "tool_call"))
        note = self.rng.choice(("think", "reasoning", "reflect", "conclusion"))
        return f"<{search}>", f"</{search}>\n<{note}>", f"</{note}>"


def stream_vocabulary_texts() -> list[str]:
    """Return texts with every word that the formats of one growing turn need."""
    return [*vocabulary_texts(), "need know"]


def vocabulary_texts() -> list[str]:
    """Return texts with every word of the demo: the lexicon, the questions' wording, and the format's phrases."""
    asked = [text for relation in RELATIONS for text in (relation.ask, relation.phrase)]
    compared = [f"Which is {relation.more}, or?" for relation in RELATIONS if relation.more]
    fixed = [
        "Do and have the same?",
        "[1] [2] [3] [4] [5]",
        "None yes no. ;",
        "Based on the query, the relevant evidence is",
    ]
    return [*words(), *(text.replace("{x}", " ") for text in asked), *compared, *fixed]
