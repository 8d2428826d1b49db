from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.types import Completion, Message, Prompt, Span
from reasonrag.llm.base import Sampling
from reasonrag.llm.server import ServerLLM
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.stubs import Answer

PROMPT = Prompt((Message("system", "Be brief."), Message("user", "Who directed Jaws?")), stop=("</query>", "</answer>"))
KEY = "sk-very-secret-0123456789"


def ask(server: FakeOpenAI, prompt: Prompt = PROMPT, sampling: Sampling | None = None, **settings) -> Completion:
    return asyncio.run(asked(server, [prompt], sampling or Sampling(seed=7), **settings))[0]


async def asked(server: FakeOpenAI, prompts: Sequence[Prompt], sampling: Sampling, **settings):
    llm = ServerLLM(server.base_url, "fake", **{"backoff_s": 0.01, "timeout_s": 60.0, "patience_s": 60.0, **settings})
    async with aclosing(llm):
        return await asyncio.gather(*(llm.complete(prompt, sampling) for prompt in prompts))


def failure(server: FakeOpenAI, **settings) -> LLMError:
    with pytest.raises(LLMError) as caught:
        ask(server, **settings)
    return caught.value


def answered(
    text: str = "ok", *, edit=lambda request, answer: None, ignores_stop: bool = False, **settings
) -> Completion:
    """The completion of a server that writes `text` and edits its answer."""
    with FakeOpenAI(lambda request: text, edit=edit, ignores_stop=ignores_stop) as server:
        return ask(server, **settings)


def with_choice(**values):
    """Edit an answer: these values in its first choice."""
    return lambda request, answer: answer["choices"][0].update(values)


def test_everything_that_was_asked_for_is_sent():
    with FakeOpenAI() as server:
        ask(server, sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=33, seed=5), api_key=KEY)
    (body,) = server.requests
    assert body == {
        "model": "fake",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who directed Jaws?"}],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 33,
        "seed": 5,
        "stop": ["</query>", "</answer>"],
    }
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("written", "settings", "read", "reason"),
    [
        ("So <query>Jaws</query> and more", {}, "So <query>Jaws</query>", "stop"),
        ("<answer>a</answer> <query>b</query>", {"ignores_stop": True}, "<answer>a</answer>", "stop"),
        ("<query>Ja", {"edit": with_choice(finish_reason="length")}, "<query>Ja", "length"),
        ("<query>Ja", {"edit": with_choice(stop_reason=None), "vllm": True}, "<query>Ja", "stop"),
        ("ok", {"edit": with_choice(finish_reason=None)}, "ok", "other"),
    ],
    ids=["put back", "ignored by the server", "out of tokens", "vLLM's end token", "no reason"],
)
def test_a_text_ends_with_the_stop_string_that_ended_it(written, settings, read, reason):
    completion = answered(written, **settings)
    assert (completion.text, completion.finish_reason) == (read, reason)


def test_a_closing_tag_is_restored_for_a_tag_that_the_open_turn_began():
    prompt = Prompt(PROMPT.messages, turn=(Span("<query>"),), stop=("</query>",))
    with FakeOpenAI(lambda request: "Jaws</query>") as server:
        completion = ask(server, prompt)
    assert completion.text == "Jaws</query>"
    assert server.requests[0]["messages"][-1] == {"role": "assistant", "content": "<query>"}
    assert server.requests[0]["continue_final_message"] is True
    assert server.requests[0]["add_generation_prompt"] is False


def test_a_quota_that_is_spent_is_refused_at_once():
    spent = {"message": "You exceeded your current quota", "type": "insufficient_quota", "code": "no_credit"}
    with FakeOpenAI(faults=[Answer(429, json.dumps({"error": spent}))]) as server:
        error = failure(server)
    assert error.cause == "refused" and "HTTP 429: You exceeded your current quota" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "faults",
    [
        [Answer(408), Answer(409), Answer(425)],
        [Answer(200, '{"choices": [{"message": null}]}'), Answer(200, "[1]")],
        [Answer(200, '{"choices": [{"message": {"content": [1]}}]}')],
        [Answer(200, "{}", {"Content-Encoding": encoding}) for encoding in ("gzip", "br", "zstd")],
    ],
    ids=["4xx", "no message", "no text", "not in that encoding"],
)
def test_passing_trouble_is_overcome(faults):
    with FakeOpenAI(faults=faults) as server:
        completion = ask(server)
    assert completion.text == "ok"
    assert len(server.requests) == len(faults) + 1


@pytest.mark.parametrize("message", ["no such thing", "'top_p' must be in (0, 1]"])
def test_a_refusal_is_final_also_of_the_value_of_a_known_parameter(message):
    with FakeOpenAI(faults=[Answer(400, json.dumps({"error": {"message": message}}))]) as server:
        error = failure(server)
    assert (error.cause, len(server.requests)) == ("refused", 1) and f"HTTP 400: {message}" in str(error)


@pytest.mark.parametrize("status", [401, 500])
def test_a_key_that_the_server_echoes_is_not_in_the_error(status):
    body = json.dumps({"error": {"message": "bad header {authorization}\x1b[31m\nagain"}})
    with FakeOpenAI(faults=[Answer(status, body)] * 2) as server:
        error = failure(server, api_key=KEY, max_retries=1)
    assert KEY not in str(error) and KEY not in repr(error) and KEY not in repr(error.__cause__)
    assert "\x1b" not in str(error) and "\n" not in str(error)
    assert "Bearer ***" in str(error)


@pytest.mark.fault(
    "18", "the prompt and what it may write exceed the context (400)", "not asked again, under its own cause"
)
def test_a_prompt_too_long_is_counted_as_such(figure):
    message = "This model's maximum context length is 4096 tokens. However, your max_tokens is not supported here."
    with FakeOpenAI(faults=[Answer(400, json.dumps({"error": {"message": message}}))]) as server:
        cause = failure(server).cause
    figure(f"{cause} after {len(server.requests)} request")
    assert (cause, len(server.requests)) == ("context_overflow", 1)


def test_redirects_are_not_followed():
    with FakeOpenAI() as elsewhere:
        target = f"{elsewhere.base_url}/chat/completions"
        with FakeOpenAI(faults=[Answer(307, "", {"Location": target})]) as server:
            assert failure(server, api_key=KEY).cause == "refused"
    assert elsewhere.requests == []


def test_unknown_parameters_are_dropped_once_also_by_calls_in_flight():
    async def run(server):
        async with aclosing(ServerLLM(server.base_url, "fake", backoff_s=0.01, max_retries=0)) as llm:
            texts = [(await llm.complete(PROMPT, Sampling(seed=1))).text for _ in range(3)]
            return texts, llm.dropped

    with FakeOpenAI(lambda request: "<answer>a</answer>b", strict=("seed", "stop", "top_p")) as server:
        texts, dropped = asyncio.run(run(server))
    assert (dropped, texts) == ({"seed", "stop", "top_p"}, ["<answer>a</answer>"] * 3)
    assert len(server.requests) == 3 + 3
    with FakeOpenAI(strict=("seed",), latency_s=0.05) as server:
        assert len(asyncio.run(asked(server, [PROMPT] * 10, Sampling(seed=1), max_retries=0))) == 10


@pytest.mark.parametrize(
    ("status", "body", "sent"),
    [
        (422, '{"detail":[{"type":"extra_forbidden","loc":["body","seed"],"msg":"Extra inputs"}]}', "stop"),
        (400, "Unknown parameter: seed", "stop"),
        (400, '{"error":{"message":"Unsupported: \'max_tokens\'","param":"max_tokens"}}', "max_completion_tokens"),
    ],
)
def test_refused_parameters_are_read_from_several_kinds_of_message(status, body, sent):
    with FakeOpenAI(faults=[Answer(status, body)]) as server:
        ask(server, sampling=Sampling(seed=1))
    assert sent in server.requests[1]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_text_filed_under_reasoning_counts_only_if_there_is_no_content(field):
    message = {"content": None, field: "<answer>a"}
    assert answered(edit=with_choice(message=message)).text == "<answer>a</answer>"
    assert answered(edit=with_choice(message=message | {"content": "ok"})).text == "ok"
    cut = answered(edit=with_choice(message=message, finish_reason="length"))
    assert (cut.text, cut.finish_reason) == ("", "length"), "a draft is no step"


@pytest.mark.parametrize(
    "values", [{"error": {"code": 500}}, *({"finish_reason": end} for end in ("error", "abort", "content_filter"))]
)
def test_a_reply_that_the_server_broke_off_is_not_the_policys(values):
    with pytest.raises(LLMError, match="broke off its reply"):
        answered("<answer>a</answer>", edit=with_choice(**values), patience_s=0)


def test_a_gateway_that_changes_the_model_is_noticed_once() -> None:
    names = iter("aabac")

    def renamed(request, answer):
        answer["model"] = next(names)

    with capture_logs() as logged, FakeOpenAI(edit=renamed) as server:
        llm = ServerLLM(server.base_url, "fake")

        async def ask_all() -> None:
            for _ in range(5):
                await llm.complete(PROMPT, Sampling())
            await llm.aclose()

        asyncio.run(ask_all())
    assert [(entry["before"], entry["now"]) for entry in logged if entry["log_level"] == "warning"] == [("a", "b")]


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_text_in_parts_is_an_unreadable_reply_also_beside_calls(field):
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}]
    message = {"content": None, field: [{"type": "text", "text": "<answer>a"}], "tool_calls": calls}
    with pytest.raises(LLMError, match="has list where its text should be"):
        answered(edit=with_choice(message=message), patience_s=0)


def with_ids(request, answer):
    answer["prompt_token_ids"] = [1, 2, 3]
    for choice in answer["choices"]:
        choice["token_ids"] = [4, 5]
        choice["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}


def test_token_ids_and_logprobs_of_vllm_are_read():
    with FakeOpenAI(edit=with_ids) as server:
        completion = ask(server, vllm=True, logprobs=True)
    assert completion.token_ids == (4, 5)
    assert completion.prompt_token_ids == (1, 2, 3)
    assert completion.logprobs == (-0.5, -1.0)
    assert completion.completion_tokens == 2
    body = server.requests[0]
    assert body["return_token_ids"] and body["include_stop_str_in_output"] and body["logprobs"] is True
    assert (body["top_k"], body["repetition_penalty"]) == (-1, 1.0)


def test_ids_that_go_on_after_an_ignored_stop_string_are_not_reported():
    completion = answered("a</answer>b", ignores_stop=True, edit=with_ids, vllm=True, logprobs=True)
    assert (completion.text, completion.token_ids, completion.logprobs) == ("a</answer>", None, None)


def test_lone_surrogates_neither_leave_nor_enter():
    with FakeOpenAI(lambda request: "a\ud800b") as server:
        completion = ask(server, Prompt((Message("user", "x\udfffy"),)))
    assert server.requests[0]["messages"][0]["content"] == "x?y"
    assert completion.text == "a?b"


def test_200_concurrent_calls_stay_within_the_bound():
    async def run(server):
        with server.holding():
            asking = asyncio.create_task(asked(server, [PROMPT] * 200, Sampling(), concurrency=16))
            while server.in_flight < 16:  # noqa: ASYNC110 (it is on another thread)
                await asyncio.sleep(0.002)
        return await asking

    with FakeOpenAI(latency_s=0.01) as server:
        replies = asyncio.run(run(server))
    assert len(replies) == 200
    assert server.most_in_flight == 16
    assert len(server.peers) <= 16  # connections are reused


def test_a_client_can_be_closed_twice_and_used_in_another_loop():
    with FakeOpenAI() as server:
        llm = ServerLLM(server.base_url, "fake")

        async def once():
            completion = await llm.complete(PROMPT, Sampling())
            await llm.aclose()
            await llm.aclose()
            return completion.text

        assert [asyncio.run(once()) for _ in range(2)] == ["ok", "ok"]


def test_a_process_that_may_open_no_more_files_ends_its_run_and_says_how_to_send_fewer():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def ask() -> None:
        llm = ServerLLM("http://127.0.0.1:9/v1", "m")
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (5, hard))
            await llm.complete(PROMPT, Sampling())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await llm.aclose()

    with pytest.raises(RunError, match=r"too many open files: this process may have 5, .*ulimit.*--concurrency 1,"):
        asyncio.run(ask())
