"""What the user gave cannot work: exit code 2, one line on stderr, nothing on stdout, no traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World, pages, questions, write_jsonl
from tests.faults.stubs import Answer, Stub, always
from tests.llm.fake_openai import FakeOpenAI

EXTRACTIVE = ("--policy", "extractive")
SECRET = "sesame-4711"


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


# Questions and corpus


def test_unknown_data_set_names_the_nearest(out: tuple[str, Path]) -> None:
    line = build_refusal("--dataset", "hotpot", *EXTRACTIVE, *out)
    assert "'hotpot'" in line and "did you mean 'hotpotqa'?" in line


def test_no_hub_because_of_offline_mode(out: tuple[str, Path]) -> None:
    line = build_refusal("--dataset", "hotpotqa", *EXTRACTIVE, *out, HF_HUB_OFFLINE="1")
    assert "'hotpotqa'" in line and "Hub" in line


@pytest.mark.slow
@pytest.mark.slow
def test_no_hub_because_it_refuses_connections(out: tuple[str, Path], closed_port: int, tmp_path: Path) -> None:
    line = build_refusal(
        *("--dataset", "hotpotqa", *EXTRACTIVE, *out),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT=f"http://127.0.0.1:{closed_port}",
        HF_HOME=str(tmp_path / "home"),
    )
    assert "'hotpotqa'" in line and "Hub" in line


CORPUS_FAULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no contents": ([{"id": "a", "body": "text"}], "contents missing or empty in 1 row (1)"),
    "duplicate ids": ([*pages(), pages()[3]], f"duplicate id in 1 row ({len(pages()) + 1} 'p3')"),
    "ids 1 and '1'": ([{"id": 1, "contents": "a"}, {"id": "1", "contents": "b"}], "duplicate id in 1 row (2 '1')"),
    "nothing": ([], "no passages"),
}


@pytest.mark.parametrize("fault", CORPUS_FAULTS)
def test_a_corpus_that_cannot_be_used(fault: str, world: World, out: tuple[str, Path], tmp_path: Path) -> None:
    rows, expected = CORPUS_FAULTS[fault]
    corpus = write_jsonl(tmp_path / "bad.jsonl", rows)
    line = build_refusal(*world.flags, "--corpus", corpus, *EXTRACTIVE, *out)
    assert expected in line and "bad.jsonl" in line


def changed(row: int, **changes: Any) -> list[dict[str, Any]]:
    """The world's questions with one row changed."""
    rows = questions()
    rows[row] |= changes
    return rows


QUESTION_FAULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "duplicate ids": (changed(2, id="q0"), "duplicate id in 1 row (3 'q0')"),
    "ids 1 and '1'": ([questions()[0] | {"id": 1}, questions()[1] | {"id": "1"}], "duplicate id in 1 row (2 '1')"),
    "no answers": (changed(4, golden_answers=[]), "golden_answers missing or empty in 1 row (5)"),
    "no question": (changed(0, question=" "), "question missing or empty in 1 row (1)"),
    "no id column": ([{"question": "Who?", "golden_answers": ["me"]}], "no id column"),
    "nothing": ([], "no questions"),
}


@pytest.mark.parametrize("fault", QUESTION_FAULTS)
def test_questions_that_cannot_be_used(fault: str, world: World, out: tuple[str, Path], tmp_path: Path) -> None:
    rows, expected = QUESTION_FAULTS[fault]
    bad = write_jsonl(tmp_path / "bad.jsonl", rows)
    line = build_refusal("--dataset", bad, "--corpus", world.corpus, *EXTRACTIVE, *out)
    assert expected in line and "bad" in line


def test_files_that_are_not_there(world: World, out: tuple[str, Path]) -> None:
    assert "none.jsonl" in build_refusal("--dataset", "none.jsonl", *EXTRACTIVE, *out)
    assert "none.jsonl" in build_refusal(*world.flags, "--corpus", "none.jsonl", *EXTRACTIVE, *out)


# Settings

SETTING_FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "--set without '='": (("--set", "search.iterations"), "--set 'search.iterations'"),
    "--set with an unknown key": (("--set", "search.iteration=3"), "did you mean 'iterations'?"),
    "a value out of range": (("--iterations", "0"), "search.iterations"),
    "a word for a number": (("--iterations", "many"), "'many'"),
    "an unknown flag": (("--iteration", "3"), "--iterations"),
    "an unknown preset": (("--preset", "papre"), "'paper'"),
    "an unknown format": (("--set", "format.name=hipraq"), "format 'hipraq' is unknown; known: reasonrag"),
    "unknown prompts": (("--prompts", "briefly"), "'briefly'"),
}


@pytest.mark.parametrize("fault", SETTING_FAULTS)
def test_a_setting_that_cannot_be_used(fault: str, world: World, out: tuple[str, Path]) -> None:
    flags, expected = SETTING_FAULTS[fault]
    assert expected in build_refusal(*world.flags, *EXTRACTIVE, *flags, *out)
    assert not out[1].exists()


CONFIG_FAULTS = {
    "an unknown key": ("search:\n  itterations: 4\n", "'search.itterations'; did you mean 'iterations'?"),
    "an unknown section": ("serach:\n  iterations: 4\n", "'serach'; did you mean 'search'?"),
    "not YAML": (
        "search: [1\nseed: {\n",
        "mine.yaml cannot be read: while parsing a flow sequence in line 1, column 9:",
    ),
    "a list": ("- search\n", "not a mapping"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_configuration_that_cannot_be_used(fault: str, world: World, out: tuple[str, Path], tmp_path: Path) -> None:
    text, expected = CONFIG_FAULTS[fault]
    (tmp_path / "mine.yaml").write_text(text)
    assert expected in build_refusal(*world.flags, *EXTRACTIVE, "--config", tmp_path / "mine.yaml", *out)


# The run's folder


def test_a_file_where_the_folder_should_be(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "choose another one for --out" in build_refusal(*world.flags, *EXTRACTIVE, "--out", tmp_path / "file")
    assert "choose another one for --out" in build_refusal(*world.flags, *EXTRACTIVE, "--out", tmp_path / "file" / "x")


def test_a_run_folder_of_another_configuration(world: World, finished_run: Path) -> None:
    line = build_refusal(*world.flags, *EXTRACTIVE, "--seed", "8", "--out", finished_run)
    assert "seed: 7 there, 8 now" in line


def test_pairs_of_a_folder_without_a_run(tmp_path: Path) -> None:
    assert "run.json" in refusal("pairs", tmp_path)


# Models


def test_no_policy_without_a_gpu_names_the_choices(world: World, out: tuple[str, Path]) -> None:
    line = build_refusal(*world.flags, *out, CUDA_VISIBLE_DEVICES="")
    assert all(
        choice in line for choice in ("Qwen/Qwen2.5-7B-Instruct", "http://", "hf:", "vllm:", "demo", "extractive")
    )


def test_an_unknown_policy_names_the_choices(world: World, out: tuple[str, Path]) -> None:
    assert "extractive" in build_refusal(*world.flags, "--policy", "gpt-4", *out)


def test_a_reader_that_cannot_judge_is_refused_as_judge(world: World, out: tuple[str, Path]) -> None:
    line = build_refusal(*world.flags, *EXTRACTIVE, "--value", "judge", *out)
    assert "extractive cannot judge" in line and "--value rollout" in line


def test_a_server_that_refuses_connections(world: World, out: tuple[str, Path]) -> None:
    line = build_refusal(*world.flags, "--policy", "http://127.0.0.1:9/v1", "--policy-model", "m", *out)
    assert "http://127.0.0.1:9/v1" in line


def test_a_retrieval_server_that_refuses_connections(world: World, out: tuple[str, Path]) -> None:
    line = build_refusal("--dataset", world.questions, *EXTRACTIVE, "--retriever-url", "http://127.0.0.1:9", *out)
    assert "127.0.0.1:9" in line


def test_a_server_that_refuses_the_key_does_not_get_it_printed(world: World, out: tuple[str, Path]) -> None:
    refusal = Answer(401, '{"error": {"message": "this key is not known: {authorization}"}}')
    with Stub(always(refusal)) as server:
        line = build_refusal(
            *world.flags, "--policy", server.base_url, "--policy-model", "m", *out, OPENAI_API_KEY=SECRET
        )
    assert server.requests
    assert "401" in line
    assert SECRET not in line


def test_a_model_that_the_server_does_not_list(world: World, out: tuple[str, Path]) -> None:
    with FakeOpenAI(models=("small", "large")) as server:
        line = build_refusal(*world.flags, "--policy", server.base_url, "--policy-model", "medium", *out)
        assert [request["max_tokens"] for request in server.requests] == [1], "a server may serve what it does not list"
    assert "'medium'" in line and "small, large" in line


def test_the_right_model_is_taken_after_a_wrong_one_in_the_same_folder(world: World, out: tuple[str, Path]) -> None:
    with ExtractiveServer() as server:
        build_refusal(*world.flags, "--policy", server.base_url, "--policy-model", "extractr", *out)
        product.build(*world.flags, *server.flags, "--iterations", "2", "--limit", "2", *out)


@pytest.mark.parametrize("name", ["hf:/no/such/folder", "hf:no-such-model"])
def test_a_local_model_that_does_not_exist(name: str, world: World, out: tuple[str, Path]) -> None:
    line = build_refusal(*world.flags, "--policy", name, *out, HF_HUB_OFFLINE="1")
    assert name.removeprefix("hf:") in line


PASSWORDS = {
    "policy": ("--policy", f"http://me:{SECRET}@127.0.0.1:9/v1", "--policy-model", "m"),
    "policy in capitals": ("--policy", f"HTTP://me:{SECRET}@127.0.0.1:9/v1", "--policy-model", "m"),
    "judge": (
        *EXTRACTIVE,
        *("--value", "judge", "--judge", f"https://me:{SECRET}@127.0.0.1:9/v1", "--judge-model", "m"),
    ),
    "retriever": (*EXTRACTIVE, "--retriever-url", f"http://me:{SECRET}@127.0.0.1:9"),
}


@pytest.mark.parametrize(
    "where",
    [
        "policy",
        "judge",
        "policy in capitals",
        "retriever",
    ],
)
def test_a_password_in_a_url_is_refused_and_never_shown_or_kept(
    where: str, world: World, out: tuple[str, Path]
) -> None:
    assert SECRET not in build_refusal(*world.flags, *PASSWORDS[where], *out)
    assert not out[1].exists()


def test_a_key_never_reaches_the_run_folder(world: World, out: tuple[str, Path]) -> None:
    with ExtractiveServer() as server:
        done = product.build(
            *world.flags, *server.flags, "--iterations", "2", "--limit", "2", *out, OPENAI_API_KEY=SECRET
        )
        assert f"Bearer {SECRET}" in {headers.get("Authorization") for headers in server.headers}
    assert SECRET not in done.stdout + done.stderr
    assert not [file for file in out[1].rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


# Shards


def test_shards_without_a_folder(world: World, out: tuple[str, Path]) -> None:
    build = (*world.flags, *EXTRACTIVE)
    assert "needs --out" in build_refusal(*build, "--shard", "0/2")
    assert "'2/2' is not I/S" in build_refusal(*build, *out, "--shard", "2/2")
