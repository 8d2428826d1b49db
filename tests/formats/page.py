"""`docs/formats.md`, written from its texts and the golden trajectories: `python -m tests.formats.page`.

Each trajectory is run by the real engine with the policy's words replayed, so the page shows what really happens.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

from reasonrag.core.types import Passage, Prompt, Question, Search, Trajectory
from reasonrag.formats import FORMATS, Format
from reasonrag.formats.base import Block
from reasonrag.formats.stream import StreamFormat
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats.md"
TEXTS = Path(__file__).with_suffix(".md.j2")
GOLDEN = ROOT / "tests" / "golden" / "formats" / "trajectories"

Turn = list[list[str]]  # [who, text]

_ABOUT = {
    "reasonrag": (
        "ReasonRAG",
        "arXiv:2505.14069, Alg. 1, App. F",
        "(query evidence)* answer, one tag a step; text around the tags is free",
        "`max_steps` actions; query, evidence and answer count one each",
    ),
    "search_r1": (
        "Search-R1",
        "arXiv:2503.09516",
        "think (search information think)* answer",
        "`max_steps` - 1 searches",
    ),
    "hiprag": (
        "HiPRAG",
        "arXiv:2510.07794, Alg. 1 to 3, App. D",
        "think[ step[reasoning (search context)? conclusion]+ ] answer",
        "B = `max_steps` - 1 steps",
    ),
    "search_p1": (
        "Search-P1",
        "Alg. 2, App. D.1",
        "reasoning (tool_call tool_response reasoning?)* answer; the first reasoning is the plan",
        "B = `max_steps` - 1 calls, 4 in the paper",
    ),
    "when_to_search": (
        "When to search",
        "sec. 3.2 and 3.3, App. B.4",
        "think (reflect or search information reflect (think? search information reflect)*) answer",
        "`max_steps` - 1 searches, 5 turns in the paper",
    ),
    "tool_calls": (
        "Native tool calls",
        "as Qwen and Llama write them",
        "call* answer, one message each; words before a call are free",
        "`max_steps` - 1 calls",
    ),
}


def load(name: str) -> dict[str, Any]:
    """The golden trajectory of a format: what goes in, and what is `expected`."""
    golden: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return golden


class _Passages:
    """Passages by query."""

    fingerprint = "golden"

    def __init__(self, passages: dict[str, list[str]]) -> None:
        self._passages = passages

    async def search(self, queries: list[str], top_k: int) -> list[tuple[Passage, ...]]:
        return [tuple(Passage(text, text) for text in self._passages[query]) for query in queries]

    async def aclose(self) -> None:
        pass


def play(golden: dict[str, Any], format: Format | None = None) -> tuple[Format, Trajectory]:
    """The golden trajectory, run by the engine."""
    format = format or FORMATS[golden["format"]]()
    llm = ScriptedLLM(golden["completions"])
    engine = Engine(llm, _Passages(golden["passages"]), format, max_steps=golden["max_steps"])  # type: ignore[arg-type]
    question = Question("1", golden["question"], tuple(golden["golden_answers"]))
    (trajectory,) = asyncio.run(engine.run([Trajectory(question)], seeds=[0]))
    return format, trajectory


def turn(format: Format, trajectory: Trajectory) -> Turn:
    """Who wrote what, in order; where each step is a chat of its own, the engine's part is the user's message."""
    if isinstance(format, StreamFormat):
        return [["policy" if span.by_policy else "engine", span.text] for span in format.turn(trajectory.steps)]
    return [
        said
        for step in trajectory.steps
        if step.asked
        for said in (["engine", _shown(step.prompt)], ["policy", step.completion.text])
    ]


def _shown(prompt: Prompt) -> str:
    return "\n".join(filter(None, (prompt.messages[-1].content, prompt.prefix)))


def page() -> str:
    """The whole page: its texts, and a table and worked examples in their places."""
    texts = SandboxedEnvironment(keep_trailing_newline=True).from_string(TEXTS.read_text(encoding="utf-8"))
    return texts.render(table=_table(), sections={name: _section(name) for name in FORMATS})


def _table() -> str:
    rows = [
        "| format | paper | well-formed | stops at | inserted first | after a search | inserted at the end | budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, format in ((name, make()) for name, make in FORMATS.items()):
        title, paper, form, budget = _ABOUT[name]
        if isinstance(format, StreamFormat):
            behind = _code(*re.findall(r"<\w+>", format.after(Search("q"), "")))
            put_in = (_code(*format.stops), _code(format.opening), behind, _code(format.cue))
        else:
            put_in = (_code("</query>", "</evidence>", "</answer>"), "", "a chat that shows the passages", "")
        if name == "tool_calls":
            put_in = ("the end of the turn", "", "a message of the role `tool`", "")
        rows.append(" | ".join([f"| `{name}`", f"{title}, {paper}", form, *put_in, f"{budget} |"]))
    return "\n".join(rows) + "\n"


def _code(*texts: str) -> str:
    return " ".join(f"`{text}`".replace("\n", " ").replace("|", "\\|") for text in texts if text)


def _section(name: str) -> str:
    golden = load(name)
    format, trajectory = play(golden)
    reading = format.read(trajectory)
    lines = [f"\n## {name}\n", f"{golden['question']} At most {golden['max_steps']} actions.\n", "```text"]
    for number, (who, text) in enumerate(turn(format, trajectory)):
        if number and who == "engine" and not format.append_only:
            lines.append("")  # another chat
        lines += [f"{who} | {line}".rstrip() for line in text.strip("\n").split("\n")]
    verdict = "well-formed" if reading.well_formed else f"not well-formed: `{reading.reason}`"
    plan = f"; plan: {reading.plan}" if reading.plan else ""
    lines += ["```\n", f"Parsed as {verdict}; answer `{reading.answer}` ({trajectory.stop_reason}){plan}\n"]
    lines += ["| | reasoning | query | passages | conclusion |", "|---|---|---|---|---|"]
    lines += [_row(number, block) for number, block in enumerate(reading.blocks, 1)]
    return "\n".join(lines) + "\n"


def _row(number: int, block: Block) -> str:
    passages = f"{len(block.context)} characters" if block.context else ""
    return " | ".join([f"| {number}", block.reasoning, block.query or "", passages, f"{block.conclusion} |"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
