"""What the tiny policy is trained on: demonstrations in ever new worlds, drills in copying, and facts to know by heart.

A policy of a million parameters learns to copy from documents only if it is drilled: several (query, evidence) pairs on
the same pages, in worlds that it never sees twice. No world here uses a name of the dev or test split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from reasonrag.demo.demonstrations import FAULTLESS, Demonstrator, Habits
from reasonrag.demo.lexicon import RELATIONS, Kind, names, words
from reasonrag.demo.tokens import ASSISTANT, END, PHRASES, pieces
from reasonrag.demo.world import Part, ask, famous_facts, famous_part, one_hop
from reasonrag.types import Prompt, Question

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

    tokenizer: PreTrainedTokenizerFast
    rng: Random
    habits: Habits = field(default_factory=Habits)
    drill_share: float = 0.5
    forced_answers: int = 80

    def chunk(self, *, questions: int = 60) -> list[Row]:
        """Rows from one new world: its demonstrations, forced answers, and drills (a share of all tokens)."""
        part = Part.draw(partial(names, split="train"), self.rng, sizes=_SIZES)
        famous = famous_part()
        pages = Part({**part.kinds, **famous.kinds}, {**part.facts, **famous.facts})
        texts = [text for _ in range(questions) for text in self._demonstration(part, pages)]
        texts += [self._forced_answer(part, pages) for _ in range(self.forced_answers)]
        rows = [self._row(*text) for text in texts]
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
        ids, weights = list[int](), list[float]()
        for number, name in enumerate((first, second), 1):
            self._append(ids, weights, f"[{number}] {pages.page(name).contents}\n", 0.0)
        for _ in range(6):
            name = self.rng.choice((first, second))
            hop = pages.hop(name, self.rng.choice(list(pages.facts[name])))
            self._append(ids, weights, f"{PHRASES[0]}{hop.query}</query>\n{PHRASES[1]}", 0.0)
            self._append(ids, weights, f"{hop.evidence}</evidence>", 1.0)
            self._append(ids, weights, "\n", 0.0)
        return Row(ids, weights)

    def _append(self, ids: list[int], weights: list[float], text: str, weight: float) -> None:
        new = self.tokenizer.convert_tokens_to_ids(pieces(text))
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
