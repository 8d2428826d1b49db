"""An agent of inspect_ai (`react`), evaluated by it: `contrib/inspect_log.py` and `build-tree` branch its steps.

The model is that of the check `openai`. The log is read as inspect_ai writes it (`.json`), and as `inspect log dump`
prints the other kind (`.eval`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import Tool, tool

from reasonrag.demo.world import demo_corpus
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.storage.parquet import read_calls, read_shards
from reasonrag.storage.tables import tree_schema
from tests.fakes.model_server import FakeOpenAI
from tests.peers.check_openai import KEY, QUESTIONS, as_tools, model

RETRIEVER = BM25Retriever.open(demo_corpus(0), cache=Path("cache"))


@tool
def search_encyclopedia() -> Tool:
    async def execute(q: str) -> str:
        """Look something up.

        Args:
            q: What to look up.
        """
        (found,) = await RETRIEVER.search([q], 2)
        return "\n".join(f"* {passage.contents}" for passage in found)

    return execute


def complete(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Add the fields that inspect_ai requires."""
    as_tools(request, answer)
    answer["usage"]["total_tokens"] = sum(answer["usage"].values())


def main() -> None:
    samples = [Sample(q.question, target=list(q.golden_answers), id=q.id) for q in QUESTIONS]
    agent = react(prompt="Use the encyclopedia.", tools=[search_encyclopedia()], submit=False)
    with FakeOpenAI(model, edit=complete) as server:
        for kind in ("json", "eval"):
            llm = get_model(
                "openai-api/fake/fake", base_url=server.base_url, api_key=KEY, config=GenerateConfig(seed=1)
            )
            (log,) = eval(
                Task(samples, solver=agent, scorer=includes()), llm, log_format=kind, log_dir=kind, display="none"
            )
            assert log.status == "success", log.error and log.error.message
            written = Path(log.location).read_bytes()
            if kind == "eval":
                dumping = [str(Path(sys.executable).with_name("inspect")), "log", "dump", log.location]
                written = subprocess.run(dumping, check=True, stdout=subprocess.PIPE).stdout
            Path(f"{kind}.json").write_bytes(written)
            ours = [sys.executable, "-m", "reasonrag"]
            converting = [sys.executable, str(Path(__file__).parents[2] / "contrib" / "inspect_log.py")]
            subprocess.run([*converting, f"{kind}.json", f"from-{kind}"], check=True)
        calls = list(read_calls(Path("from-eval")))
        assert KEY not in Path("from-eval", "calls.jsonl").read_text()
        recording = ["--recording", "from-eval", "--dataset", "from-eval/questions.jsonl", "--corpus", "corpus.jsonl"]
        with Path("corpus.jsonl").open("w") as file:
            file.writelines(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in demo_corpus(0))
        asked = ["--policy", server.base_url, "--policy-model", "fake", "--set", "format.name=tool_calls"]
        small = ["--iterations", "8", "--set", "retrieval.cache=cache", "--out", "run"]
        command = [*ours, "build-tree", *recording, *asked, *small]
        subprocess.run(command, check=True, env={**os.environ, "COLUMNS": "120"})
    rows = list(read_shards(Path("run", "trees"), "nodes", tree_schema()))
    recorded = [row for row in rows if row["origin"] == "recorded"]
    assert len(recorded) == len(calls) == len(list(read_calls(Path("from-json"))))
    pairs = json.loads(Path("run", "run.json").read_text())["pairs"]["total"]
    assert pairs
    figures = {"samples": len(QUESTIONS), "calls": len(calls), "steps recorded": len(recorded)}
    print(json.dumps({**figures, "pairs": pairs}))


if __name__ == "__main__":
    main()
