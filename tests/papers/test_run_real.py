"""The whole loop of a real model, by its command, with the shipped policy and questions of the demo world."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from papers.real import DATA_SETS
from reasonrag.demo.world import demo_corpus, demo_questions
from tests import warmed
from tests.e2e import product
from tools.recompute import of_page

pytestmark = pytest.mark.slow

TINY = ("--limit", "4", "--iterations", "4", "--max-steps", "1", "--test-limit", "2")
SOME = ("--only", "rag", "--only", "rejection", "--only", "dpo-2", "--only", "grpo-step")


def write_data(folder: Path) -> Path:
    (folder / "questions").mkdir(parents=True)
    (folder / "corpus").mkdir()
    questions = demo_questions("train", limit=300)
    passages = [json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in demo_corpus()]
    for number, name in enumerate(DATA_SETS):
        with (folder / "questions" / f"{name}.jsonl").open("w") as file:
            for q in questions[number::5]:
                row = {"id": q.id, "question": q.question, "golden_answers": q.golden_answers, "metadata": q.metadata}
                file.write(json.dumps(row) + "\n")
        with gzip.open(folder / "corpus" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(passages)
    return folder


def kill_stage(child: warmed.Child | subprocess.Popen[str], line: str) -> None:
    """SIGKILL the command that begins with `line` as soon as it runs; the plan then ends."""
    product.wait_until(lambda: f"$ {line}" in child.said(), timeout_s=300)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    product.wait_until(lambda: bool(children.read_text()))  # it is shown before it is started
    os.kill(int(children.read_text()), signal.SIGKILL)
    assert child.wait(60) == 137


def test_the_loop_survives_kills_and_its_page_has_the_policies(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "reasonrag" / "demo" / "policy"
    out = tmp_path / "out"
    command = ("papers", "real", "--model", model, "--data", write_data(tmp_path / "data"), *TINY, *SOME, "--out", out)
    kill_stage(product.start(*command), f"reasonrag build-tree --dataset {out}/data/search-1")
    kill_stage(product.start(*command), "reasonrag dpo train")
    done = product.run(*command, timeout_s=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "results" / "real-model.json").read_text(encoding="utf-8"))
    greedy, sampled = figures["settings"].values()
    assert list(greedy["variants"]) == ["base", "rag", "rejection", "dpo-2", "grpo-step"]
    assert list(sampled["variants"]) == ["rejection", "dpo-2"] and greedy["variants"]["rag"]["questions"] == 10
    page = (out / "results" / "real-model.md").read_text(encoding="utf-8")
    assert "--model MODEL --data DATA" in page and str(tmp_path) not in page + json.dumps(figures)
    assert of_page(out / "results" / "real-model.json").largest < 1e-9
