"""HiPRAG's format: one `<think>` of parsable `<step>`s, then `<answer>` (arXiv:2510.07794, Alg. 1-3, App. D).

Alg. 1 opens the next step itself after every conclusion (line 16); a policy could then never close `</think>` before
its budget is used up, and no shorter trajectory would pass Alg. 2. Here the engine closes the step, and the policy opens
the next one or closes its thinking.
"""

from __future__ import annotations

from collections.abc import Sequence

from reasonrag.formats.base import Stage
from reasonrag.formats.reading import Block, Reading
from reasonrag.formats.stream import ECHOES, StreamFormat
from reasonrag.text import tags
from reasonrag.types import Action, Malformed, Note, Search, Step

_STEP_TAGS = ("reasoning", "search", "context", "conclusion")


class HiPRAGFormat(StreamFormat):
    """Steps of `<reasoning>`, perhaps `<search>` and `<context>`, and `<conclusion>`."""

    name = "hiprag"
    found = "context"
    stops = ("</search>", "</conclusion>", "</answer>")
    opening = "<think>\n<step>\n<reasoning>"
    cue = "</think>\n<answer>"

    def stage(self, steps: Sequence[Step]) -> Stage:
        """Grounding between a search and its conclusion."""
        return Stage.GROUNDING if steps and isinstance(steps[-1].action, Search) else super().stage(steps)

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """After `max_steps - 1` finished `<step>`s (the budget B of Alg. 1); a step with a search takes two actions.

        A policy that searches again and again within one step is stopped where that many steps would have ended.
        """
        finished = sum(isinstance(step.action, Note) for step in steps)
        return finished >= max_steps - 1 or len(steps) >= 2 * (max_steps - 1)

    def after(self, action: Action, documents: str) -> str:
        """The passages and an open conclusion behind a search; the step's end behind a conclusion."""
        match action:
            case Search():
                return f"\n<context>{documents}</context>\n<conclusion>"
            case Note():
                return "\n</step>\n"
        return ""

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """As the base, and a conclusion is a note; behind a search its tag is open already."""
        if not final and completion.rstrip().endswith("</conclusion>"):
            opened = completion.rfind("<conclusion>")
            if opened < 0 and not (steps and isinstance(steps[-1].action, Search)):
                return Malformed("unopened_conclusion", ends=True)
            start = opened + len("<conclusion>") if opened >= 0 else 0
            return Note(completion[start : completion.rfind("</conclusion>")].strip())
        return super().parse(completion, steps, final=final)

    def _read(self, text: str, found: Sequence[str]) -> Reading:
        reason = check(text)
        answer = next((body for tag, body in reversed(tags(text, ("answer",)))), None)
        blocks = _blocks(text, found)
        return Reading(not reason, reason, blocks, None if answer in (None, "", *ECHOES) else answer)


def check(text: str) -> str:
    """Algorithm 2, on a text whose contexts are sealed: "" where it is in form, else the reason. Linear time."""
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return "think_count"
    before, _, rest = text.partition("<think>")
    thought, closed, post = rest.partition("</think>")
    if not closed:
        return "think_order"
    if before.strip():
        return "text_before_think"
    if not post.lstrip().startswith("<answer>"):
        return "no_answer"
    if post.count("<answer>") != 1 or post.count("</answer>") != 1:
        return "answer_count"
    answer, _, trailing = post.partition("<answer>")[2].partition("</answer>")
    if not answer.strip():
        return "empty_answer"
    if trailing.strip():
        return "text_after_answer"
    return _check_steps(thought)


def _check_steps(thought: str) -> str:
    """The loop of Algorithm 2: nothing but well-formed steps, and at least one."""
    rest, steps = thought, 0
    while True:
        gap, opened, tail = rest.partition("<step>")
        if gap.strip():
            return "text_between_steps"
        if not opened:
            return "" if steps else "no_step"
        body, closed, rest = tail.partition("</step>")
        if not closed:
            return "unclosed_step"
        if reason := check_step(body):
            return reason
        steps += 1


def check_step(body: str) -> str:
    """Algorithm 3: reasoning, then search and context or neither, then conclusion, and nothing between them."""
    present = _STEP_TAGS if "<search>" in body or "<context>" in body else ("reasoning", "conclusion")
    rest = body
    for tag in present:
        if body.count(f"<{tag}>") != 1 or body.count(f"</{tag}>") != 1:
            return f"{tag}_count"
        gap, _, tail = rest.partition(f"<{tag}>")
        _, closed, rest = tail.partition(f"</{tag}>")
        if gap.strip() or not closed:
            return f"{tag}_order"
    return "text_in_step" if rest.strip() else ""


def _blocks(text: str, found: Sequence[str]) -> tuple[Block, ...]:
    """Steps as far as they can be read."""
    observed = iter(found)
    blocks = []
    for piece in text.split("<step>")[1:]:
        body = piece.partition("</step>")[0]
        parts = dict(tags(body, _STEP_TAGS))
        context = next(observed, "") if "context" in parts else ""
        blocks.append(Block(parts.get("reasoning", ""), parts.get("search"), context, parts.get("conclusion", "")))
    return tuple(blocks)
