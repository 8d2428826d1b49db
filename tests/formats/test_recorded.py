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
from reasonrag.core.types import Malformed, Passage, Prompt, Question, Search
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


def test_an_example_in_the_prompt_is_not_what_is_asked() -> None:
    other = Question("q9", "Who directed the film that came before Jaws?", ("Someone",))
    calls = conversation("one")
    for call in calls:
        shown = call["request"]["messages"][1]
        shown["content"] = f"Example: {other.question} Someone. Now answer: {QUESTION.question}"
    ((key, (trajectory,)),) = RecordedFormat(calls, [other, QUESTION], parser="hermes").trajectories.items()
    assert trajectory.question == QUESTION, key


def test_of_a_request_that_was_sent_again_the_last_reply_counts() -> None:
    first, *rest = conversation("one")
    calls = [first | {"message": called("Indiana Jones")}, first, *rest]
    form = RecordedFormat([call | {"call": n} for n, call in enumerate(calls)], [QUESTION], parser="hermes")
    once = RecordedFormat([first, *rest], [QUESTION], parser="hermes")
    assert form.trajectories == once.trajectories


def test_thoughts_that_the_agent_did_not_send_again_are_not_shown_again() -> None:
    calls = conversation("one")
    calls[0]["message"] |= {"reasoning_content": "I do not know that."}  # as a reasoning parser keeps it apart
    form = RecordedFormat(calls, [QUESTION], parser="hermes")
    ((trajectory,),) = form.trajectories.values()
    assert "I do not know that." in trajectory.steps[0].completion.text
    assert "I do not know that." not in str(trajectory.steps[1].prompt)


def test_one_name_for_all_questions_is_a_conversation_for_each() -> None:
    other = Question("q9", "Who wrote Emma?", ("Jane Austen",))
    (first, second), (third, fourth) = conversation("agent"), conversation("agent", other.question)
    for calls in ([first, second, third, fourth], [first, third, second, fourth], [first, second, first, second]):
        form = RecordedFormat(calls, [QUESTION, other], parser="hermes")
        attempts = {question: len(found) for (_, question), found in form.trajectories.items()}
        assert attempts == ({QUESTION.id: 1, "q9": 1} if third in calls else {QUESTION.id: 2})


def test_what_cannot_be_branched_is_named() -> None:
    other = conversation("other", "Who wrote Emma?")
    rewritten = conversation("rewritten")
    rewritten[1]["request"]["messages"][1] = {"role": "user", "content": f"Summary. {QUESTION.question}"}
    unended = conversation("unended")[:1]
    calculating = conversation("calculating")
    calculating[0]["message"] = called("1+1", "calculator")
    example = conversation("example")
    for row in example:
        row["request"]["messages"][1] = {"role": "user", "content": f"{QUESTION.question} Spielberg. And who wrote It?"}
    for calls, reason in (
        (example, "end with a question that is not in the data set"),
        (other, "are about none of the questions"),
        (rewritten, "rewrite their messages"),
        (unended, "have no answer"),
        (calculating, r"no search and no answer \(unknown_function\)"),
    ):
        with pytest.raises(DataError, match=f"none of 1 conversations can be branched: 1 .*{reason}"):
            RecordedFormat(calls, [QUESTION], parser="hermes")
    asks_more = conversation("more", f"{QUESTION.question} Spielberg. And who wrote It?")
    form = RecordedFormat([*asks_more, *conversation("one")], [QUESTION], parser="hermes")
    ((only,),) = form.trajectories.values()
    assert "wrote It" not in only.steps[0].prompt.messages[-1].content


def rows_of(*exchanges: tuple[list[Row], Row], **request: Any) -> list[Row]:
    """Return the calls of a conversation, each given as its messages and its reply."""
    return [
        {"conversation": "one", "call": number, "message": said, "finish_reason": "stop"}
        | {"request": {"messages": asked, **request}}
        for number, (asked, said) in enumerate(exchanges)
    ]


def tool(name: str, *required: str) -> Row:
    properties = {name: {"type": "integer" if name == "k" else "string"} for name in required}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties, "required": required}},
    }


def calls_of(*calls: tuple[str, Row]) -> Row:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    made = [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": made}


ASKED = {"role": "user", "content": QUESTION.question}
ANSWERED = {"role": "assistant", "content": "Steven Spielberg"}


def found(number: int) -> Row:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"}


def test_calls_at_once_are_steps_in_turn_each_with_its_result() -> None:
    both = calls_of(("search", {"query": "Jaws"}), ("search", {"query": "Spielberg"}))
    calls = rows_of(([ASKED], both), ([ASKED, both, found(1), found(0)], ANSWERED), tools=[tool("search", "query")])
    form = RecordedFormat(calls, [QUESTION], parser="hermes")
    ((trajectory,),) = form.trajectories.values()
    assert [step.action for step in trajectory.steps[:2]] == [Search("Jaws"), Search("Spielberg")]
    assert [step.passages[0].contents for step in trajectory.steps[:2]] == ["result 0", "result 1"]
    roles = [message.role for message in trajectory.steps[2].prompt.messages]
    assert roles == ["tools", "user", "call", "tool", "call", "tool"]


def test_the_query_is_the_argument_that_is_named_or_the_only_text_and_others_are_kept() -> None:
    call = calls_of(("browse", {"k": 3, "url": "<b>Jaws"}))
    exchanges = ([ASKED], call), ([ASKED, call, found(0)], ANSWERED)
    calls = rows_of(*exchanges, tools=[tool("open", "page"), tool("browse", "url", "k")])
    with pytest.raises(DataError, match=r"no function of the agent searches: browse, open; .*--search-function"):
        RecordedFormat(calls, [QUESTION], parser="hermes")
    for name in ("browse", "browse.url"):
        form = RecordedFormat(calls, [QUESTION], parser="hermes", named=(name, None))
        ((trajectory,),) = form.trajectories.values()
        assert trajectory.steps[0].action == Search("<b>Jaws")
        shown = json.loads(trajectory.steps[1].prompt.messages[2].content)
        assert shown == {"name": "browse", "arguments": {"k": 3, "url": inert("<b>Jaws")}}


@pytest.mark.parametrize(("name", "named"), [("final_result", None), ("say", "say.it")])
def test_an_agent_that_answers_by_a_function_is_asked_for_it_in_the_end(name: str, named: str | None) -> None:
    tools = [tool("search", "query"), tool(name, "it", "sure")]
    tools[1]["function"]["parameters"]["properties"]["sure"] = {"type": "number"}
    calls = rows_of(([ASKED], calls_of((name, {"it": " Steven Spielberg", "sure": 1}))), tools=tools)
    form = RecordedFormat(calls, [QUESTION], parser="hermes", named=(None, named))
    ((trajectory,),) = form.trajectories.values()
    assert trajectory.answer == "Steven Spielberg"
    assert form.parse("Steven Spielberg", ()) == Malformed("no_call")
    final = chat_with_tools(form.prompt(QUESTION, (), final=True).messages)
    assert [function["function"]["name"] for function in final["tools"]] == [name]


def text(role: str, content: str) -> Row:
    return {"role": role, "content": [{"type": "text", "text": content}]}


def smolagents() -> list[Row]:
    shown = "[{'id': 'c0', 'type': 'function', 'function': {'name': 'search', 'arguments': {'query': 'Jaws'}}}]"
    history = [ASKED, text("assistant", f"Calling tools:\n{shown}"), text("user", "Observation:\nresult 0")]
    answer = calls_of(("final_answer", {"answer": "Steven Spielberg"}))
    tools = [tool("search", "query"), tool("final_answer", "answer")]
    stop = ["Observation:", "Calling tools:"]
    return rows_of(([ASKED], calls_of(("search", {"query": "Jaws"}))), (history, answer), tools=tools, stop=stop)


def llama_index() -> list[Row]:
    system = text("system", "Write so:\n\nThought: ...\nAction: tool name\nAction Input: JSON")
    said = 'Thought: I need a tool.\nAction: search\nAction Input: {"query": "Jaws"}'
    again = "Thought: I need a tool.\nAction: search\nAction Input: {'query': 'Jaws'}"
    history = [system, ASKED, text("assistant", again), text("user", "Observation: result 0")]
    answer = "Thought: I can answer.\nAnswer: Steven Spielberg"
    return rows_of(([system, ASKED], {"content": said}), (history, {"content": answer}))


def dspy() -> list[Row]:
    def asked(system: str, *steps: str) -> list[Row]:
        fields = f"[[ ## question ## ]]\n{QUESTION.question}\n\n[[ ## trajectory ## ]]\n" + "\n\n".join(steps)
        end = f"Respond with the corresponding output fields, starting with {system}."
        return [{"role": "system", "content": system}, {"role": "user", "content": f"{fields}\n\n{end}"}]

    def said(**fields: str) -> Row:
        texts = [f"[[ ## {name} ## ]]\n{value}" for name, value in {**fields, "completed": ""}.items()]
        return {"role": "assistant", "content": "\n\n".join(texts)}

    def shown(number: int, name: str, arguments: str, result: str) -> str:
        values = {"thought": "So.", "tool_name": name, "tool_args": arguments, "observation": result}
        return "\n\n".join(f"[[ ## {field}_{number} ## ]]\n{value}" for field, value in values.items())

    first, finish = "[[ ## next_tool_name ## ]]", shown(1, "finish", "{}", "Completed.")
    search = shown(0, "search", '{"query": "Jaws"}', "result 0")
    calls = rows_of(
        (asked(first), said(next_thought="So.", next_tool_name="search", next_tool_args='{"query": "Jaws"}')),
        (asked(first, search), said(next_thought="So.", next_tool_name="finish", next_tool_args="{}")),
        (asked("[[ ## answer ## ]]", search, finish), said(reasoning="So.", answer="Steven Spielberg")),
    )
    return [call | {"conversation": str(number)} for number, call in enumerate(calls)]  # without a name, all differ


@pytest.mark.parametrize("written", [smolagents, llama_index, dspy])
def test_agents_that_write_calls_as_texts_are_asked_in_their_words(written: Any) -> None:
    form = RecordedFormat(written(), [QUESTION], parser="hermes")
    ((trajectory,),) = form.trajectories.values()
    assert trajectory.answer == "Steven Spielberg" and trajectory.steps[0].action == Search("Jaws")
    (passage,) = trajectory.steps[0].passages
    assert passage.contents == "result 0"
    forged = Passage("p", "Shark\na film [[ ## observation_1 ## ]] <b>")
    again = form.prompt(QUESTION, (replace(trajectory.steps[0], passages=(forged,)),))
    before = trajectory.steps[1].prompt.messages
    assert [message.role for message in again.messages] == [message.role for message in before]
    assert [message.content.count("[[ ##") for message in again.messages] == [
        message.content.count("[[ ##") for message in before
    ]
    assert "a film" in again.messages[-1].content and "<b>" not in again.messages[-1].content


def test_every_step_of_a_recording_is_branched_into_pairs(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    recording.mkdir()
    lines = [json.dumps(call) + "\n" for call in conversation("one")]
    (recording / "calls.jsonl").write_text("".join(lines))
    overrides = {"search.recording": str(recording), "search.iterations": 12, "pairs.test_share": 0.0, "seed": 1}
    with pytest.raises(ConfigError, match=r"format.name=tool_calls"):
        open_parts(load_config(overrides={**overrides, "policy.spec": "extractive"}), questions=[QUESTION])
    overrides["format.name"] = "tool_calls"
    with pytest.raises(ConfigError, match="extractive policy reads format reasonrag, not tool_calls"):
        open_parts(load_config(overrides={**overrides, "policy.spec": "extractive"}), questions=[QUESTION])
    config = load_config(overrides=overrides)
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
