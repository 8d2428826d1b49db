"""Every example runs: parts of one's own in the engine, in a command, and the notebook cell by cell."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web

import reasonrag
from tests import warmed
from tests.e2e import product
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION

ROOT = Path(__file__).parents[2]
JAWS = {"title": "Jaws", "text": "Jaws is a film by Steven Spielberg."}


class Elasticsearch:
    """Speaks as much of Elasticsearch's `_msearch` as the official client needs, on loopback."""

    def __init__(self, hits: list[dict[str, object]]) -> None:
        self.hits = hits
        self.searches: list[dict[str, object]] = []

    async def msearch(self, request: web.Request) -> web.Response:
        lines = [json.loads(line) for line in (await request.text()).splitlines() if line]
        self.searches += lines[1::2]
        responses = [{"status": 200, "hits": {"hits": self.hits}} for _ in lines[1::2]]
        return web.json_response({"took": 1, "responses": responses}, headers={"X-Elastic-Product": "Elasticsearch"})

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_route("*", "/_msearch", self.msearch)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def answer_with_elasticsearch(monkeypatch: pytest.MonkeyPatch) -> tuple[reasonrag.Trajectory, list[dict]]:
    """Run the example's format on the example's retriever."""
    from examples.own_format import AskFormat
    from examples.own_retriever import open_retriever

    server = Elasticsearch([{"_id": "7", "_source": JAWS}])
    runner, url = await server.start()
    monkeypatch.setenv("ELASTICSEARCH_URL", url)
    retriever = open_retriever(reasonrag.load_config(), [])
    llm = ScriptedLLM(
        [
            "<think>I look it up.</think><ask>director of Jaws</ask>",
            "<think>It says so.</think><answer>Steven Spielberg</answer>",
        ]
    )
    engine = reasonrag.Engine(llm, retriever, AskFormat(), max_steps=4, top_k=2)
    try:
        (trajectory,) = await engine.run([reasonrag.Trajectory(QUESTION)], seeds=[0])
    finally:
        await retriever.aclose()
        await runner.cleanup()
    return trajectory, server.searches


def test_an_own_format_and_an_own_retriever_answer_a_question(monkeypatch):
    from examples.own_format import AskFormat

    trajectory, searches = asyncio.run(answer_with_elasticsearch(monkeypatch))
    assert trajectory.answer == "Steven Spielberg"
    assert trajectory.steps[0].passages == (reasonrag.Passage("7", "Jaws\nJaws is a film by Steven Spielberg."),)
    assert AskFormat().read(trajectory).well_formed
    assert [(search["query"]["multi_match"]["query"], search["size"]) for search in searches] == [
        ("director of Jaws", 2)
    ]


def test_a_search_engine_that_is_gone_is_a_retrieval_error(monkeypatch):
    from examples.own_retriever import open_retriever

    monkeypatch.setenv("ELASTICSEARCH_URL", "http://127.0.0.1:9")

    async def search() -> None:
        async with aclosing(open_retriever(reasonrag.load_config(), [])) as retriever:
            await retriever.search(["Jaws"], 3)

    with pytest.raises(reasonrag.RetrievalError, match="did not answer"):
        asyncio.run(search())


def test_an_own_reward_prefers_the_answer_with_fewer_searches(monkeypatch):
    from examples.own_reward import f1_per_search, short_completions

    trajectory, _ = asyncio.run(answer_with_elasticsearch(monkeypatch))
    thorough = reasonrag.Trajectory(QUESTION, (trajectory.steps[0], *trajectory.steps), trajectory.stop_reason)
    unanswered = reasonrag.Trajectory(QUESTION, trajectory.steps[:1])
    once, twice, never = f1_per_search([trajectory, thorough, unanswered])
    assert (once - twice, never) == (pytest.approx(0.05), 0.0)
    short, long = short_completions([[{"content": "a"}], [{"content": "a" * 1000}]], prompts=[])
    assert short > long == 0.5


def run_notebook(file: str, folder: str) -> None:
    """Run the code cells of a notebook in one name space, in a folder, within a running event loop, as Jupyter does."""
    os.chdir(folder)
    names: dict[str, object] = {}

    cells = json.loads(Path(file).read_text(encoding="utf-8"))["cells"]

    async def run_cells() -> None:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)

    asyncio.run(run_cells())


def test_the_notebook_runs(tmp_path):
    environment = product.environment(MPLBACKEND="agg")
    notebook = ROOT / "examples" / "look_at_a_run.ipynb"
    done = warmed.run(run_notebook, str(notebook), str(tmp_path), environment=environment)
    assert done.returncode == 0, done.stderr
    assert " pairs\n" in done.stdout
    assert (tmp_path / "runs/notebook/clear-pairs.parquet").stat().st_size > 0


def train_by_script(folder: str) -> None:
    from examples.questions_to_policy import main

    print(json.dumps(main(Path(folder), questions=4, max_steps=1)["differences"]))


def test_a_script_goes_from_questions_to_an_evaluated_policy(tmp_path):
    done = warmed.run(train_by_script, str(tmp_path), environment=product.environment())
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert {"em", "retrievals"} <= {row["metric"] for row in differences if row["n"] == 4}
    assert (tmp_path / "dpo/model.safetensors").exists()


@pytest.mark.slow
def test_shards_on_ray_are_those_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    flags = ("--dataset", "demo", "--limit", "6", "--policy", "extractive", "--iterations", "3")
    cache = ("--set", f"retrieval.cache={tmp_path}/cache")
    for number in range(2):
        product.build(*flags, *cache, "--out", tmp_path / "by-hand", "--shard", f"{number}/2")
    file = tmp_path / "by-hand/shards/0-of-2/config.yaml"
    arguments = ("--config", file, "--out", tmp_path / "ray", "--shards", "2", "--address", "local")
    command = [sys.executable, "-m", "examples.build_on_ray", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    assert product.file_digests(tmp_path / "ray") == product.file_digests(tmp_path / "by-hand")
