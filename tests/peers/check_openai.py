"""An agent written with OpenAI's SDK, through `contrib.record`; `build-tree --recording` branches its steps.

The agent knows nothing of reasonrag: its own prompt, its own function `search_encyclopedia(q)`, its own way to show
results. The model is a stand-in that searches once, and then answers rightly or wrongly by the seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from reasonrag.core import event_loop
from reasonrag.demo.world import demo_corpus, demo_questions
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.storage.parquet import read_calls, read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.fakes.model_server import FakeOpenAI
from tests.ports import keep_port, refuses

ROOT = Path(__file__).parents[2]
QUESTIONS = demo_questions("dev")[:10]
KEY = "sk-proj-Kd83hdksl29fhdJSk3ldkf93hdksl2ka"
TOOL = {
    "type": "function",
    "function": {
        "name": "search_encyclopedia",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


@contextlib.contextmanager
def recording(upstream: str, out: Path) -> Iterator[str]:
    """Yield the address of a recording proxy."""
    port = keep_port().getsockname()[1]
    flags = ["--upstream", upstream, "--out", str(out), "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "contrib.record", *flags], cwd=ROOT) as proxy:
        while refuses(port):
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        proxy.terminate()


def model(request: dict[str, Any]) -> str:
    """Return a query as `?QUERY`, which `as_tools` makes a call of, or an answer."""
    text = json.dumps(request["messages"])
    question = next(question for question in QUESTIONS if question.question in text)
    chance = random.Random(f"{request.get('seed')} {text}")
    if "tools" in request and '"tool"' not in text and chance.random() < 0.7:
        return f"?{question.question}"
    return question.golden_answers[0] if chance.random() < 0.5 else "Atlantis"


def as_tools(request: dict[str, Any], answer: dict[str, Any]) -> None:
    answer |= {"id": "chatcmpl-1", "created": 0}
    for choice in answer["choices"]:
        said = choice["message"]["content"]
        if said.startswith("?"):
            function = {"name": "search_encyclopedia", "arguments": json.dumps({"q": said[1:]})}
            call = {"id": "call_1", "type": "function", "function": function}
            choice |= {"message": {"role": "assistant", "content": None, "tool_calls": [call]}}
            choice["finish_reason"] = "tool_calls"


def agent(client: openai.OpenAI, question: str, retriever: BM25Retriever) -> str:
    """Answer a question as people write such loops."""
    messages: list[Any] = [
        {"role": "system", "content": "Use the encyclopedia."},
        {"role": "user", "content": question},
    ]
    while True:
        reply = client.chat.completions.create(model="fake", messages=messages, tools=[TOOL], seed=len(messages))
        said = reply.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said)
        for call in said.tool_calls:
            (found,) = event_loop.run(retriever.search([json.loads(call.function.arguments)["q"]], 2))
            shown = "\n".join(f"* {passage.contents}" for passage in found)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})


def main() -> None:
    retriever = BM25Retriever.open(demo_corpus(0), cache=Path("cache"))
    with FakeOpenAI(model, edit=as_tools) as server:
        with recording(server.base_url, Path("agent").resolve()) as proxy:
            client = openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY)
            answers = [agent(client, question.question, retriever) for question in QUESTIONS]
        calls = list(read_calls(Path("agent")))
        assert KEY not in Path("agent", "calls.jsonl").read_text()
        assert len({call["conversation"] for call in calls}) == len(QUESTIONS) == len(answers)
        command = [sys.executable, "-m", "reasonrag", "build-tree", "--recording", "agent", "--dataset", "demo:dev"]
        asked = ["--policy", server.base_url, "--policy-model", "fake", "--set", "format.name=tool_calls"]
        small = ["--iterations", "8", "--set", "retrieval.cache=cache", "--out", "run"]
        subprocess.run([*command, *asked, *small], check=True, env={**os.environ, "COLUMNS": "120"})
    rows = list(read_shards(Path("run", "trees"), "nodes", tree_schema()))
    recorded = [row for row in rows if row["origin"] == "recorded"]
    parents = {(row["question_id"], row["parent_id"]) for row in rows if row["origin"] == "expansion"}
    steps = {(row["question_id"], row["parent_id"]) for row in recorded}
    assert len(recorded) == len(calls) and steps <= parents
    pairs = [pair for split in ("train", "test") for pair in read_shards(Path("run", "pairs"), split, pair_schema())]
    assert pairs and all(pair["prompt"][0]["content"] != "" for pair in pairs)
    verbatim = sum(any(message["content"].startswith("* ") for message in pair["prompt"]) for pair in pairs)
    figures = {"conversations": len(QUESTIONS), "steps recorded": len(calls), "of them branched": len(steps)}
    print(json.dumps({**figures, "pairs": len(pairs), "behind what the agent itself had found": verbatim}))


if __name__ == "__main__":
    main()
