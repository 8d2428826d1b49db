"""Write an attempt in the formats of one growing turn, piece by piece.

The opening, the passages and the cue of a forced answer come from the format itself, as in the engine's loop; this
module writes only the words between them. They are few, because every word costs time in training with rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reasonrag.core.types import Answer, Completion, Message, Prompt, Search, Step, StopReason, Trajectory
from reasonrag.demo.judge import demo_format
from reasonrag.formats import PromptSet
from tools.demo_policy.demonstrations import Attempt, Finding, Improviser

# As in the policy's `reasonrag.yaml`: the limit of steps that it is trained with, and enough tokens for any step.
STREAM_STEPS = 6
STREAM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Pieces:
    """The policy's texts: one per step, with the finding whose search ends it, and the text before the answer."""

    steps: Sequence[tuple[str, Finding | None]]
    last: str


def demonstrate(improviser: Improviser, name: str, *, max_steps: int = STREAM_STEPS) -> Trajectory:
    """Write one attempt at the improviser's question in the format of that name."""
    format = demo_format(name)
    attempt = improviser.attempt(budget=max_steps - 1, own_count=name == "hiprag")
    pieces = _WRITERS[name](attempt)
    steps = tuple[Step, ...]()
    for text, finding in pieces.steps:
        if format.must_answer(steps, max_steps):
            break
        action = format.parse(text, steps)
        passages = (finding.page,) if finding and finding.page and isinstance(action, Search) else ()
        steps = (*steps, Step(format.prompt(improviser.question, steps), Completion(text), action, passages))
    final = format.must_answer(steps, max_steps)
    text = f"{'' if final else f'{pieces.last}<answer>'}{attempt.answer}</answer>"
    action = format.parse(text, steps, final=final)
    assert isinstance(action, Answer), f"{name}: a demonstration ends with {text!r}, which is no answer"
    last = Step(format.prompt(improviser.question, steps, final=final), Completion(text), action)
    stop = StopReason.FORCED_ANSWER if final else StopReason.ANSWERED
    return Trajectory(improviser.question, (*steps, last), stop)


def direct_prompt(query: str) -> Prompt:
    """Return a prompt to answer a query from memory, by which HiPRAG decides that a search was needless."""
    return Prompt((Message("system", PromptSet.find("brief").text("hiprag/direct")), Message("user", query)))


def _search_r1(attempt: Attempt) -> Pieces:
    """Write the note on a page as the next thought."""
    return _thinking(attempt, "<think>", "</think><search>", "</search>", [])


def _search_p1(attempt: Attempt) -> Pieces:
    """Write the plan into the first reasoning, which the prompt has opened."""
    plan = " ".join(f"{number}. {search}" for number, search in enumerate(attempt.plan, 1))
    return _thinking(attempt, "<reasoning>", "</reasoning><tool_call>", "</tool_call>", [plan])


def _thinking(attempt: Attempt, opening: str, search: str, closing: str, thought: list[str]) -> Pieces:
    planned = bool(thought)
    steps = list[tuple[str, Finding | None]]()
    for finding in attempt.findings:
        if finding.page is None:
            thought = [*thought, finding.evidence]
        else:
            head = "" if planned and not steps else opening
            steps.append((f"{head}{_said(thought) or _need(finding)}{search}{finding.query}{closing}", finding))
            thought = [finding.evidence or "None"]
    head = "" if planned and not steps else opening
    return Pieces(steps, f"{head}{_said(thought) or f'know {attempt.key}'}{opening.replace('<', '</')}")


def _when_to_search(attempt: Attempt) -> Pieces:
    """Write the note on a page as the reflection that follows it, with anything from memory."""
    steps, thought = list[tuple[str, Finding | None]](), list[str]()
    for finding in attempt.findings:
        if finding.page is None:
            thought.append(finding.evidence)
            continue
        tag = "reflect" if steps else "think"
        said = f"<{tag}>{_said(thought) or _need(finding)}</{tag}>"
        steps.append((f"{said}<search>{finding.query}</search>", finding))
        thought = [finding.evidence or "None"]
    first = "" if steps else f"<think>know {attempt.key}</think>"
    return Pieces(steps, f"{first}<reflect>{_said(thought) or attempt.answer}</reflect>")


def _hiprag(attempt: Attempt) -> Pieces:
    """Write every finding as a step; an answer without findings is a step as well."""
    steps = list[tuple[str, Finding | None]]()
    for finding in attempt.findings or (Finding(attempt.key, attempt.answer),):
        opening = "<step><reasoning>" if steps else ""
        concluded = f"{finding.evidence or 'None'}</conclusion>"
        if finding.page is None:
            steps.append((f"{opening}know {finding.key}</reasoning><conclusion>{concluded}", None))
        else:
            steps.append((f"{opening}{_need(finding)}</reasoning><search>{finding.query}</search>", finding))
            steps.append((concluded, None))
    return Pieces(steps, "</think>")


def _need(finding: Finding) -> str:
    return f"need {finding.key}"


def _said(thought: Sequence[str]) -> str:
    return "; ".join(thought)


_WRITERS: dict[str, Callable[[Attempt], Pieces]] = {
    "search_r1": _search_r1,
    "hiprag": _hiprag,
    "search_p1": _search_p1,
    "when_to_search": _when_to_search,
}

STREAM_FORMATS = tuple(_WRITERS)
