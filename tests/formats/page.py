"""`docs/formats.md`, written from the golden trajectories: `python -m tests.formats.page`.

Each trajectory is run by the real engine with the policy's words replayed, so the page shows what really happens.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from reasonrag.core.types import Passage, Prompt, Question, Search, Trajectory
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
    "tool_calls": (
        "Native tool calls",
        "as Qwen, Llama and Gemma write them",
        "call* answer, one message each; words before a call are free",
        "`max_steps` - 1 calls",
    ),
    "r1_searcher": (
        "R1-Searcher",
        "arXiv:2503.05592",
        "think[ (query documents)* ] answer",
        "`max_steps` - 1 searches",
    ),
    "react": (
        "ReAct, FireAct",
        "arXiv:2210.03629, arXiv:2310.05915",
        "(Thought search Observation)* Thought finish, a line each",
        "`max_steps` - 1 searches",
    ),
}

_INTRODUCTION = """\
# Formats: how each paper writes a trajectory

<!-- Written by `python -m tests.formats.page` from tests/golden/formats/trajectories; do not edit by hand. -->

```bash
reasonrag eval --dataset demo --limit 5 --policy demo:hiprag --out reports/formats
```

This page is for reading and writing trajectories: which tags each paper has, what counts as well-formed, and one worked
example of each, as the engine runs it. To prompt a policy in a format, give `--format NAME`, or
`--set format.name=NAME` if the command lacks that flag; a trained policy's folder names its format. Trajectories from
any source are read in Python:

```python
import reasonrag

form = reasonrag.FORMATS["search_r1"]()
reading = form.read_text("<think>I know.</think>\\n<answer>Steven Spielberg</answer>")
print(reading.well_formed, reading.reason, reading.answer)
```

ReasonRAG starts a new chat for every step; six others write one growing turn, so that a trajectory is one training row
and the sampled token ids are never encoded again. With the `default` prompts, ReasonRAG's chats share one system
prompt, and those of a trajectory begin alike up to the newest thought: an engine with a prefix cache computes little
twice. `tool_calls` adds messages to one chat, which the policy's own chat template writes.

"""

_RULES = """\

In every format:

- Passages are inserted with the `<` of every tag and special token replaced by `‹`, and are sealed when the trajectory
  is parsed: nothing in a passage can end a thought or give an answer. The second passage below tries.
  Brackets of tokens such as `[INST]` become `⁅`. Where the policy's tokenizer is known (all but the chat endpoint of a
  server), every other form that it takes for one of its added tokens is broken too; a format's own tags stay tokens.
- An answer or query that only repeats the instruction ("and", "the answer") does not count.
- Queries, blocks and the answer are also read from trajectories that are not well-formed, as far as possible.

In those that are one growing turn:

- At the end of the budget the engine opens the answer's tag for the policy (*inserted at the end*). The answer counts
  like any other, and the trajectory is well-formed if the rest is. See the Search-P1 example.
- Only white space may be outside the tags, and the policy must not write an observation itself.
- If several things are wrong, the gravest is the reason. `read_text` returns it:

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

_HERMES = '<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>'
_TOOL_CALLS = f"""\

The policy calls the function `search(query)` as its family of models does. Its own chat template shows it the function,
its calls and their results (`tools=`, `tool_calls`, the role `tool`), so it is trained as a host of agents asks it.

```bash
reasonrag build-tree --dataset hotpotqa --limit 100 --set format.name=tool_calls --policy hf:google/gemma-3-4b-it \\
    --chat-template gemma-tools --out runs/tools
```

| `format.tool_parser` | models | a call |
|---|---|---|
| `hermes` | Hermes, Qwen 2.5 and 3; with XML inside also Qwen 3 Coder and 3.5 | `{_HERMES}` |
| `llama3` | Llama 3.1 and later | `{{"name": "search", "parameters": {{"query": "..."}}}}` |
| `gemma` | Gemma 2 and 3 | Python behind ```` ```tool_code ````, a list `[search(query="...")]`, or Llama's JSON |
| `gemma4` | Gemma 4, FunctionGemma | `call:search{{query:...}}` between their special tokens |

The parser follows from the chat template, or from `--set format.tool_parser=NAME`. A template that shows no calls is
refused: Gemma's before 4, and most of base models. `--chat-template chatml-tools`, `llama3-tools` or `gemma-tools`
brings one that does; a vLLM server takes the same file (in `reasonrag/llm/templates/`) as its `--chat-template`.

There are three ways to ask:

- **In this process** (`hf:`, `vllm:`): the template writes the prompt, our parser reads what was sampled. Trees, DPO,
  SFT and GRPO train on exactly the sampled ids, one row a message, after exactly the ids that were read.
- **A server's chat API** (`--policy http://HOST:PORT/v1`): the function goes into the field `tools`, and the server
  parses (`vllm serve --enable-auto-tool-choice --tool-call-parser hermes`). What comes back as `message.tool_calls` is
  kept as `hermes` writes it, whatever the model. Its ids, which vLLM reports, are trained on if they spell the same;
  else the text is encoded, and the share of such steps is reported. A call that the server left in the text is read by
  `format.tool_parser`. `transformers serve` 5.23 drops the words beside a call from the history.
- **A server that is sent the rendered prompt** (`--set policy.api=completions`): as in this process, and exact with
  `policy.vllm=true`.

**The answer** is the whole text of the first message without a call, behind its thinking (`</think>`). No tag is asked
for: the prompt demands the answer and nothing else. Where it is forced, no function is offered, and the system prompt
says that no search is possible.

Words before a call, thinking included, are the policy's thought: it reads them again if its template shows them
(Llama's does not; Gemma 4's would end the turn behind them, so they are left out). A message that cannot be used is a
malformed step: never a score, never a chosen side, and not shown to the policy, which is asked again.

| reason | what is wrong |
|---|---|
| `unreadable_call` | no JSON, JSON without a name and arguments, no Python call with plain arguments, never closed |
| `unknown_function`, `bad_arguments`, `empty_query` | not `search`, not exactly one text `query`, or an empty one |
| `several_calls` | more than one call in a message: a step is one search, and the prompt asks for one at a time |
| `text_after_call` | words behind a call, such as a result that the policy made up |
| `unexpected_call` | a call where no function was offered |
| `unclosed_think`, `cut_off`, `empty_answer` | thinking never ended, the token limit came first, or nothing was said |

In online training these rewards read no more than queries, searches and the answer, and mean what their papers say:
`outcome`, `spre`, `when-to-search` (its r_f is 1 without a malformed step). `search-p1` too, but for the policy's own
plan, which nothing asks for: `--set reward.search_p1.self_track=false` leaves that track out. `hiprag` knows what a
search concluded where the next message says something besides its call; silent searches count as unknown.
"""


_DIALECTS = """\

`r1_searcher` and `react` are for published checkpoints that write marks of their own (`StreamFormat.dialect`). Whatever
such a policy writes is rewritten into the tags of `search_r1` before it is parsed, and only then, so every reward and
metric reads it; the reasons above name those tags. Both were held to published trajectories. Of R1-Searcher's 595 all
are well-formed, with every query and answer as recorded; of FireAct's 262, 260 are, and one answer differs from its
log, which took a thought along. Their own instructions are not shipped: write them into
`FOLDER/r1_searcher/instruction.txt` and add `--prompts FOLDER`. A checkpoint with tags like `<documents>` needs no
patterns: subclass `StreamFormat` and name them ([Extending](extend.md)).
"""

_BEHIND = {"tool_calls": _TOOL_CALLS, "react": _DIALECTS}


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
    """The whole page."""
    return _INTRODUCTION + _table() + _RULES + "".join(_section(name) + _BEHIND.get(name, "") for name in FORMATS)


def _table() -> str:
    rows = [
        "| format | paper | well-formed | stops at | inserted first | after a search | inserted at the end | budget |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, format in ((name, make()) for name, make in FORMATS.items()):
        title, paper, form, budget = _ABOUT[name]
        if isinstance(format, StreamFormat):
            behind = _code(*re.findall(r"<\|?\w+\|?>|\w+:", format.after(Search("q"), "")))
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
