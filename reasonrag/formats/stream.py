"""What the formats written as one growing turn have in common.

The policy writes until a closing tag; the engine puts in what a search found, and the policy goes on in the same turn.
So each prompt extends the one before it, a trajectory is one training row, and the ids that were sampled are never
decoded and encoded again. Passages are made inert before they are put in: no text in them can be taken for a tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from reasonrag.formats.base import Stage
from reasonrag.formats.promptset import PromptSet, fingerprint
from reasonrag.formats.reading import Block, Reading
from reasonrag.text import inert, one_line
from reasonrag.types import (
    Action,
    Answer,
    Malformed,
    Message,
    Passage,
    Prompt,
    Question,
    Search,
    Span,
    Step,
    Trajectory,
)

PassageOrder = Literal["best_first", "best_last"]

# "put it between <answer> and </answer>", echoed from an instruction, reads as the answer "and".
ECHOES = frozenset({"and", "query", "answer", "..."})
# Stands for a body that the engine put in, wherever a trajectory is read: no policy can write it into its own turn,
# as it is taken out of what it wrote.
SEALED = "\ue000"


class StreamFormat:
    """One turn of think, search, find and answer. A subclass names its tags, and says how the whole is checked."""

    name: ClassVar[str]
    append_only = True
    search: ClassVar[str] = "search"  # the tag around a query
    found: ClassVar[str] = "information"  # the tag around what it found
    stops: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    opening: ClassVar[str] = ""  # put in before the policy's first word
    cue: ClassVar[str] = "<answer>"  # put in where an answer is forced
    thinks: ClassVar[str] = "think"  # the tag around a thought
    concludes: ClassVar[str] = "think"  # the tag around what is made of the passages
    # The order of the tags: thought T, search S, what it found I, conclusion R (T where that is a thought), answer A.
    grammar: ClassVar[re.Pattern[str]] = re.compile("T(SIT)*A")

    def __init__(
        self,
        prompts: PromptSet | None = None,
        *,
        passage_order: PassageOrder = "best_first",
        max_passage_chars: int = 4000,
    ) -> None:
        """Read the instruction.

        Args:
            prompts: where `NAME/instruction` comes from; the shipped `default` set if None.
            passage_order: of a search's passages; training and inference must agree.
            max_passage_chars: longer passages are cut there, with a mark.
        """
        self._instruction = (prompts or PromptSet.find()).text(f"{self.name}/instruction")
        self._passage_order = passage_order
        self._max_passage_chars = max_passage_chars

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same steps could give another prompt."""
        return fingerprint(self._instruction, self._passage_order, str(self._max_passage_chars))

    def stage(self, steps: Sequence[Step]) -> Stage:
        """Reasoning, until there is an answer."""
        return Stage.TERMINAL if any(isinstance(step.action, Answer) for step in steps) else Stage.REASONING

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """After `max_steps - 1` searches only an answer is left."""
        return len(steps) >= max_steps - 1

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Instruction, question, and the turn so far; with `final` the answer's tag is opened for the policy."""
        messages = (
            Message("system", self._instruction),
            Message("user", f"Question: {one_line(inert(question.question))}"),
        )
        turn = self.turn(steps)
        if final:
            return Prompt(messages, _joined((*turn, Span(self.cue))), ("</answer>",))
        return Prompt(messages, turn, self.stops)

    def turn(self, steps: Sequence[Step]) -> tuple[Span, ...]:
        """The policy's words as it sampled them, and what was put in between."""
        spans = [Span(self.opening)]
        for step in steps:
            if cue := self._cue_of(step):
                spans.append(Span(cue))
            spans += [
                Span(step.completion.text, step.completion.token_ids, by_policy=True),
                Span(self.after(step.action, self.documents(step.passages))),
            ]
        return _joined(spans)

    def after(self, action: Action, documents: str) -> str:
        """What is put in behind a step: the passages, for a search."""
        return f"\n<{self.found}>{documents}</{self.found}>\n" if isinstance(action, Search) else ""

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """By the tag that ends the completion: a search, or the answer. Anything else ends the trajectory."""
        if final:
            body, closing, _ = completion.partition("</answer>")
            return self._answer(body, forced=True) if closing else Malformed("unclosed_answer", ends=True)
        for tag in (self.search, "answer"):
            if completion.rstrip().endswith(f"</{tag}>"):
                opened = completion.rfind(f"<{tag}>")
                if opened < 0:
                    return Malformed(f"unopened_{tag}", ends=True)
                body = completion[opened + len(tag) + 2 : completion.rfind(f"</{tag}>")]
                return self._answer(body) if tag == "answer" else self._search(body)
        unclosed = any(f"<{tag}>" in completion for tag in (self.search, "answer"))
        return Malformed("unclosed_tag" if unclosed else "no_tag", ends=True)

    def read(self, trajectory: Trajectory) -> Reading:
        """The whole trajectory; the bodies that the engine put in are sealed, so nothing in them is structure."""
        found: list[str] = []
        pieces = [self.opening]
        for step in trajectory.steps:
            pieces += [self._cue_of(step), step.completion.text.replace(SEALED, "")]
            if isinstance(step.action, Search):
                found.append(self.documents(step.passages))
            pieces.append(self.after(step.action, SEALED))
        return self._read("".join(pieces), found)

    def read_text(self, text: str) -> Reading:
        """A trajectory of unknown origin: what stands between an observation's tags is taken for one and sealed."""
        found: list[str] = []
        pieces: list[str] = []
        opening, closing = f"<{self.found}>", f"</{self.found}>"
        rest = text.replace(SEALED, "")
        while True:
            head, opened, tail = rest.partition(opening)
            body, closed, after = tail.partition(closing)
            if not opened or not closed:
                return self._read("".join([*pieces, rest]), found)
            found.append(body.strip())
            pieces += [head, opening, SEALED, closing]
            rest = after

    def documents(self, passages: Sequence[Passage]) -> str:
        """Passages as they are shown, best first or last."""
        if not passages:
            return "None found."
        shown = passages if self._passage_order == "best_first" else tuple(reversed(passages))
        return "\n".join(f"[{n}] {self._quote(p.title)}\n{self._quote(p.text)}" for n, p in enumerate(shown, 1))

    def _read(self, text: str, found: Sequence[str]) -> Reading:
        """Blocks, answer and form of a text whose observations are sealed; `found` are their bodies, in order."""
        letters = {self.thinks: "T", self.concludes: "R", self.search: "S", self.found: "I", "answer": "A"}
        if self.thinks == self.concludes:
            letters[self.thinks] = "T"
        pieces, reason = elements(text, tuple(letters))
        answers = [body for tag, body in pieces if tag == "answer"]
        answer = answers[-1] if answers and answers[-1] not in ("", *ECHOES) else None
        if not reason and any(tag == self.found and body != SEALED for tag, body in pieces):
            reason = "written_observation"
        if not reason and not answers:
            reason = "no_answer"
        if not reason and not self.grammar.fullmatch("".join(letters[tag] for tag, _ in pieces)):
            reason = "order"
        if not reason and answer is None:
            reason = "empty_answer"
        if not reason and any(tag == self.search and not body for tag, body in pieces):
            reason = f"empty_{self.search}"
        return Reading(not reason, reason, self._blocks(pieces, found, answer), answer)

    def _blocks(self, pieces: Sequence[tuple[str, str]], found: Sequence[str], answer: str | None) -> tuple[Block, ...]:
        """A search with the thought before it, what it found and what was concluded; or one block without a search."""
        blocks: list[Block] = []
        observed = iter(found)
        thought = ""
        for tag, body in pieces:
            last = blocks[-1] if blocks else None
            if tag == self.search:
                blocks.append(Block(thought, body))
                thought = ""
            elif tag == self.found and body == SEALED:
                context = next(observed, "")
                if last is not None and not last.context:
                    blocks[-1] = replace(last, context=context)
            elif tag == self.concludes and last is not None and last.is_search and not last.conclusion:
                blocks[-1] = replace(last, conclusion=body)
                thought = body if tag == self.thinks else ""
            elif tag == self.concludes != self.thinks:
                blocks.append(Block(thought, conclusion=body))
            elif tag == self.thinks:
                thought = body
        if not blocks and (thought or answer):
            blocks.append(Block(thought, conclusion=answer or ""))
        return tuple(blocks)

    def _cue_of(self, step: Step) -> str:
        """What had been put in before a step that was asked for its answer."""
        return self.cue if step.prompt.stop == ("</answer>",) else ""

    def _answer(self, body: str, *, forced: bool = False) -> Action:
        body = body.strip()
        return Malformed("empty_answer", ends=True) if not body or body in ECHOES else Answer(body, forced)

    def _search(self, body: str) -> Action:
        body = one_line(body)
        return Malformed(f"empty_{self.search}", ends=True) if not body or body in ECHOES else Search(body)

    def _quote(self, text: str) -> str:
        quoted = one_line(inert(text)).replace(SEALED, "")
        return quoted if len(quoted) <= self._max_passage_chars else quoted[: self._max_passage_chars] + " [cut]"


def elements(text: str, names: Sequence[str]) -> tuple[list[tuple[str, str]], str]:
    """Every well-formed element `<name>body</name>` in order, and "" or the reason why they are not all there is.

    Between elements only blanks may stand, and no element is in another. Linear time.

    >>> elements("<think>a</think> <answer>b</answer>", ["think", "answer"])
    ([('think', 'a'), ('answer', 'b')], '')
    >>> elements("so <answer>b</answer>", ["think", "answer"])
    ([('answer', 'b')], 'stray_text')
    """
    found: list[tuple[str, str]] = []
    reason = ""
    end = 0
    opened: re.Match[str] | None = None
    for mark in re.finditer(rf"<(/?)({'|'.join(map(re.escape, names))})>", text):
        if not mark[1]:
            reason = reason or (
                f"unclosed_{opened[2]}" if opened else "stray_text" * bool(text[end : mark.start()].strip())
            )
            opened = mark
        elif opened is not None and opened[2] == mark[2]:
            found.append((mark[2], text[opened.end() : mark.start()].strip()))
            opened, end = None, mark.end()
        else:
            reason = reason or f"unopened_{mark[2]}"
            opened, end = None, mark.end()
    if opened is not None:
        reason = reason or f"unclosed_{opened[2]}"
    elif text[end:].strip():
        reason = reason or "stray_text"
    return found, reason


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without empty spans, and neighbours that were put in as one: they are encoded together."""
    joined: list[Span] = []
    for span in spans:
        if not span.text and not span.token_ids:
            continue
        if joined and not joined[-1].by_policy and not span.by_policy:
            joined[-1] = Span(joined[-1].text + span.text)
        else:
            joined.append(span)
    return tuple(joined)
