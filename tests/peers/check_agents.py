"""Agents of twelve libraries (`examples/agents.py`) through `contrib.record`; `build-tree --recording` branches them.

The model is a stand-in with three APIs that searches up to twice, and then answers rightly or wrongly: by functions, or
in the texts that an agent asks for. Names of agents on the command line run these alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OPENAI_API_KEY": "k", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HAYSTACK_TELEMETRY_ENABLED": "False"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "COLUMNS": "120"}

from aiohttp import web

from examples import agents
from reasonrag.demo.world import demo_questions
from reasonrag.storage.inputs import read_calls
from tests.fakes.model_server import FakeOpenAI
from tests.peers.world import PYTHON, ROOT
from tests.ports import keep_port, refuses

QUESTIONS = demo_questions("dev")[:6]
ANSWERING = ("final_answer", "final_result", "submit")
Body = dict[str, Any]


def decide(text: str, seed: object) -> tuple[str, str]:
    """Return `search` and a query, or `answer` and an answer: by chance if there is a seed, as in build-tree."""
    question = next(question for question in QUESTIONS if question.question in text)
    chance = random.Random(question.question if seed is None else f"{seed} {text}")
    searched, wanted = text.count("FOUND"), chance.randrange(3) if seed is None else chance.randrange(2) * 9
    if searched < wanted:
        return "search", f"{question.question} {searched + 1}"
    return "answer", question.golden_answers[0] if chance.random() < 0.5 else "Atlantis"


def in_text(text: str, kind: str, words: str) -> str:
    """Return a decision as an agent that reads texts asks for it."""
    if "[[ ## next_tool_name ## ]]" in text:  # DSPy
        name, arguments = ("finish", {}) if kind == "answer" else ("search", {"query": words})
        fields = {"next_thought": "So.", "next_tool_name": name, "next_tool_args": json.dumps(arguments)}
    elif "[[ ## reasoning ## ]]" in text:
        fields = {"reasoning": "So.", "answer": words if kind == "answer" else "Atlantis"}
    elif "Action Input:" in text:  # LlamaIndex
        call = f'Action: search\nAction Input: {{"query": {json.dumps(words)}}}'
        return "Thought: So.\n" + (f"Answer: {words}" if kind == "answer" else call)
    else:
        return words
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


def called(kind: str, words: str, tools: list[Body]) -> list[Body]:
    """Return the call of a decision; none if it is a text."""
    for function in [tool.get("function", tool) for tool in tools]:
        if (function["name"] in ANSWERING) == (kind == "answer"):
            schema = function.get("parameters") or function["input_schema"]
            types = {name: schema["properties"][name].get("type") for name in schema["required"]}
            arguments = {name: {"integer": 3, "number": 0.5}.get(kind, words) for name, kind in types.items()}
            return [{"name": function["name"], "arguments": arguments}]
    return []


class Model(FakeOpenAI):
    """Chat completions, Responses and Messages."""

    routes = ("/v1/chat/completions", "/v1/responses", "/v1/messages")

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[object, str] = {}  # what stands before a response, by its id

    async def good(self, request: web.Request, body: Any) -> web.StreamResponse:
        text = self.texts.get(body.get("previous_response_id"), "") + json.dumps(body, ensure_ascii=False)
        kind, words = decide(text, body.get("seed"))
        calls = called(kind, words, body.get("tools") or [])
        if calls and "twice" in text:
            calls.append(
                {**calls[0], "arguments": {name: f"{word} too" for name, word in calls[0]["arguments"].items()}}
            )
        apis = {"chat/completions": _chat, "responses": _response, "messages": _message}
        write = next(write for end, write in apis.items() if request.path.endswith(end))
        whole, events = write("" if calls else in_text(text, kind, words), calls, body.get("n") or 1)
        self.texts[whole["id"]] = text
        if not body.get("stream"):
            return web.json_response(whole)
        lines = [f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n" for event in events]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")


def _id() -> str:
    return f"id{random.random()}"


def _chat(words: str, calls: list[Body], choices: int) -> tuple[Body, list[Body]]:
    message: Body = {"role": "assistant", "content": words or None}
    for call in calls:
        function = call | {"arguments": json.dumps(call["arguments"])}
        made = {
            "index": len(message.setdefault("tool_calls", [])),
            "id": _id(),
            "type": "function",
            "function": function,
        }
        message["tool_calls"].append(made)
    reason = "tool_calls" if calls else "stop"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": _id(), "created": 0, "model": "fake", "object": "chat.completion", "usage": usage}
    said = [{"index": n, "message": message, "finish_reason": reason} for n in range(choices)]
    deltas = [{"index": 0, "delta": message}, {"index": 0, "delta": {}, "finish_reason": reason}]
    return whole | {"choices": said}, [
        *(whole | {"object": "chat.completion.chunk", "choices": [delta], "usage": None} for delta in deltas),
        whole | {"object": "chat.completion.chunk", "choices": []},
    ]


def _response(words: str, calls: list[Body], _: int) -> tuple[Body, list[Body]]:
    content = [{"type": "output_text", "text": words, "annotations": []}]
    output: list[Body] = [
        {"type": "message", "role": "assistant", "status": "completed", "id": _id(), "content": content}
    ]
    if calls:
        output = [
            {"type": "function_call", "id": _id(), "call_id": _id(), **call, "arguments": json.dumps(call["arguments"])}
            for call in calls
        ]
    usage: Body = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": _id(), "object": "response", "created_at": 0, "model": "m", "output": output, "status": "completed"}
    whole |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "usage": usage}
    return whole, [{"type": "response.completed", "sequence_number": 0, "response": whole}]


def _message(words: str, calls: list[Body], _: int) -> tuple[Body, list[Body]]:
    content: list[Body] = [{"type": "text", "text": words}]
    if calls:
        content = [{"type": "tool_use", "id": _id(), "name": c["name"], "input": c["arguments"]} for c in calls]
    ended = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    usage = {"input_tokens": 1, "output_tokens": 1}
    whole = {"id": _id(), "type": "message", "role": "assistant", "model": "m", "content": content, "usage": usage}
    events: list[Body] = [{"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}]
    for index, block in enumerate(content):
        written = json.dumps(block.get("input"))
        delta = (
            {"type": "input_json_delta", "partial_json": written} if calls else {"type": "text_delta", "text": words}
        )
        start = block | ({"input": {}} if calls else {"text": ""})
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    return whole | ended, [*events, {"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"}]


def tool(name: str, *required: str) -> Body:
    properties = {name: {"type": "integer" if name == "k" else "string"} for name in required}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "Search.", "parameters": parameters}}


SEARCH = tool("search", "query")


def openai_chat(base_url: str, question: str, *tools: Body, way: str = "", **options: Any) -> None:
    import openai

    client = openai.OpenAI(base_url=base_url)
    messages: list[Any] = [{"role": "system", "content": f"Search {way}."}, {"role": "user", "content": question}]
    asked: Body = {"model": "fake", "tools": [*tools] or [SEARCH], **options}
    while True:
        said = client.chat.completions.create(messages=messages, **asked).choices[0].message
        if not said.tool_calls or said.tool_calls[0].function.name in ANSWERING:
            return
        messages.append(said)
        for call in reversed(said.tool_calls):  # in the order in which results come
            found = agents.search(call.function.arguments)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": found}]


def chat(*tools: Body) -> Callable[[str, str], None]:
    return lambda base_url, question: openai_chat(base_url, question, *tools)


AGENTS: dict[str, Callable[[str, str], None]] = {
    "openai": openai_chat,
    "openai, n=2": partial(openai_chat, n=2),
    "openai, parallel calls": partial(openai_chat, way="twice"),
    "openai, search(query, k)": chat(tool("search", "query", "k")),
    "openai, browse(url)": chat(tool("browse", "url")),
    "openai, submit(it)": chat(SEARCH, tool("submit", "it")),
    "openai Responses": agents.openai_responses,
    "openai Responses, streamed": partial(agents.openai_responses, stream=True),
    "openai Responses, previous_response_id": partial(agents.openai_responses, keeps=False),
    "anthropic": agents.anthropic,
    "anthropic, streamed": partial(agents.anthropic, stream=True),
    "openai-agents": agents.openai_agents,
    "openai-agents, chat completions": partial(agents.openai_agents, chat=True),
    "litellm": agents.litellm,
    "langchain create_agent": agents.langchain,
    "langgraph create_react_agent, streamed": agents.langgraph,
    "pydantic-ai": agents.pydantic_ai,
    "pydantic-ai, output_type": partial(agents.pydantic_ai, structured=True),
    "smolagents ToolCallingAgent": agents.smolagents,
    "dspy ReAct": agents.dspy,
    "llama-index FunctionAgent": partial(agents.llama_index, kind="FunctionAgent"),
    "llama-index ReActAgent": agents.llama_index,
    "haystack Agent": agents.haystack,
    "agno": agents.agno,
}


@contextlib.contextmanager
def recording(upstream: str, out: Path) -> Iterator[str]:
    """Yield the base URL of a recording proxy."""
    port = keep_port().getsockname()[1]
    flags = ["--upstream", upstream, "--out", str(out), "--port", str(port)]
    with subprocess.Popen([PYTHON, "-m", "contrib.record", *flags], cwd=ROOT, stdout=2) as proxy:
        while refuses(port):
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
        proxy.terminate()


def check(name: str, server: str) -> Body:
    """Record an agent and branch its conversations; return the figures."""
    folder = Path("".join(char if char.isalnum() else "-" for char in name)).resolve()
    with recording(server, folder) as base_url:
        for question in QUESTIONS:
            AGENTS[name](base_url, question.question)
    assert "Bearer" not in (folder / "calls.jsonl").read_text(encoding="utf-8")
    command = [PYTHON, "-m", "reasonrag", "build-tree", "--recording", folder, "--dataset", "demo:dev"]
    command += ["--search-function", "browse"] if "browse" in name else []
    command += ["--policy", server, "--policy-model", "fake", "--set", "format.name=tool_calls", "--iterations", "8"]
    command += ["--set", f"retrieval.cache={folder.parent / 'cache'}", "--out", folder / "run"]
    subprocess.run([*command, "--max-unreadable", "1"], stdout=2, check=True)
    summary = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    figures = {"calls": len(list(read_calls(folder))), "trees": summary["questions"]["finished"]}
    figures["pairs"] = summary["pairs"]["total"]
    print(name, figures, file=sys.stderr)
    assert figures["trees"] == len(QUESTIONS) and figures["pairs"]
    return figures


def main(names: Iterable[str]) -> None:
    with Model() as server:
        found = [check(name, server.base_url) for name in names]
    totals = {name: sum(figures[name] for figures in found) for name in ("calls", "trees", "pairs")}
    print(json.dumps({"agents": len(found), **totals}))


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in AGENTS if "llama" not in name])  # which needs an older client of OpenAI
