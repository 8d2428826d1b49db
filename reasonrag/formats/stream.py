"""`StreamFormat`, the base class of the formats that write a trajectory as one growing turn, and the shorter of them.

The policy writes until a closing tag, the engine inserts the passages of a search, and the policy
continues in the same turn. Each prompt extends the one before it, so a trajectory is one training row and
sampled token ids are never decoded and encoded again. Passages are made inert before they are inserted:
no text in them can be parsed as a tag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from reasonrag.core.text import one_line, quotable
from reasonrag.core.types import Action, Answer, Malformed, Note, Prompt, Question, Search, Span, Step, Trajectory
from reasonrag.formats.base import SEALED, Block, InstructedFormat, Reading, chat, elements, seal, tags, without_seals

# Placeholder texts of the instructions. A policy that repeats one has neither asked nor answered.
ECHOES = frozenset({"and", "query", "answer", "the answer", "a precise query", "..."})
# Searches with their observations, and the answer: the order without thoughts and conclusions.
_WITHOUT_THOUGHTS = re.compile("(SI)*A")


class StreamFormat(InstructedFormat):
    """One turn of think, search, observe and answer. A subclass names its tags and their order.

    A turn is well-formed if there is only white space between its elements, none is nested, the
    policy wrote no observation itself, no query and no answer is empty, and the tags are in the
    order of `grammar`. If several things are wrong, `reason` is the gravest:
    `written_observation`, `unclosed_TAG` or `unopened_TAG`, `no_answer`, `order`,
    `thought_order` (searches, observations and answer are in order, thoughts are missing or too
    many), `stray_text`, `empty_TAG`. A turn with only one of the last three is still usable.

    A checkpoint that was trained with marks instead of tags overrides `in_tags`: what it writes is
    rewritten into tags before it is parsed, and only then (`papers.dialects`).
    """

    append_only = True
    instructions = ("instruction",)
    search: ClassVar[str] = "search"  # the tag around a query
    found: ClassVar[str] = "information"  # the tag around the passages, the observation
    notes: ClassVar[tuple[str, ...]] = ()  # tags around a text that ends an action and is neither search nor answer
    stops: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    opening: ClassVar[str] = ""  # inserted before the policy's first word
    cue: ClassVar[str] = "<answer>"  # inserted to force an answer
    thinks: ClassVar[str] = "think"  # the tag around a thought
    concludes: ClassVar[str] = "think"  # the tag around the conclusion from the passages
    plans: ClassVar[bool] = False  # whether the first thought is a plan
    final_stops: ClassVar[tuple[str, ...]] = ("</answer>",)  # where the answer is forced
    # The order of the tags: thought T, search S, observation
    # I, conclusion R (T if that is a thought), answer A.
    grammar: ClassVar[re.Pattern[str]] = re.compile("T(SIT)*A")

    def prompt(self, question: Question, steps: tuple[Step, ...], *, final: bool = False) -> Prompt:
        """Return instruction, question and the turn so far; with `final` the answer's tag is opened for the policy."""
        messages = chat(self.texts["instruction"], f"Question: {quotable(question.question)}")
        turn = self.turn(steps)
        if final:
            return Prompt(messages, _joined((*turn, Span(self.cue))), self.final_stops)
        return Prompt(messages, turn, self.stops)

    def turn(self, steps: Sequence[Step]) -> tuple[Span, ...]:
        """Return the policy's words as it sampled them, and the texts inserted between them."""
        spans = [Span(self.opening)]
        for step in steps:
            spans.append(Span(self._cue_of(step)))
            spans.append(Span(step.completion.text, step.completion.token_ids, by_policy=True))
            spans.append(Span(self.after(step.action, self.documents(step.passages))))
        return _joined(spans)

    @property
    def query_mark(self) -> str:
        """The text that begins a query."""
        return f"<{self.search}>"

    def after(self, action: Action, documents: str) -> str:
        """Return the text inserted after a step: the passages of a search."""
        return f"\n<{self.found}>{documents}</{self.found}>\n" if isinstance(action, Search) else ""

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse the tag that ends the completion: search, note or answer. Anything else ends the trajectory."""
        completion = self.in_tags(self.cue + completion if final else completion)
        if final:
            body, closing, _ = completion.partition("</answer>")
            # The cue has opened the tag; a policy that opens it again means the same.
            _, opening, body = body.rpartition("<answer>")
            is_closed = opening and closing
            return self._action("answer", body, forced=True) if is_closed else Malformed("unclosed_answer", ends=True)
        # The last tag decides: whatever the policy wrote before it is its thought.
        for tag in (self.search, *self.notes, "answer"):
            if completion.rstrip().endswith(f"</{tag}>"):
                if (opened := completion.rfind(f"<{tag}>")) < 0:
                    return Malformed(f"unopened_{tag}", ends=True)
                body = completion[opened + len(tag) + 2 : completion.rfind(f"</{tag}>")]
                return Note(body.strip()) if tag in self.notes else self._action(tag, body)
        is_open = f"<{self.search}>" in completion or "<answer>" in completion
        return Malformed("unclosed_tag" if is_open else "no_tag", ends=True)

    def read(self, trajectory: Trajectory) -> Reading:
        """Parse a whole trajectory. Observations are sealed, so that no text in them is parsed as a tag."""
        observations: list[str] = []
        turn = [self.opening]
        # The turn as it was, but for seals in the place of the passages: `_read` gets these apart.
        for step in trajectory.steps:
            turn += [self._cue_of(step), without_seals(step.completion.text)]
            if isinstance(step.action, Search):
                observations.append(self.documents(step.passages))
            turn.append(self.after(step.action, SEALED))
        return self._read(self.in_tags("".join(turn)), observations, trajectory.answer)

    def read_text(self, text: str) -> Reading:
        """Parse a trajectory of unknown origin: an observation is the text in its tag after a search (`tags.seal`).

        The answer is the last one that does not repeat an instruction, well-formed or not.
        """
        sealed, observations = seal(self.in_tags(text), self._names, search=self.search, found=self.found)
        answers = [body for _, body in tags(sealed, ("answer",)) if body not in ECHOES]
        answer = answers[-1].replace(SEALED, "") if answers else ""
        return self._read(sealed, observations, answer or None)

    def observed(self, text: str) -> list[tuple[str, str]]:
        """Return the text of the policy before each observation with the observation, then the rest of the text."""
        sealed, observations = seal(self.in_tags(text), self._names, search=self.search, found=self.found)
        written = re.split(f"<{self.found}>{SEALED}(?:</{self.found}>)?", sealed)
        return list(zip(written, [*observations, ""], strict=True))

    def in_tags(self, text: str) -> str:
        """Return the text with a checkpoint's own marks rewritten into tags; a format of tags has none."""
        return text

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.thinks, self.search, self.found, self.concludes, "answer")))

    def _read(self, text: str, observations: Sequence[str], answer: str | None) -> Reading:
        """Parse a text whose observations are sealed, given their bodies in order."""
        pieces, broken, stray = elements(text, self._names)
        # Only the engine's observations have a seal.
        opening, closing = f"<{self.found}>", f"</{self.found}>"
        if text.count(opening) != text.count(opening + SEALED) or text.count(closing) != text.count(SEALED + closing):
            broken = "written_observation"
        reason = broken or self._flaw(pieces, stray, answer)
        plan = next((body for tag, body in pieces if tag == self.thinks), "") if self.plans else ""
        return Reading(not reason, reason, self._blocks(pieces, observations, answer), answer, plan)

    def _flaw(self, pieces: Sequence[tuple[str, str]], stray: bool, answer: str | None) -> str:
        """Return the gravest fault of a text with all tags closed; "" if it is well-formed."""
        # The order of the tags as a word of letters, which the grammar matches.
        letters = {self.concludes: "R", self.thinks: "T", self.search: "S", self.found: "I", "answer": "A"}
        order = "".join(letters[tag] for tag, _ in pieces)
        if "A" not in order:
            return "no_answer"
        if not self.grammar.fullmatch(order):
            return "thought_order" if _WITHOUT_THOUGHTS.fullmatch(re.sub("[TR]", "", order)) else "order"
        if stray:
            return "stray_text"
        if answer is None:
            return "empty_answer"
        is_empty = any(tag == self.search and body in ("", *ECHOES) for tag, body in pieces)
        return f"empty_{self.search}" if is_empty else ""

    def _blocks(
        self, pieces: Sequence[tuple[str, str]], observations: Sequence[str], answer: str | None
    ) -> tuple[Block, ...]:
        """Return a block for each search, with the thought before it and its conclusion; else one without a search."""
        blocks: list[Block] = []
        contexts = iter(observations)
        thought = ""
        for tag, body in pieces:
            if tag == self.search:
                blocks.append(Block(thought, body))
                thought = ""
            elif tag == self.found and body == SEALED:
                _add_context(blocks, next(contexts, ""))
            elif tag == self.concludes and blocks and blocks[-1].is_search and not blocks[-1].conclusion:
                # Where one tag serves both, what concludes a
                # search is also the thought before the next one.
                blocks[-1] = replace(blocks[-1], conclusion=body)
                thought = body if tag == self.thinks else ""
            elif tag == self.concludes != self.thinks:
                blocks.append(Block(thought, conclusion=body))
                thought = ""
            elif tag == self.thinks:
                thought = body
        if not blocks and (thought or answer):
            blocks.append(Block(thought, conclusion=answer or ""))
        # An observation that was cut off is not in `pieces`.
        for context in contexts:
            _add_context(blocks, context)
        return tuple(blocks)

    def _cue_of(self, step: Step) -> str:
        """Return the text that was inserted before a step that had to answer."""
        return self.cue if step.prompt.stop == self.final_stops else ""

    def _action(self, tag: str, body: str, *, forced: bool = False) -> Action:
        body = body.strip() if tag == "answer" else one_line(body)
        if not body or body in ECHOES:
            return Malformed(f"empty_{tag}", ends=True)
        return Answer(body, forced) if tag == "answer" else Search(body)

    def _quote(self, text: str) -> str:
        # Seals go first: removed afterwards, they would join the texts around them into tags.
        return super()._quote(without_seals(text))


def _add_context(blocks: list[Block], context: str) -> None:
    if blocks:
        blocks[-1] = replace(blocks[-1], context="\n".join(filter(None, (blocks[-1].context, context))))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Drop empty spans and join inserted neighbours, which are encoded together."""
    joined: list[Span] = []
    for span in spans:
        if not span.text and not span.token_ids:
            continue
        if joined and not joined[-1].by_policy and not span.by_policy:
            joined[-1] = Span(joined[-1].text + span.text)
        else:
            joined.append(span)
    return tuple(joined)


class SearchR1Format(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<answer>`: Search-R1's (arXiv:2503.09516), the outcome baseline.

    Well-formed: `think (search information think)* answer`. The paper's template (Table 1) asks for
    reasoning "first every time you get new information", so a thought comes first and one follows each
    search's passages. Published trajectories of policies that were trained without a format reward often
    leave a thought out (`thought_order`) or open with a sentence of their own (`stray_text`): they are
    not well-formed, their searches and answers are read all the same.
    """

    name = "search_r1"


class SearchP1Format(StreamFormat):
    """`<reasoning>` with an explicit plan, then `<tool_call>`, `<tool_response>`, and `<answer>`.

    Well-formed: `reasoning (tool_call tool_response reasoning?)* answer`. The first reasoning is the
    plan, which Alg. 2 opens itself (line 1) and App. D.1 demands ("In the first turn, you MUST break the
    question down"); it also asks for one call a turn, and for a check of each result, which Fig. 10 shows
    may be left out before the next call. That a trajectory without a call earns nothing (Alg. 3, lines 2
    to 7) is the reward's business, not the format's.

    The budget B of Alg. 2 counts calls: it is `max_steps - 1`, so the paper's B = 4 is `max_steps` 5.
    """

    name = "search_p1"
    search = "tool_call"
    found = "tool_response"
    thinks = "reasoning"
    concludes = "reasoning"
    stops = ("</tool_call>", "</answer>")
    opening = "<reasoning>"
    plans = True
    grammar = re.compile("T(SIT?)*A")


class WhenToSearchFormat(StreamFormat):
    """`<think>`, `<search>`, `<information>`, `<reflect>`, `<answer>`.

    Well-formed is one of the two structures of sec. 3.3: without a search
    `think reflect answer` (App. B.4, points 1 and 2); else "multiple iterations of think,
    search, information, reflect", then the answer. Only the first iteration has to think:
    point 5 lets a policy search again right after it has reflected, as it does in Table 9.
    So `think (reflect | search information reflect (think? search information reflect)*)
    answer`; between the last reflection and the answer nothing may stand (point 4).
    """

    name = "when_to_search"
    concludes = "reflect"
    grammar = re.compile("T(R|SIR(T?SIR)*)A")
