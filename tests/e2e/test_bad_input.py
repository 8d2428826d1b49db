"""What the user gave cannot work: exit code 2, one line on stderr, nothing on stdout, no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World

EXTRACTIVE = ("--policy", "extractive")


def refusal(*args: str | Path, **env: str) -> str:
    """The one line with which `reasonrag` refuses."""
    done = product.run(*args, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    print(line)
    return line


def build_refusal(*args: str | Path, **env: str) -> str:
    """The one line with which `reasonrag build-tree` refuses."""
    return refusal("build-tree", *args, **env)


@pytest.fixture
def out(tmp_path: Path) -> tuple[str, Path]:
    return "--out", tmp_path / "run"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of loopback that is taken and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


# The messages of settings, questions and corpora have tests in tests/core, tests/storage and tests/retrieval: here is
# one of each kind, from the command line.
NO_SERVER = "http://127.0.0.1:9"
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown data set": (("--dataset", "hotpot", *EXTRACTIVE), "neither a file nor a known name"),
    "no Hub in offline mode": (("--dataset", "hotpotqa", *EXTRACTIVE), "'hotpotqa'"),
    "questions that are not there": (("--dataset", "none.jsonl", *EXTRACTIVE), "none.jsonl"),
    "a corpus that is not there": (("--corpus", "none.jsonl", *EXTRACTIVE), "none.jsonl"),
    "--set with an unknown key": (("--set", "search.iteration=3", *EXTRACTIVE), "did you mean 'search.iterations'?"),
    "a value out of range": (("--iterations", "0", *EXTRACTIVE), "search.iterations"),
    "an unknown flag": (("--iteration", "3", *EXTRACTIVE), "--iterations"),
    "no policy": ((), "Qwen/Qwen2.5-7B-Instruct"),
    "an unknown policy": (("--policy", "gpt-4"), "extractive"),
    "a judge that cannot judge": ((*EXTRACTIVE, "--value", "judge"), "extractive cannot judge"),
    "no server": (("--policy", f"{NO_SERVER}/v1", "--policy-model", "m"), f"{NO_SERVER}/v1"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_input_is_one_line(fault: str, world: World, out: tuple[str, Path]) -> None:
    flags, expected = REFUSED[fault]
    assert expected in build_refusal(
        *world.flags_but(*flags), *flags, *out, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1"
    )
    assert not list(out[1].glob("trees"))


@pytest.mark.slow
def test_no_hub_because_it_refuses_connections(out: tuple[str, Path], closed_port: int, tmp_path: Path) -> None:
    line = build_refusal(
        *("--dataset", "hotpotqa", *EXTRACTIVE, *out),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT=f"http://127.0.0.1:{closed_port}",
        HF_HOME=str(tmp_path / "home"),
    )
    assert "'hotpotqa'" in line and "Hub" in line


def test_a_configuration_that_cannot_be_read(world: World, out: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("search: [1\nseed: {\n")
    line = build_refusal(*world.flags, *EXTRACTIVE, "--config", tmp_path / "mine.yaml", *out)
    assert "mine.yaml cannot be read: while parsing a flow sequence in line 1, column 9:" in line


def test_folders_that_cannot_be_used(world: World, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        assert "choose another one for --out" in build_refusal(*world.flags, *EXTRACTIVE, "--out", out)
    line = build_refusal(*world.flags, *EXTRACTIVE, "--seed", "8", "--out", finished_run)
    assert "seed: 7 there, 8 now" in line
    assert "run.json" in refusal("pairs", tmp_path)


def test_the_right_model_is_taken_after_a_wrong_one_in_the_same_folder(world: World, out: tuple[str, Path]) -> None:
    with ExtractiveServer() as server:
        line = build_refusal(*world.flags, "--policy", server.base_url, "--policy-model", "extractr", *out)
        assert "'extractr'" in line and "extractor" in line
        product.build(*world.flags, *server.flags, "--iterations", "2", "--limit", "2", *out)


@pytest.mark.parametrize("name", ["hf:/no/such/folder", "hf:no-such-model"])
def test_a_local_model_that_does_not_exist(name: str, world: World, out: tuple[str, Path]) -> None:
    line = build_refusal(*world.flags, "--policy", name, *out, HF_HUB_OFFLINE="1")
    assert name.removeprefix("hf:") in line


# Shards


def test_shards_without_a_folder(world: World, out: tuple[str, Path]) -> None:
    build = (*world.flags, *EXTRACTIVE)
    assert "needs --out" in build_refusal(*build, "--shard", "0/2")
    assert "'2/2' is not I/S" in build_refusal(*build, *out, "--shard", "2/2")


def test_the_demo_world_is_exported_for_flashrag_alone(out):
    assert "use --to flashrag" in refusal("export", "demo", "--to", "verl", *out)


def test_a_part_that_ends_the_process_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef worth(predictions, golden_answers):\n    sys.exit(0)\n")
    args = ("--preset", "demo", "--limit", "1", "--iterations", "1", "--outcome", "python:mine:worth")
    done = product.run("build-tree", *args, "--out", tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"ended by {tmp_path}/mine.py:3 (SystemExit); let it raise an exception" in done.stderr


def test_a_question_nested_900_deep_is_one_line(tmp_path: Path) -> None:
    row = {"id": "1", "question": "Who?", "golden_answers": ["x"]}
    (tmp_path / "deep.jsonl").write_text(json.dumps(row)[:-1] + ', "metadata": {"x": ' + "[" * 900 + "]" * 900 + "}}")
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "contents": "Jaws"}))
    args = ("--dataset", tmp_path / "deep.jsonl", "--corpus", tmp_path / "corpus.jsonl", *EXTRACTIVE)
    assert "nested too deeply" in refusal("build-tree", *args, "--out", tmp_path / "run")


def test_a_working_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {product.REASONRAG} dpo train --preset demo --data x"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=product.environment())
    assert (done.returncode, done.stderr) == (2, "error: the working folder was deleted: go to another one\n")
