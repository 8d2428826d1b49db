"""A policy behind a server is asked as it was trained, and a server that was not meant is found before a call."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import Config, load_config
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import as_served
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World
from tests.fakes.model_server import FakeOpenAI
from tests.llm.tiny import loaded

ASKED = ("format.prompts", "retrieval.top_k", "policy.max_tokens", "policy.vllm", "policy.model")


def entry(name: str = "tuned", **more: Any) -> dict[str, Any]:
    """What vLLM lists of a model."""
    return {"id": name, "owned_by": "vllm", "max_model_len": 4096, **more}


def served(server: FakeOpenAI, out: Path | None = None, **settings: Any) -> Config:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return as_served(load_config(overrides={"policy.spec": server.base_url, **overrides}), out)


def asked(config: Config) -> tuple[Any, ...]:
    return tuple(getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in ASKED)


def test_what_vllm_says_of_its_model_is_taken_and_what_is_typed_stays():
    with FakeOpenAI(models=(entry(root=str(demo_folder())),)) as server:
        found = served(server)
        assert asked(found) == ("brief", 1, 48, True, "tuned")
        assert found.policy.card == str(demo_folder())
        typed = served(server, policy__vllm=False, retrieval__top_k=2, policy__max_tokens=64)
        assert asked(typed) == ("brief", 2, 64, False, "tuned")
    assert not server.requests


def test_an_adapter_has_its_own_card_and_the_context_of_its_base(tmp_path: Path):
    (tmp_path / "reasonrag.yaml").write_text("format: {name: search_r1}\nretrieval: {top_k: 5}\n")
    adapter = {"id": "dpo", "owned_by": "vllm", "parent": "base", "root": str(tmp_path), "max_model_len": None}
    with FakeOpenAI(models=(entry("base", root="Qwen/Qwen2.5-7B-Instruct"), adapter)) as server:
        assert asked(served(server, policy__model="base")) == ("default", 3, 512, True, "base")
        found = served(server, policy__model="dpo")
        assert (found.format.name, found.retrieval.top_k) == ("search_r1", 5)
        with pytest.raises(Exception, match="a context of 4096 tokens"):
            served(server, policy__model="dpo", policy__max_tokens=4097)


def test_a_run_goes_on_with_what_it_began_with(world: World, tmp_path: Path):
    flags = {"questions.dataset": str(world.questions), "questions.limit": 1, "retrieval.corpus": str(world.corpus)}
    small = {"search.iterations": 1, "retrieval.cache": str(world.cache), "value.rollouts": 1}
    with ExtractiveServer() as server:
        begun = load_config(overrides={**flags, **small, "policy.spec": server.base_url})
        build_trees(begun, tmp_path / "run")
    with FakeOpenAI(models=(entry("extractor", root=str(demo_folder())),)) as server:
        again = begun.model_copy(update={"policy": begun.policy.model_copy(update={"spec": server.base_url})})
        assert asked(as_served(again, tmp_path / "run")) == ("default", 3, 512, False, "extractor")
        assert (server.looks, server.requests) == (0, [])
        assert build_trees(again, tmp_path / "run")["questions"]["finished"] == 1


BAD: dict[str, tuple[dict[str, Any], str, tuple[str, ...], str]] = {
    "no version": ({}, "", (), "is not the address of its API, which is at http://127.0.0.1:"),
    "whole route": ({}, "/v1/chat/completions", (), "is not the address of its API, which is at http://127.0.0.1:"),
    "several": ({"models": ("a", "b")}, "/v1", (), "serves 2 models (a, b): add --policy-model"),
    "no list": ({"models": None}, "/v1", (), "does not list what it serves: add --policy-model"),
    "no room": (
        {"models": (entry(),)},
        "/v1",
        ("--max-tokens", "4097"),
        "too few for policy.max_tokens 4097: lower it",
    ),
    "no card": ({}, "/v1", ("--card", "no/such/folder"), "--card no/such/folder: that folder has no reasonrag.yaml"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_cannot_be_meant_is_one_line(name: str, world: World, tmp_path: Path) -> None:
    options, path, flags, said = BAD[name]
    with FakeOpenAI(**options) as server:
        address = server.base_url.removesuffix("/v1") + path
        done = product.run("build-tree", *world.flags, "--policy", address, *flags, "--out", tmp_path / "run")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not server.requests


class DemoServer(FakeOpenAI):
    """The demo policy behind HTTP, asked by one request after another."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self._write, **options)
        self._llm = loaded(demo_folder(), device="cpu")
        self._asking, self._answers = ThreadPoolExecutor(1), asyncio.Runner()

    def _write(self, body: dict[str, Any]) -> str:
        messages = tuple(Message(m["role"], m["content"]) for m in body["messages"])
        sampling = Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"])
        prompt = Prompt(messages, stop=tuple(body.get("stop", ())))
        completion = self._asking.submit(self._answers.run, self._llm.complete(prompt, sampling)).result()
        return completion.text


@pytest.mark.slow
def test_one_model_scores_the_same_from_its_folder_and_from_a_server(tmp_path: Path) -> None:
    questions = ("eval", "--dataset", "demo", "--limit", "10", "--set", f"retrieval.cache={tmp_path / 'cache'}")
    with DemoServer(models=("tuned",)) as server:
        policies = ("--policy", "folder=demo", "--policy", f"served={server.base_url}")
        refused = product.run(*questions, *policies, "--out", tmp_path / "eval")
        assert refused.returncode == 2 and not server.requests
        (line,) = (line for line in refused.stderr.splitlines() if line.startswith("error: "))
        assert "served is prompted differently from folder: prompts" in line and "--card served=FOLDER" in line
        card = shutil.copytree(demo_folder(), tmp_path / "card")
        done = product.run(*questions, *policies, "--card", f"served={card}", "--out", tmp_path / "eval")
        assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    folder, behind = (of for of in figures["policies"].values())
    assert figures["asked_differently"] == []
    assert [of["em"] for of in folder.values()] == [of["em"] for of in behind.values()]
