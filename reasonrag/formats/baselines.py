"""The papers' rivals that need no training: a prompt or a few, and searches that no policy asked for.

Each names its own paper. Where that leaves something open, FlashRAG's reproduction counts (arXiv:2405.13576), with
which ReasonRAG measured its Table 2 (App. E.2). Prompts have the layout of `reasonrag`, which `reasonrag.read` reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from reasonrag.core.text import one_line
from reasonrag.core.types import Action, Answer, Malformed, Note, Passage, Prompt, Question, Search, Step
from reasonrag.formats.base import Block, Reading
from reasonrag.formats.reasonrag import ECHOES, ReasonRAGFormat
from reasonrag.formats.tags import last_tag

_ANSWER = re.compile(r"\banswer is: *(\S.*)")  # of IRCoT, FLARE and Self-Ask; the others have a tag


class DirectFormat(ReasonRAGFormat):
    """The answer at once, from what the policy knows: Naive Generation, Direct Inference, Zero-shot. No search."""

    name = "direct"
    room = "baselines"
    instructions = ("direct",)
    optional = ()

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        return False  # the number of steps is fixed, and the last one answers

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return the instruction, the question, and the passages of the latest search if there was one."""
        return self._chat(self.instructions[0], question, passages=_found(steps))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        answer = _answer(completion)
        return Answer(answer, forced=final) if answer else Malformed("no_answer", ends=True)

    def read_text(self, text: str) -> Reading:
        answer = _answer(text) or None
        return Reading(answer is not None, "" if answer else "no_answer", (Block(conclusion=answer or ""),), answer)


class CoTFormat(DirectFormat):
    """Reasoning, then the answer, without a search (zero-shot chain of thought, arXiv:2205.11916)."""

    name = "cot"
    instructions = ("cot",)


class RAGFormat(DirectFormat):
    """One search for the question itself, then the answer: Standard RAG, Naive (arXiv:2005.11401). RC is 1."""

    name = "rag"
    instructions = ("rag",)

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        return None if steps else Search(one_line(question.question))


class IterRetGenFormat(RAGFormat):
    """Iter-RetGen: three times RAG; the next query is the question and the last answer (arXiv:2305.15294). RC is 3."""

    name = "iter_retgen"
    rounds: ClassVar[int] = 3

    def own_step(self, question: Question, steps: Sequence[Step]) -> Action | None:
        if steps and isinstance(said := steps[-1].action, Note):
            return Search(one_line(f"{question.question} {said.evidence}"))
        return super().own_step(question, steps)

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Return a note before the last round: the answer, or all that was said instead, as the paper appends it."""
        if sum(isinstance(step.action, Search) for step in steps) < self.rounds:
            return Note(_answer(completion) or one_line(completion))
        return super().parse(completion, steps, final=final)


def _found(steps: Sequence[Step]) -> tuple[Passage, ...] | None:
    """Return the passages of the latest search; None if there was none."""
    return next((step.passages for step in reversed(steps) if isinstance(step.action, Search)), None)


def _answer(text: str) -> str:
    """Return what a text answers, in the tag or behind "answer is:"; "" if it answers nothing.

    >>> _answer("So the answer is <answer>Dr. No</answer>"), _answer("So the answer is: Dr. No.")
    ('Dr. No', 'Dr. No')
    """
    tag = last_tag(text, ("answer",))
    said = _ANSWER.findall(text)
    body = tag[1] if tag else said[-1].strip().removesuffix(".") if said else ""
    return "" if body in ECHOES else body


BASELINES: dict[str, type[ReasonRAGFormat]] = {
    format.name: format for format in (DirectFormat, CoTFormat, RAGFormat, IterRetGenFormat)
}
