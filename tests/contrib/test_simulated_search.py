from __future__ import annotations

import asyncio

import pytest

from contrib.simulated_search import SimulatedRetriever, open_retriever
from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, RetrievalError
from tests.fakes.scripted import ScriptedLLM


def test_a_model_writes_marked_passages() -> None:
    reply = "Sure.\n**Passage 1: Ship**\nIt is Ruvik\nand old.\n\nPassage 2: Port\nIt is calm.\nPassage 3: Empty"
    retriever = SimulatedRetriever(ScriptedLLM(["I am only a model.", reply]))
    ((first, second),) = asyncio.run(retriever.search(["who built it"], 2))
    assert (first.contents, second.contents) == ("Ship\nIt is Ruvik and old.", "Port\nIt is calm.")
    assert first.id.startswith("simulated:") and retriever.fingerprint.startswith("simulated-")
    with pytest.raises(RetrievalError, match="wrote no passage in 3 attempts"):
        asyncio.run(SimulatedRetriever(ScriptedLLM(["Sorry."] * 3)).search(["x"], 1))


def test_the_model_is_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATOR", "http://127.0.0.1:9/v1#org/model")
    assert open_retriever(load_config(), []).llm.name == "org/model"
    monkeypatch.setenv("SIMULATOR", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="SIMULATOR has to be an address and a model"):
        open_retriever(load_config(), [])
