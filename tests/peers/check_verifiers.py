"""`load_environment` and an evaluation of `examples/verifiers` on 20 demo questions with a served policy.

The policy is the demo's, in this process behind a server with OpenAI's chat completions. `reasonrag eval` asks the same
server; every question has to get the same answer and the same scores.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "verifiers"))

from verifiers.v1 import load_environment  # noqa: E402
from verifiers.v1.cli.eval.runner import run_eval  # noqa: E402
from verifiers.v1.configs.cli.eval import EvalConfig  # noqa: E402

from reasonrag.commands.evaluate import evaluate  # noqa: E402
from reasonrag.core.config import ModelConfig  # noqa: E402
from reasonrag.core.types import Message, Prompt  # noqa: E402
from reasonrag.llm.base import Sampling  # noqa: E402
from reasonrag.pipeline.parts import open_llm  # noqa: E402
from reasonrag.storage.parquet import read_shards  # noqa: E402
from reasonrag.storage.tables import trajectory_schema  # noqa: E402
from tests.fakes.model_server import FakeOpenAI  # noqa: E402

QUESTIONS = 20
SETTINGS = {"data": "demo", "split": "test", "limit": QUESTIONS, "model": "demo", "reward.name": "outcome"}


class Model:
    """The demo policy in a loop of its own; called from a server's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm = open_llm(ModelConfig(spec="demo"), "policy")
        self.said: dict[str, str] = {}  # greedy: both evaluations ask the same, and get the same

    def __call__(self, request: dict[str, Any]) -> str:
        key = json.dumps(request["messages"])
        if key not in self.said:
            self.said[key] = self._answer(request)
        return self.said[key]

    def _answer(self, request: dict[str, Any]) -> str:
        assert request["temperature"] == 0 and request["max_tokens"] == 48
        messages = tuple(Message(message["role"], message["content"]) for message in request["messages"])
        prompt = Prompt(messages, stop=tuple(request.get("stop", ())))
        sampling = Sampling(temperature=0, max_tokens=48, seed=0)
        completion = asyncio.run_coroutine_threadsafe(self.llm.complete(prompt, sampling), self.loop).result()
        return completion.text


def complete(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Add the fields that verifiers requires."""
    answer |= {"id": "chatcmpl-1", "created": 0}
    answer["usage"]["total_tokens"] = sum(answer["usage"].values())


def by_verifiers(url: str) -> dict[str, dict[str, float]]:
    config = EvalConfig.model_validate(
        {
            "env": {
                "taskset": {"id": "reasonrag-search", "settings": SETTINGS},
                "agent": {"runtime": {"type": "subprocess"}},  # on this machine
            },
            "model": "fake",
            "client": {"base_url": url, "api_key_var": "NO_KEY"},
            "sampling": {"temperature": 0.0},
            "max_concurrent": 8,
            "rich": None,
            "push": False,
            "output_dir": "verifiers",
        }
    )
    environment = load_environment(config.env)
    assert type(environment.taskset).__name__ == "SearchTaskset"
    assert len(list(environment.taskset)) == QUESTIONS
    scored = {}
    for episode in asyncio.run(run_eval(config)):
        assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
        (trace,) = episode.traces
        assert trace.rewards["reward"].value == trace.metrics["em"]
        scored[episode.task.data.id] = {name: trace.metrics[name] for name in ("em", "f1", "rc")}
    return scored


def by_eval(url: str) -> dict[str, dict[str, float]]:
    asked = ["--policy", f"served={url}#fake", "--dataset", "demo:test", "--limit", str(QUESTIONS)]
    as_trained = ["--format", "reasonrag", "--prompts", "brief", "--top-k", "1", "--max-tokens", "48"]
    try:
        evaluate.main([*asked, *as_trained, "--set", "retrieval.cache=cache", "--out", "report"], standalone_mode=False)
    except SystemExit as ended:
        assert not ended.code
    rows = read_shards(Path("report/served/trajectories"), "t0_s8_k1", trajectory_schema())
    return {row["question_id"]: {"em": row["em"], "f1": row["f1"], "rc": float(row["retrievals"])} for row in rows}


def main() -> None:
    with FakeOpenAI(Model(), edit=complete) as server:
        theirs, ours = by_verifiers(server.base_url), by_eval(server.base_url)
    assert len(ours) == QUESTIONS and theirs == ours
    means = {name: round(sum(scores[name] for scores in ours.values()) / QUESTIONS, 3) for name in ("em", "f1", "rc")}
    print(json.dumps({"questions": QUESTIONS, "scores that differ from eval": 0, **means}))


if __name__ == "__main__":
    main()
