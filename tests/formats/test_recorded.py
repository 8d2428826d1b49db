"""A recorded agent: its conversations become trajectories as they were, and trees that branch each of their steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import inert
from reasonrag.core.types import Prompt
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import chat_with_tools
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import open_parts
from reasonrag.rollout import derive_seed
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever

Row = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS = [
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "required": ["a"]}}},
    {"type": "function", "function": {"name": "search_wiki", "parameters": PARAMETERS}},
]
FOUND = "1) Jaws: a film, <b>directed</b> by Steven Spielberg\n2) nothing else"


def called(query: str, name: str = "search_wiki") -> Row:
    function = {"name": name, "arguments": json.dumps({"q": query})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def conversation(name: str, question: str = QUESTION.question, found: str = FOUND) -> list[Row]:
    """Return the calls of an agent that searches once."""
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Please: {question} Thanks!"}]
    result = {"role": "tool", "tool_call_id": "c1", "content": found}
    asked = [opening, [*opening, called("Jaws"), result]]
    said = [called("Jaws"), {"role": "assistant", "content": "Steven Spielberg"}]
    rows = []
    for number, (messages, message) in enumerate(zip(asked, said, strict=True)):
        request = {"model": "m", "tools": TOOLS, "messages": messages}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        rows.append(
            {"conversation": name, "call": number, "request": request, "message": message, "finish_reason": reason}
        )
    return rows


def says(prompt: Prompt, sampling: Sampling) -> str:
    """Another policy: calls the agent's function, or answers, by chance."""
    texts = (
        '<tool_call>\n{"name": "search_wiki", "arguments": {"q": "Jaws"}}\n</tool_call>',
        "George Lucas",
        "Spielberg",
    )
    return texts[derive_seed(sampling.seed or 0) % 3]


def test_a_conversation_is_a_trajectory_whose_prompts_are_what_the_agent_sent_but_inert() -> None:
    calls = conversation("one")
    form = RecordedFormat(calls, [QUESTION], parser="hermes")
    ((trajectory,),) = form.trajectories.values()
    assert trajectory.answer == "Steven Spielberg" and [len(step.passages) for step in trajectory.steps] == [1, 0]
    for step, call in zip(trajectory.steps, calls, strict=True):
        sent = chat_with_tools(step.prompt.messages, as_sent=True)
        assert sent["tools"] == TOOLS
        assert [(m["role"], m["content"] or "") for m in sent["messages"]] == [
            (m["role"], inert(m["content"] or "")) for m in call["request"]["messages"]
        ]
    (final,) = [form.prompt(QUESTION, trajectory.steps[:1], final=True)]
    assert "tools" not in chat_with_tools(final.messages)


def test_thoughts_that_the_agent_did_not_send_again_are_not_shown_again() -> None:
    calls = conversation("one")
    calls[0]["message"] |= {"reasoning_content": "I do not know that."}  # as a reasoning parser keeps it apart
    form = RecordedFormat(calls, [QUESTION], parser="hermes")
    ((trajectory,),) = form.trajectories.values()
    assert "I do not know that." in trajectory.steps[0].completion.text
    assert "I do not know that." not in str(trajectory.steps[1].prompt)


def test_what_cannot_be_branched_is_named() -> None:
    other = conversation("other", "Who wrote Emma?")
    rewritten = conversation("rewritten")
    rewritten[1]["request"]["messages"][1] = {"role": "user", "content": f"Summary. {QUESTION.question}"}
    unended = conversation("unended")[:1]
    calculating = conversation("calculating")
    calculating[0]["message"] = called("1+1", "calculator")
    for calls, reason in (
        (other, "are about none of the questions"),
        (rewritten, "rewrite their messages"),
        (unended, "have no answer"),
        (calculating, r"no search and no answer \(unknown_function\)"),
    ):
        with pytest.raises(DataError, match=f"none of 1 conversations can be branched: 1 .*{reason}"):
            RecordedFormat(calls, [QUESTION], parser="hermes")


def test_every_step_of_a_recording_is_branched_into_pairs(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    lines = [json.dumps(call) + "\n" for call in conversation("one")]
    (recording / "calls.jsonl").write_text("".join(lines))
    overrides = {"search.recording": str(recording), "search.iterations": 12, "pairs.test_share": 0.0, "seed": 1}
    with pytest.raises(ConfigError, match=r"format.name=tool_calls"):
        open_parts(load_config(overrides={**overrides, "policy.spec": "extractive"}), questions=[QUESTION])
    config = load_config(overrides={**overrides, "format.name": "tool_calls", "policy.spec": "extractive"})
    questions = [QUESTION, replace(QUESTION, id="q2", question="Who wrote Emma?")]
    parts = open_parts(config, questions=questions, retriever=ToyRetriever(), policy=ScriptedLLM(says))
    summary = build_trees(config, tmp_path / "run", parts=parts)
    rows = list(read_shards(tmp_path / "run" / "trees", "nodes", tree_schema()))
    recorded = [row for row in rows if row["origin"] == "recorded"]
    assert summary["questions"]["total"] == 1 and [row["depth"] for row in recorded] == [1, 2]
    for row in rows[:1] + [row for row in recorded if not row["stop_reason"]]:
        below = [child for child in rows if child["parent_id"] == row["node_id"]]
        children = [child for child in below if child["origin"] != "confirmation"]
        assert len(children) == config.search.max_children
    pairs = list(read_shards(tmp_path / "run" / "pairs", "train", pair_schema()))
    assert {pair["depth"] for pair in pairs} >= {0, 1}
    assert all("Please: Who directed Jaws? Thanks!" in str(pair["prompt"]) for pair in pairs)
    deep = [pair for pair in pairs if inert(FOUND) in str(pair["prompt"][-1]["content"])]
    assert deep and all(pair["prompt"][-1] == {"role": "tool", "content": inert(FOUND)} for pair in deep)
