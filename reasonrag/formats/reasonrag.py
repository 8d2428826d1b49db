"""ReasonRAG's format: reason, ground, reason, answer, each step its own chat (arXiv:2505.14069, Alg. 1, App. F)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from reasonrag.core.text import quotable
from reasonrag.core.types import (
    Action,
    Answer,
    Malformed,
    Note,
    Passage,
    Prompt,
    Question,
    Search,
    Span,
    Step,
    Trajectory,
)
from reasonrag.formats.base import Block, InstructedFormat, Reading, Stage, chat, fingerprint, last_tag

_TAGS = ("query", "evidence", "answer")
_ALLOWED = {Stage.REASONING: ("query", "answer"), Stage.GROUNDING: ("evidence",)}
# The last line of these steps as the default prompts ask for it, up to what the policy writes in its tag.
OPENINGS = {
    "evidence": "Based on the query, the relevant evidence is <evidence>",
    "answer": "So the answer is <answer>",
}
# "put it between <answer> and </answer>", echoed from an instruction, reads as the answer "and".
ECHOES = frozenset({"and", "QUERY", "ANSWER", "EVIDENCE"})


class ReasonRAGFormat(InstructedFormat):
    """Stages Reasoning, Grounding, Terminal; tags `<query>`, `<evidence>`, `<answer>`; a fresh prompt at each step.

    A prompt set with a text `system` has it as the system prompt of all stages, and
    the stage's own text as the last lines of the user turn: one prompt of a trajectory
    and the next then begin alike up to the newest thought, and an engine computes
    those tokens once. A set without it has the stage's text as the system prompt.

    With `open_tags`, the prompt of a step with one valid action (passages are read, an
    answer is demanded) opens its tag: a model that was never trained leaves it out.
    """

    name = "reasonrag"
    append_only = False
    instructions: ClassVar[tuple[str, ...]] = ("reasoning", "grounding", "answer")
    optional: ClassVar[tuple[str, ...]] = ("system",)
    asks: ClassVar[str] = "<query>"  # the tag before a query; the text before the tag is the policy's reasoning

    def __init__(self, *args: Any, open_tags: bool = False, **options: Any) -> None:
        """Read the instructions as the base class does."""
        super().__init__(*args, **options)
        self.openings = OPENINGS if open_tags else {}

    @property
    def fingerprint(self) -> str:
        closed = super().fingerprint
        return fingerprint(closed, *self.openings.values()) if self.openings else closed

    def stage(self, steps: Sequence[Step]) -> Stage:
        """Return what comes after `steps`. A step that could not be parsed leaves the stage as it was."""
        last = next((step.action for step in reversed(steps) if not isinstance(step.action, Malformed)), None)
        if isinstance(last, Answer):
            return Stage.TERMINAL
        return Stage.GROUNDING if isinstance(last, Search) else Stage.REASONING

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """Return True for the last action, and for the one before it unless passages are still to be read.

        A search is read one step later and answered from another step later: it needs two more actions.
        """
        # A search, its evidence, the answer: three actions.
        left = max_steps - len(steps)
        return left <= 1 or (left == 2 and self.stage(steps) is Stage.REASONING)

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return a system prompt, and a user turn: question, previous thoughts, documents when grounding.

        The stage's instruction is the system prompt, or the end of the user turn if all stages share one.
        """
        taken = [step for step in steps if not isinstance(step.action, Malformed)]
        thoughts = [thought(step.prompt.prefix + step.completion.text) for step in taken]
        if final:
            return self._chat("answer", question, thoughts)
        stage = self.stage(steps)
        passages = taken[-1].passages if stage is Stage.GROUNDING else None  # read in the step after the search
        return self._chat(stage.value, question, thoughts, passages, tuple(f"</{tag}>" for tag in _ALLOWED[stage]))

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse the last well-formed tag; one that the stage does not allow is `Malformed`. Never raises."""
        if completion.lstrip().startswith("<think>") and "</think>" not in completion:
            return Malformed("unclosed_think")  # a stop string ended it within the thought, which is no step
        allowed = ("answer",) if final else _ALLOWED[self.stage(steps)]
        if len(allowed) == 1:
            completion = self.openings.get(allowed[0], "") + completion
        if (last := last_tag(completion, _TAGS)) is None:
            return Malformed("unclosed_tag" if any(f"<{tag}>" in completion for tag in _TAGS) else "no_tag")
        tag, body = last
        if tag not in allowed:
            return Malformed(f"unexpected_{tag}")
        if not body or body in ECHOES:
            return Malformed(f"empty_{tag}")
        if tag == "query":
            return Search(body)
        if tag == "answer":
            return Answer(body, forced=final)
        return Note("" if body.lower().rstrip(".") == "none" else body)

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a trajectory: a search with its note is one block, and so is an answer without a search."""
        malformed = [step.action.reason for step in trajectory.steps if isinstance(step.action, Malformed)]
        reason = malformed[0] if malformed else "" if trajectory.answer is not None else "no_answer"
        blocks: list[Block] = []
        for step in trajectory.steps:
            match step.action:
                case Search(query):
                    context = "\n".join(passage.contents for passage in step.passages)
                    blocks.append(Block(step.completion.text.partition(self.asks)[0].strip(), query, context))
                case Note(evidence) if blocks and not blocks[-1].conclusion:
                    blocks[-1] = replace(blocks[-1], conclusion=evidence)
                case Answer(answer) if answer and not blocks:
                    blocks.append(Block(step.completion.text.partition("<answer>")[0].strip(), conclusion=answer))
        return Reading(not reason, reason, tuple(blocks), trajectory.answer)

    def _chat(
        self,
        stage: str,
        question: Question,
        thoughts: Sequence[str] = (),
        passages: Sequence[Passage] | None = None,
        stop: tuple[str, ...] = ("</answer>",),
    ) -> Prompt:
        """Return a chat of its own, which `read` can take apart; None shows no documents, () that none was found."""
        user = [f"Question: {quotable(question.question)}"]
        if thoughts:
            user += ["Previous Thoughts:", *thoughts]
        if passages is not None:
            shown = [line for title, text in self.quoted_passages(passages) for line in (title.rstrip(), text)]
            user += ["Documents:", *(shown or ["None found."])]
        opening = self.openings.get(stop[0].strip("</>")) if len(stop) == 1 else None
        # With a shared system prompt, prompts begin alike up to the newest thought.
        system = self.texts[stage]
        if shared := self.texts.get("system"):
            user, system = [*user, "", system], shared
        return Prompt(chat(system, "\n".join(user)), (Span(opening),) if opening else (), stop)


def thought(text: str) -> str:
    """Return an earlier step of the policy in one line, with its tags and without special tokens."""
    return quotable(text, _TAGS)


@dataclass(frozen=True, slots=True)
class View:
    """The contents of a prompt in this layout: enough for a policy without a neural network."""

    question: str
    thoughts: tuple[str, ...]
    documents: tuple[tuple[str, str], ...]  # (title, text), in the order shown
    stage: Stage
    final: bool
    stop: tuple[str, ...]


def read(prompt: Prompt) -> View:
    """Parse a prompt back into its contents, from the text alone, so that no gold answer can leak through it.

    Raises:
        ValueError: the prompt was not written by this format.
    """
    question, *lines = prompt.messages[-1].content.split("\n")
    if not question.startswith("Question: "):
        raise ValueError("not a prompt of the reasonrag format: its last message does not open with 'Question: '")
    turn = [line for line in prompt.prefix.split("\n") if line.strip()]
    if turn and prompt.prefix not in OPENINGS.values():
        lines += ["Turn:", *turn]
    # Thoughts end at the documents or at the empty line before an instruction; none of them is empty.
    thoughts = list(itertools.takewhile(lambda line: line not in ("Documents:", ""), lines))
    documents: list[tuple[str, str]] = []
    if "Documents:" in lines[len(thoughts) : len(thoughts) + 1]:
        shown = lines[len(thoughts) + 1 :]
        for title, text in zip(shown[::2], shown[1::2], strict=False):
            if not title.startswith(f"[{len(documents) + 1}]"):
                break  # "None found.", or the empty line
            documents.append((title.partition("] ")[2], text))
    return View(
        question=question.removeprefix("Question: "),
        thoughts=tuple(thoughts[1:]),  # without their label
        documents=tuple(documents),
        stage=Stage.GROUNDING if prompt.stop in (("</evidence>",), ("<|end_search_result|>",)) else Stage.REASONING,
        final=prompt.stop in (("</answer>",), ("}",)),
        stop=prompt.stop,
    )
