from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contrib.simulated_search import Noise, SimulatedRetriever, open_retriever
from reasonrag.core.config import load_config
from reasonrag.core.errors import RetrievalError
from reasonrag.core.types import Prompt
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.tables import count_calls
from reasonrag.retrieval.base import BatchedRetriever
from reasonrag.storage.journal import Journal
from tests.fakes.scripted import ScriptedLLM

QUERIES = [f"who built ship {n}" for n in range(200)]


def written(prompt: Prompt, sampling: Sampling) -> str:
    """Two passages; a seed in forty gives none."""
    if sampling.seed is not None and sampling.seed % 40 == 0:
        return "I am only a model."
    noisy = "do not help" in prompt.messages[1].content
    return f"**Passage 1: Ship**\nIt is {'blue' if noisy else 'Ruvik'}\nand old.\n\nPassage 2: Port\nIt is calm."


def simulated(first: float = 0.0, last: float = 0.0, steps: int = 0, *, seed: int = 0) -> SimulatedRetriever:
    return SimulatedRetriever(ScriptedLLM(written), Noise(first, last, steps), seed=seed)


def noisy(retriever: SimulatedRetriever) -> set[str]:
    found = asyncio.run(retriever.search(QUERIES, 1))
    return {
        query for query, (passage,) in zip(QUERIES, found, strict=True) if passage.id.startswith("simulated:noisy:")
    }


def test_a_model_writes_marked_passages_and_its_calls_are_journalled(tmp_path: Path) -> None:
    retriever = simulated()
    config = load_config()

    async def search() -> tuple[object, dict[str, dict[str, object]]]:
        journal = Journal(tmp_path / "journal.sqlite")
        searches = BatchedRetriever.of_run(retriever, journal)
        found = await searches.search([QUERIES[0], "", QUERIES[1]], 2)
        calls = count_calls(journal, config)
        journal.close()
        return found, calls

    found, calls = asyncio.run(search())
    (first, second), empty, _ = found
    assert empty == ()
    assert first.id.startswith("simulated:useful:")
    assert (first.contents, second.contents) == ("Ship\nIt is Ruvik and old.", "Port\nIt is calm.")
    assert retriever.fingerprint.startswith("simulated-")
    assert calls["simulator"]["calls"] == len(retriever._inner.prompts)
    asked = len(retriever._inner.prompts)
    again, _ = asyncio.run(search())
    assert again == found
    assert len(retriever._inner.prompts) == asked  # from the journal


def test_the_share_of_noise_rises_over_training_steps_and_no_query_turns_back() -> None:
    retriever = simulated(0.1, 0.7, 10)
    before = noisy(retriever)
    assert not retriever.at_step(0)
    assert retriever.at_step(5)
    between = noisy(retriever)
    retriever.at_step(10)
    after = noisy(retriever)
    assert before < between < after
    shares = [len(queries) / len(QUERIES) for queries in (before, between, after)]
    assert shares == pytest.approx([0.1, 0.3, 0.7], abs=0.08)
    assert noisy(simulated(0.1)) == before != noisy(simulated(0.1, seed=1))


def test_a_step_of_training_forgets_what_was_found_with_another_share() -> None:
    retriever = simulated(0.0, 1.0, 2)
    searches = BatchedRetriever(retriever)

    async def at(step: int) -> str:
        searches.at_step(step)
        ((passage, *_),) = await searches.search([QUERIES[0]], 1)
        return passage.id.split(":")[1]

    async def both() -> list[str]:
        return [await at(0), await at(2)]

    assert asyncio.run(both()) == ["useful", "noisy"]


def test_a_model_that_writes_no_passage_is_an_error() -> None:
    silent = SimulatedRetriever(ScriptedLLM(["Sorry."] * 3))
    with pytest.raises(RetrievalError, match="wrote no passage in 3 attempts"):
        asyncio.run(silent.search(["x"], 1))


def test_the_model_is_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATOR", "http://127.0.0.1:9/v1#org/model")
    assert open_retriever(load_config(), []).llm.name == "org/model"
