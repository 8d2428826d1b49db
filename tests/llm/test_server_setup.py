from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from aiohttp import web

from reasonrag.core.config import ModelConfig, load_config
from reasonrag.core.errors import ConfigError, LLMError, RunError
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.openai_wire import ServedModel
from reasonrag.llm.server import ServerLLM
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import open_llm
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.stubs import Answer

PROMPT = Prompt((Message("user", "Who directed Jaws?"),))
KEY = "sk-very-secret-0123456789"


def check(server: FakeOpenAI, model: str = "fake", base_url: str | None = None) -> None:
    async def run():
        async with aclosing(ServerLLM(base_url or server.base_url, model, api_key=KEY)) as llm:
            await llm.check()

    asyncio.run(run())


def test_check_accepts_a_server_that_lists_the_model_or_lists_nothing():
    with FakeOpenAI(models=("other", "fake")) as server:
        check(server)
    with FakeOpenAI(models=None) as server:
        check(server)


def test_check_accepts_a_server_that_serves_what_it_does_not_list(capfd):
    with FakeOpenAI(models=("other",), serves_unlisted=True) as server:
        check(server)
    assert [request["max_tokens"] for request in server.requests] == [1]
    assert "a server answers for a model that it does not list" in capfd.readouterr().out


@pytest.mark.parametrize("format", [{"format.name": "search_r1"}, {"format.open_tags": True}])
def test_a_server_that_continues_no_turn_is_found_out_before_a_call_is_paid(format, tmp_path):
    with FakeOpenAI(strict=("continue_final_message",)) as server:
        asked = {"questions.dataset": "demo", "questions.limit": 2, "policy.spec": server.base_url}
        config = load_config(overrides={**asked, "policy.model": "fake", **format})
        with pytest.raises(ConfigError, match=r"the server of fake cannot continue .*policy\.api=completions"):
            build_trees(config, tmp_path / "run")
    assert [request["max_tokens"] for request in server.requests] == [1]


def test_a_server_without_a_route_for_texts_is_found_out_too(tmp_path):
    class NoTexts(FakeOpenAI):
        async def good(self, request: web.Request, body: dict) -> web.Response:
            return web.Response(status=404)

    with NoTexts() as server:
        asked = {"questions.dataset": "demo", "questions.limit": 2, "format.name": "search_r1"}
        policy = {"spec": server.base_url, "model": "fake", "api": "completions", "tokenizer": str(demo_folder())}
        config = load_config(overrides=asked | {f"policy.{name}": value for name, value in policy.items()})
        with pytest.raises(ConfigError, match="takes no prompts as text either: take another server"):
            build_trees(config, tmp_path / "run")


def test_a_demo_policy_is_asked_in_no_format_that_it_does_not_speak(tmp_path):
    config = load_config(preset="demo", overrides={"questions.limit": 2, "format.name": "search_r1"})
    with pytest.raises(ConfigError, match="demo speaks the format reasonrag; give --policy demo:search_r1"):
        build_trees(config, tmp_path / "run")


def test_check_says_that_nobody_answers():
    with FakeOpenAI() as server:
        pass
    with pytest.raises(LLMError, match="no server answers") as caught:
        check(server)
    assert f"(cannot connect to 127.0.0.1:{server.port} (Connection refused))" in str(caught.value)
    assert caught.value.cause == "unreachable" and KEY not in str(caught.value)


def test_an_address_without_the_version_is_told_what_it_lacks():
    class Page(FakeOpenAI):
        async def _list(self, request: web.Request) -> web.Response:
            return web.Response(text="<html>It works!</html>")

    with (
        Page(faults=[Answer(404)]) as server,
        pytest.raises(ConfigError, match="is not a list of models; an address ends in the version"),
    ):
        check(server)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("key", "said"), [("", "no key was sent"), (KEY, "a key was sent")])
def test_a_refusal_names_the_variable_of_the_key(status, key, said, monkeypatch):
    monkeypatch.setenv("SEA_KEY", key)

    async def ask(asked: str) -> str:
        config = ModelConfig(spec=server.base_url, model="fake", api_key_env="SEA_KEY")
        async with aclosing(open_llm(config, "policy")) as llm:
            with pytest.raises(LLMError) as caught:
                await (llm.check() if asked == "check" else llm.complete(PROMPT, Sampling()))
        return str(caught.value)

    refusal = Answer(status, '{"error": {"message": "who are you"}}')

    class Refusing(FakeOpenAI):
        async def _list(self, request: web.Request) -> web.Response:
            return await refusal.meet(request)

    with Refusing(faults=[refusal]) as server:
        messages = [asyncio.run(ask(asked)) for asked in ("check", "complete")]
    for message in messages:
        assert f"HTTP {status}: who are you ({said}; it is read from SEA_KEY)" in message and KEY not in message


def test_neither_name_nor_repr_shows_a_path_or_the_key():
    llm = ServerLLM("http://127.0.0.1:1/v1", "/models/private/policy", api_key=KEY)
    assert llm.name == "policy"
    assert KEY not in repr(llm)


@pytest.mark.parametrize("second", [{"root": "/data/llama-8b"}, {"root": "/disk2/qwen-7b", "max_model_len": 64}])
def test_servers_of_one_name_are_of_one_model_and_the_smallest_context_counts(second):
    first = {"id": "fake", "root": "/disk1/qwen-7b", "max_model_len": 8192}
    with FakeOpenAI(models=(first,)) as one, FakeOpenAI(models=({"id": "fake", **second},)) as other:
        llm = ServerLLM([one.base_url, other.base_url], "fake")

        async def checked() -> ServedModel | None:
            async with aclosing(llm):
                return await llm.check()

        if "llama" in second["root"]:
            with pytest.raises(ConfigError, match="different models under that name: /disk1/qwen-7b, /data/llama-8b"):
                asyncio.run(checked())
        else:
            assert asyncio.run(checked()).context == 64


def test_servers_that_serve_different_models_are_refused_where_none_is_named():
    with (
        FakeOpenAI(models=("one",), serves_unlisted=True) as one,
        FakeOpenAI(models=("two",), serves_unlisted=True) as two,
    ):

        async def checked() -> None:
            async with aclosing(ServerLLM([one.base_url, two.base_url], "")) as llm:
                await llm.check()

        with pytest.raises(ConfigError, match="does not serve 'one'; it lists: two"):
            asyncio.run(checked())


@pytest.mark.parametrize("after", ["/disk/qwen-7b", "/disk/qwen-7b-v2"])
def test_a_server_that_was_away_and_comes_back_with_other_weights_ends_the_run(after):
    entry = {"id": "fake", "root": "/disk/qwen-7b"}
    restarts = {"faults": [Answer(503)] * 3, "edit": lambda request, answer: entry.update(root=after)}

    async def asked(server: FakeOpenAI) -> str:
        async with aclosing(ServerLLM(server.base_url, "fake")) as llm:
            await llm.check()
            return (await llm.complete(PROMPT, Sampling())).text

    with FakeOpenAI(models=(entry,), **restarts) as server:
        if after == "/disk/qwen-7b":
            assert asyncio.run(asked(server)) == "ok"
        else:
            with pytest.raises(RunError, match=r"begun with qwen-7b behind the name fake, which is now qwen-7b-v2; "):
                asyncio.run(asked(server))
        assert server.looks == 2


def test_an_address_among_several_is_checked_like_one():
    several = ModelConfig(spec="http://a:1/v1,https://b:2/v1/", model="m", concurrency=8)
    llm = open_llm(several, "policy")
    assert (llm.name, llm.slots.limit) == ("m", 16)
    with pytest.raises(ConfigError, match="'b:2/v1' is not an http"):
        open_llm(ModelConfig(spec="http://a:1/v1,b:2/v1", model="m"), "policy")
    with pytest.raises(ConfigError, match="password"):
        load_config(overrides={"policy.spec": "http://a:1/v1,http://me:hush@b:2/v1"})
