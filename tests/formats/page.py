"""`docs/formats.md`, written from the golden trajectories: `python -m tests.formats.page`.

Each trajectory is run by the real engine with the policy's words replayed, so the page shows what really happens.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from reasonrag.core.types import Passage, Question, Trajectory
from reasonrag.formats import FORMATS, Block, Format, StreamFormat
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.rollout import Engine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats.md"
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
}

_INTRODUCTION = """\
# Formats: how each paper writes a trajectory

<!-- Written by `python -m tests.formats.page` from tests/golden/formats/trajectories; do not edit by hand. -->

```bash
reasonrag parse --format search_r1 trajectories.jsonl
```

This page is for reading and writing trajectories: which tags each paper has, what counts as well-formed, and one worked
example of each, as the engine runs it. `parse` reads trajectories from any source: rows of JSON with a `text` each. To
prompt a policy in a format, give `--format NAME`, or `--set format.name=NAME` if the command lacks that flag; a trained
policy's folder names its format.

ReasonRAG starts a new chat for every step; the other four write one growing turn, so that a trajectory is one
training row and the sampled token ids are never encoded again. With the `default` prompts, ReasonRAG's chats share one
system prompt, and those of a trajectory begin alike up to the newest thought: an engine with a prefix cache computes
little twice.

"""

_RULES = """\

In every format:

- Passages are inserted with the `<` of every tag and special token replaced by `‹`, and are sealed when the trajectory
  is parsed: nothing in a passage can end a thought or give an answer. The second passage below tries.
- An answer or query that only repeats the instruction ("and", "the answer") does not count.
- Queries, blocks and the answer are also read from trajectories that are not well-formed, as far as possible.

In the four that are one turn:

- At the end of the budget the engine opens the answer's tag for the policy (*inserted at the end*). The answer counts
  like any other, and the trajectory is well-formed if the rest is. See the Search-P1 example.
- Only white space may be outside the tags, and the policy must not write an observation itself.
- If several things are wrong, the gravest is the reason. `reasonrag parse --format NAME FILE` prints and counts the
  reasons for trajectories from any source:

| reason | what is wrong |
|---|---|
| `written_observation` | the policy wrote passages that no search returned |
| `unclosed_TAG`, `unopened_TAG` | a tag without its other half, a nested element, a text that was cut off |
| `no_answer` | there is no `<answer>` |
| `order` | searches, observations and the answer are not in order |
| `thought_order` | they are, but a thought or reflection is missing, misplaced or superfluous |
| `stray_text` | words outside the tags, and nothing else |
| `empty_TAG` | an answer or a query that is empty or repeats the instruction |

HiPRAG's reasons name the check of Alg. 2 or 3 that fails: `think_count`, `think_order`, `text_before_think`,
`no_answer`, `answer_count`, `empty_answer`, `text_after_answer`, `text_between_steps`, `unclosed_step`, `no_step`; for
a step `TAG_count`, `step_order`, `text_in_step`.
"""


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
        return [tuple(Passage(str(n), text) for n, text in enumerate(self._passages[q])) for q in queries]

    async def aclose(self) -> None:
        pass


def play(golden: dict[str, Any]) -> tuple[Format, Trajectory]:
    """The golden trajectory, run by the engine."""
    format = FORMATS[golden["format"]]()
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
        for said in (["engine", step.prompt.messages[-1].content], ["policy", step.completion.text])
    ]


def page() -> str:
    """The whole page."""
    return _INTRODUCTION + _table() + _RULES + "".join(_section(name) for name in FORMATS)


def _table() -> str:
    rows = [
        "| format | paper | well-formed | stops at | inserted first | after a search | inserted at the end | budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, format in ((name, make()) for name, make in FORMATS.items()):
        title, paper, form, budget = _ABOUT[name]
        if isinstance(format, StreamFormat):
            behind = f"`<{format.found}>`" + " `<conclusion>`" * (name == "hiprag")
            put_in = (_code(*format.stops), _code(format.opening), behind, _code(format.cue))
        else:
            put_in = (_code("</query>", "</evidence>", "</answer>"), "", "a chat that shows the passages", "")
        rows.append(" | ".join([f"| `{name}`", f"{title}, {paper}", form, *put_in, f"{budget} |"]))
    return "\n".join(rows) + "\n"


def _code(*texts: str) -> str:
    return " ".join(f"`{text}`".replace("\n", " ") for text in texts if text)


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
