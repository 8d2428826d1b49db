"""HiPRAG's format: one `<think>` of parsable `<step>`s, then `<answer>` (arXiv:2510.07794, Alg. 1-3, App. D).

The rollout is Alg. 1 but for line 16, which opens the next `<step><reasoning>` after every conclusion as
long as the budget lasts. A policy that is done would always stand inside an open step. If it answers
there, Alg. 1 writes the `</think>` after the answer (lines 5, 6 and 20), and Alg. 2 finds no answer after
the thinking (line 7). If it closes its thinking first, there are two `</think>` (line 2) and a step that
is never closed (line 22). To the letter only a trajectory that uses up its whole budget can be
well-formed, and needless steps are the price of an answer: the very thing that the reward is against. So
the engine closes a step, as in line 13, and the policy opens the next one, or closes its thinking and
answers, as App. D asks it to. The first step is opened for it (line 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from reasonrag.core.types import Action, Note, Search, Step
from reasonrag.formats.base import SEALED, Block, Reading, Stage, tags
from reasonrag.formats.stream import StreamFormat

_STEP_TAGS = ("reasoning", "search", "context", "conclusion")
# A step ends at the next closing tag, whatever is in between; the last one may be unclosed.
_STEP = re.compile(r"<step>(?P<body>.*?)(?P<closing></step>|\Z)", re.DOTALL)
# Well-formed reasoning holds none of the others; if it is never closed it ends there.
_END_OF_REASONING = re.compile("</reasoning>|<search>|<context>|<conclusion>")


class HiPRAGFormat(StreamFormat):
    """Steps of `<reasoning>`, perhaps `<search>` and `<context>`, and `<conclusion>`.

    Well-formed is what Alg. 2 and 3 accept (`check`) once the bodies of `<context>` are
    sealed, with two exceptions: a `<context>` that the policy wrote itself
    (`written_observation`), and an answer that only echoes an instruction (`empty_answer`).
    """

    name = "hiprag"
    found = "context"
    notes = ("conclusion",)
    stops = ("</search>", "</conclusion>", "</answer>")
    opening = "<think>\n<step>\n<reasoning>"
    cue = "</think>\n<answer>"

    def stage(self, steps: Sequence[Step]) -> Stage:
        return Stage.GROUNDING if steps and isinstance(steps[-1].action, Search) else super().stage(steps)

    def must_answer(self, steps: Sequence[Step], max_steps: int) -> bool:
        """Return True after `max_steps - 1` finished `<step>`s: the budget B of Alg. 1 counts conclusions (line 14).

        A step with a search takes two actions, so B steps take at most 2 B. Alg.
        1 lets a policy search within one step without end (line 11); here it is
        stopped after as many actions as B steps with a search would have taken.
        """
        finished = sum(isinstance(step.action, Note) for step in steps)
        return finished >= max_steps - 1 or len(steps) >= 2 * (max_steps - 1)

    def after(self, action: Action, documents: str) -> str:
        """Return passages and an open conclusion after a search (line 10), the step's end after that (line 13)."""
        if isinstance(action, Search):
            return f"\n<context>{documents}</context>\n<conclusion>"
        return "\n</step>\n" if isinstance(action, Note) else ""

    def parse(self, completion: str, steps: tuple[Step, ...], *, final: bool = False) -> Action:
        """Parse as the base class does; after a search the tag of its conclusion is already open."""
        is_open = not final and self.stage(steps) is Stage.GROUNDING
        return super().parse(f"<conclusion>{completion}" if is_open else completion, steps, final=final)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("think", "step", *_STEP_TAGS, "answer")

    def _read(self, text: str, observations: Sequence[str], answer: str | None) -> Reading:
        opened, closed = max(text.find("<think>"), 0), text.rfind("</think>")
        thought = text[opened : closed if closed >= 0 else len(text)]
        # An answer may speak of a `<context>`; in the thinking only the engine may write one.
        written = thought.count("<context>") != thought.count("<context>" + SEALED)
        reason = "written_observation" if written else check(text)
        if not reason and answer is None:
            reason = "empty_answer"
        return Reading(not reason, reason, _blocks(thought, observations), answer)


def check(text: str) -> str:
    """Check a text whose contexts are sealed by Algorithm 2: "" if F(T) = 1, else the flaw. Linear time.

    N(T) is the number of `<step>`s. White space is Unicode's, so line 1 has nothing to do.

    >>> check("<think><step><reasoning>r</reasoning><conclusion>c</conclusion></step></think><answer>a</answer>")
    ''
    """
    if text.count("<think>") != 1 or text.count("</think>") != 1:  # line 2
        return "think_count"
    before, _, rest = text.partition("<think>")
    thought, end_of_thought, post = rest.partition("</think>")
    if not end_of_thought:  # line 3
        return "think_order"
    if before.strip():  # line 4
        return "text_before_think"
    if not post.lstrip().startswith("<answer>"):  # line 7
        return "no_answer"
    if post.count("<answer>") != 1 or post.count("</answer>") != 1:  # line 8
        return "answer_count"
    answer, _, trailing = post.partition("<answer>")[2].partition("</answer>")
    if not answer.strip():  # line 10
        return "empty_answer"
    if trailing.strip():  # line 11
        return "text_after_answer"
    # Lines 13 to 27: at least one step, each as in Algorithm 3, and nothing else.
    position = 0
    for step in _STEP.finditer(thought):
        if thought[position : step.start()].strip():  # line 20
            return "text_between_steps"
        if not step["closing"]:  # line 22
            return "unclosed_step"
        if reason := check_step(step["body"]):  # line 24
            return reason
        position = step.end()
    if thought[position:].strip():  # line 17
        return "text_between_steps"
    return "" if position else "no_step"  # line 27


def check_step(body: str) -> str:
    """Check one step by Algorithm 3, VALIDATESTEP: reasoning, perhaps search and context, conclusion, nothing between.

    A body may be empty, and may mention a closing tag
    that its schema lacks: the algorithm counts neither.

    >>> check_step("<reasoning>r</reasoning><search>q</search><conclusion>c</conclusion>")
    'context_count'
    """
    # Line 10.
    present = _STEP_TAGS if "<search>" in body or "<context>" in body else ("reasoning", "conclusion")
    for tag in present:  # lines 2, 5, 11 and 12
        if body.count(f"<{tag}>") != 1 or body.count(f"</{tag}>") != 1:
            return f"{tag}_count"
    position, outside = 0, ""
    # Each tag occurs once, so one look from left to right sees their order and the text outside of them.
    for tag in present:
        opened, closed = body.find(f"<{tag}>"), body.find(f"</{tag}>")
        if not position <= opened < closed:  # lines 3, 6, 7, 13, 14 and 15
            return "step_order"
        outside += body[position:opened]
        position = closed + len(f"</{tag}>")
    return "text_in_step" if (outside + body[position:]).strip() else ""  # lines 4, 8, 16 and 21


def _blocks(thought: str, observations: Sequence[str]) -> tuple[Block, ...]:
    """Parse the steps as far as possible; one that searches several times, against Alg. 3, gives several blocks."""
    contexts = iter(observations)
    blocks: list[Block] = []
    for step in _STEP.finditer(thought):
        body = step["body"]
        reasoning = _END_OF_REASONING.split(body.partition("<reasoning>")[2], maxsplit=1)[0].strip()
        _, concludes, rest = body.rpartition("<conclusion>")
        conclusion = rest.partition("</conclusion>")[0].replace(SEALED, "").strip() if concludes else ""
        # As many observations as there are seals in the step: its last query may have several, or none.
        of_step = islice(contexts, body.count("<context>" + SEALED))
        queries = [query for _, query in tags(body, ("search",))] if "<search>" in body else []
        for query in queries[:-1]:
            blocks.append(Block(reasoning, query, next(of_step, "")))
            reasoning = ""
        blocks.append(Block(reasoning, queries[-1] if queries else None, "\n".join(of_step), conclusion))
    return tuple(blocks)
