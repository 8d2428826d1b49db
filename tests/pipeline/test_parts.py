from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from reasonrag.core.config import Config, JudgeConfig, ModelConfig, PolicyCard, load_config
from reasonrag.core.errors import ConfigError, RetrievalError
from reasonrag.core.types import Question
from reasonrag.formats import FORMATS, PromptSet, ReasonRAGFormat, open_format
from reasonrag.pipeline.parts import Parts, check, judge_service, open_parts, open_retriever
from tests.fakes.scripted import ScriptedLLM
from tests.toys import ToyRetriever


def named(config: ModelConfig) -> ScriptedLLM:
    return ScriptedLLM([], name=config.model or "unnamed")


def toy_retriever(config: Config, questions: list[Question]) -> ToyRetriever:
    return ToyRetriever()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    question = {"id": "1", "question": "Who?", "golden_answers": ["x"]}
    (tmp_path / "toy.jsonl").write_text(json.dumps(question) + "\n")
    return {
        "questions.dataset": str(tmp_path / "toy.jsonl"),
        "retrieval.kind": f"python:{__name__}:toy_retriever",
        "policy.spec": f"python:{__name__}:named",
        "policy.model": "small",
    }


def parts(files: dict[str, str], **settings: object) -> Parts:
    return open_parts(load_config(overrides={**files, **{k.replace("__", "."): v for k, v in settings.items()}}))


def test_the_policy_judges_itself_unless_another_model_is_named(files):
    opened = parts(files, value__kind="judge")
    assert opened.judge is opened.policy, "a model in this process is loaded once"


def test_a_judge_model_without_a_server_of_its_own_is_one_of_the_policys(files):
    opened = parts(files, value__kind="judge", judge__model="big")
    assert (opened.policy.name, opened.judge.name) == ("small", "big")
    assert opened.content["judge"] == "big"


def test_another_name_of_the_same_file_is_another_run(files, tmp_path):
    before = parts(files).content
    (tmp_path / "renamed.jsonl").write_bytes((tmp_path / "toy.jsonl").read_bytes())
    after = parts(files | {"questions.dataset": str(tmp_path / "renamed.jsonl")}).content
    assert before["questions"] != after["questions"]


def test_formats_and_retrievers_of_ones_own_are_named_by_module():
    config = load_config(overrides={"format.name": "python:reasonrag.formats.reasonrag:ReasonRAGFormat"})
    assert isinstance(open_format(config), ReasonRAGFormat)
    shipped = {"reasonrag", "search_r1", "hiprag", "search_p1", "when_to_search", "tool_calls"}
    assert set(FORMATS) == shipped
    with pytest.raises(ConfigError, match=r"bm25, dense, hybrid, remote, python:"):
        open_retriever(load_config(overrides={"retrieval.kind": "splade"}), [])


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_vectors_need_an_index(kind):
    with pytest.raises(ConfigError, match=f"{kind} search needs an index: run `index build --kind dense`"):
        open_retriever(load_config(overrides={"retrieval.kind": kind}), [])


def test_a_policy_that_was_trained_with_other_prompts_is_asked_with_a_warning(tmp_path):
    config = load_config()
    for fingerprint, warnings in ((open_format(config).fingerprint, 0), ("0123456789012345", 1)):
        PolicyCard.of(config.model_dump(mode="json"), fingerprint).write(tmp_path)
        with capture_logs() as told:
            open_format(load_config(overrides={"policy.spec": f"hf:{tmp_path}"}))
        assert len(told) == warnings


def test_a_search_engine_that_is_away_stops_a_run_that_begins_and_none_that_goes_on(files: dict[str, str]) -> None:
    with socket.socket() as free:  # bound and not listening: nobody else answers there
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def check_it(*, begun: bool) -> None:
            async with aclosing(parts(files, retrieval__kind="remote", retrieval__url=[address])) as opened:
                await check(opened, begun=begun)

        with pytest.raises(RetrievalError, match="answer"):
            asyncio.run(check_it(begun=False))
        with capture_logs() as logs:
            asyncio.run(check_it(begun=True))
    assert "the run goes on, as it had begun" in logs[-1]["event"]


def test_a_judge_of_an_api_that_takes_one_temperature_alone_is_asked_with_it():
    service = judge_service(ScriptedLLM([]), JudgeConfig(temperature=1), PromptSet.find("brief"))
    assert service.sampling.temperature == 1
