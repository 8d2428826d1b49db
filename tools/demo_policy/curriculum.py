"""What the tiny policy is trained on: demonstrations in ever new worlds, drills in copying, and facts to know by heart.

A policy of a million parameters learns to copy from documents only if it is drilled: several (query, evidence) pairs on
the same pages, in worlds that it never sees twice. No world here uses a name of the dev or test split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, ClassVar

from reasonrag.core.types import Prompt, Question, Trajectory
from reasonrag.demo.lexicon import RELATIONS, Kind, names, words
from reasonrag.demo.world import Part, ask, famous_facts, famous_part, one_hop
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
# Names in a prompt cannot be foretold; a little loss on them still teaches what names look like.
_PROMPT_WEIGHT = 0.15
# Passages say each name several times over, so there is something to learn in them; but they are most of a row.
_FOUND_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One training text: `[T]` token ids and the weight of each token's loss."""

    ids: list[int]
    weights: list[float]


@dataclass
class Curriculum:
    """An endless stream of training rows, decided by `rng` alone.

    Args:
        tokenizer: whose ids the rows hold.
        rng: is used up by the stream.
        habits: of the demonstrator.
        drill_share: of all tokens that are drills in copying, in [0, 1).
        forced_answers: per world, answers from memory or from two notes, where no search is possible.
    """

    alphabet: ClassVar[Alphabet] = REASONRAG

    tokenizer: PreTrainedTokenizerFast
    rng: Random
    habits: Habits = field(default_factory=Habits)
    drill_share: float = 0.5
    forced_answers: int = 80

    def chunk(self, *, questions: int = 60) -> list[Row]:
        """Rows from one new world: its demonstrations, forced answers, and drills (a share of all tokens)."""
        part, pages = self._world()
        texts = [text for _ in range(questions) for text in self._demonstration(part, pages)]
        texts += [self._forced_answer(part, pages) for _ in range(self.forced_answers)]
        return self._with_drills([self._row(*text) for text in texts], pages)

    def _world(self) -> tuple[Part, Part]:
        """A new part, and all pages that there are with it: the famous ones too."""
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
        """Batches of rows of like length, `tokens` each with padding; every chunk is cut and shuffled anew."""
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
        """The last of few steps, where only an answer is possible: from memory, or from two notes to be compared."""
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
        """Two pages and six searches on them, in one text; only what is noted counts fully."""
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
        """What stands before a drill's query, between it and the note, and behind the note."""
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
        """As the chat template renders it, up to the mark where the policy begins."""
        return "".join(f"{message.content}\n" for message in prompt.messages)


@dataclass
class StreamCurriculum(Curriculum):
    """The same for the formats of one growing turn: a trajectory is one row.

    Args:
        habits: of the improviser.
        whims: of the improviser.
        forced_answers: per world, faultless trajectories that are asked for their answer as soon as they can give it.
        direct_answers: per world, replies to a query alone; half of them are about famous entities.
        verdicts: per world, short faultless trajectories that compare two entities.
    """

    alphabet: ClassVar[Alphabet] = STREAM

    habits: Habits = STREAM_HABITS
    drill_share: float = 0.35
    forced_answers: int = 8
    whims: Whims = field(default_factory=Whims)
    direct_answers: int = 60
    verdicts: int = 40

    def chunk(self, *, questions: int = 60) -> list[Row]:
        """Rows from one new world: trajectories, forced and direct answers, and drills (a share of all tokens)."""
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
        """Pages that say nothing but what is asked keep the row short, so that there can be many."""
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
        """Its last prompt, which holds all that was written before, and the last words."""
        last = done.steps[-1]
        row = self._row(self._prompt(last.prompt), "")
        ids, weights = row.ids[:-1], row.weights[:-1]
        for span in last.prompt.turn:
            self._append(ids, weights, span.text, 1.0 if span.by_policy else _FOUND_WEIGHT)
        self._append(ids, weights, last.completion.text, 1.0)
        return Row([*ids, row.ids[-1]], [*weights, 1.0])

    def _direct(self, part: Part, pages: Part) -> Row:
        """What a query alone brings to mind: the fact if it is famous, else something that could be."""
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
    """Texts that hold every word of the demo as the formats of one growing turn write it."""
    return [*vocabulary_texts(), "need know"]


def vocabulary_texts() -> list[str]:
    """Texts that hold every word of the demo: the lexicon, the questions' wording, and what the format writes."""
    asked = [text for relation in RELATIONS for text in (relation.ask, relation.phrase)]
    compared = [f"Which is {relation.more}, or?" for relation in RELATIONS if relation.more]
    fixed = [
        "Do and have the same?",
        "[1] [2] [3] [4] [5]",
        "None yes no. ;",
        "Based on the query, the relevant evidence is",
    ]
    return [*words(), *(text.replace("{x}", " ") for text in asked), *compared, *fixed]
