"""Token ids in, token ids out: what a vLLM server is sent is what was sampled, never text encoded again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Completion, Message, Prompt, Span, StopReason, Trajectory
from reasonrag.formats import PromptSet
from reasonrag.formats.hiprag import HiPRAGFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.openai_wire import Encode
from reasonrag.llm.server import ServerLLM, open_server
from reasonrag.rollout import Engine
from tests.fakes.model_server import FakeOpenAI
from tests.toys import QUESTION, SPIELBERG, ToyRetriever

# The ids are no encoding of the texts: one that is decoded and encoded on the way cannot come back by chance.
TURNS = [
    ("I need the director. </reasoning>\n<search>Jaws director</search>", [17, 3, 3, 99]),
    ("Steven Spielberg</conclusion>", [250, 251]),
    ("</think>\n<answer>Steven Spielberg</answer>", [5, 4, 3, 2]),
]
FOUND = "\n<context>[1] Jaws\nJaws is a film directed by Steven Spielberg.</context>\n<conclusion>"
TURN = (Span("<think>"), Span("Jaws", (7, 8), by_policy=True), Span("\n<information>"))
PROMPT = Prompt((Message("user", "Who directed Jaws?"),), TURN, ("</answer>",))


def vllm_says(turns: list[tuple[str, list[int]]]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """As vLLM's completions endpoint answers: stop string kept, ids of prompt and completion in the choice."""
    left = iter(turns)

    def edit(request: dict[str, Any], answer: dict[str, Any]) -> None:
        text, ids = next(left)
        answer["choices"][0] |= {
            "text": text,
            "stop_reason": next((s for s in request.get("stop", ()) if text.endswith(s)), None),
            "token_ids": ids,
            "prompt_token_ids": request["prompt"],
            "logprobs": {"token_logprobs": [-0.25 * (n + 1) for n in range(len(ids))]},
        }

    return edit


def ask(server: FakeOpenAI, sampling: Sampling | None = None, **settings: Any) -> Completion:
    async def run() -> Completion:
        llm = ServerLLM(server.base_url, "fake", backoff_s=0.01, max_retries=1, **settings)
        async with aclosing(llm):
            return await llm.complete(PROMPT, sampling or Sampling())

    return asyncio.run(run())


def rollout(server: FakeOpenAI, encode: Encode) -> Trajectory:
    async def run() -> Trajectory:
        llm = ServerLLM(server.base_url, "fake", vllm=True, logprobs=True, encode=encode)
        engine = Engine(llm, ToyRetriever((SPIELBERG,)), HiPRAGFormat(PromptSet.find("brief")), max_steps=4)
        async with aclosing(llm):
            return (await engine.run([Trajectory(QUESTION)], seeds=[1]))[0]

    return asyncio.run(run())


@pytest.mark.parametrize("tokenizer", ["demo", "bpe"])
def test_three_turns_reach_the_server_as_chat_ids_sampled_ids_and_inserted_ids(tokenizer: str, tiny_model: Path):
    chat = ChatTemplate.load(str(demo_folder() if tokenizer == "demo" else tiny_model))
    with FakeOpenAI(edit=vllm_says(TURNS)) as server:
        trajectory = rollout(server, chat.token_ids)

    def ids(text: str) -> list[int]:
        return list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])

    messages = [{"role": m.role, "content": m.content} for m in trajectory.steps[0].prompt.messages]
    opened = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    first = [*opened, *ids("<think>\n<step>\n<reasoning>")]
    second = [*first, *TURNS[0][1], *ids(FOUND)]
    third = [*second, *TURNS[1][1], *ids("\n</step>\n")]
    assert [request["prompt"] for request in server.requests] == [first, second, third]
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer == "Steven Spielberg"
    for step, sent, (text, sampled) in zip(trajectory.steps, (first, second, third), TURNS, strict=True):
        assert (step.completion.text, step.completion.token_ids) == (text, tuple(sampled))
        assert step.completion.prompt_token_ids == tuple(sent)
        assert step.completion.logprobs is not None and len(step.completion.logprobs) == len(sampled)


def test_the_sampled_token_alone_is_asked_for_its_logprob_and_no_start_token_is_added():
    with FakeOpenAI(edit=vllm_says([("a</answer>", [1, 2])])) as server:
        ask(server, vllm=True, logprobs=True, encode=lambda prompt: (3, 4))
    (body,) = server.requests
    assert (body["prompt"], body["logprobs"], body["return_token_ids"]) == ([3, 4], 0, True)
    assert body["include_stop_str_in_output"] and body["top_k"] == -1
    assert "add_special_tokens" not in body and "messages" not in body


def test_ids_in_an_open_turn_fall_back_to_its_text_where_a_server_takes_text(tiny_model: Path):
    chat = ChatTemplate.load(str(tiny_model))
    with FakeOpenAI() as server:
        ask(server, encode=chat.text)
    assert server.requests[0]["prompt"].endswith("assistant\n<think>Jaws\n<information>")


def test_tokens_of_a_server_are_decoded_by_the_tokenizer_that_encodes_its_prompts(tiny_model: Path):
    config = ModelConfig(
        spec="http://127.0.0.1:1/v1", model="served", tokenizer=str(tiny_model), api="completions", vllm=True
    )
    server, chat = open_server(config.address, config), ChatTemplate.load(str(tiny_model))
    assert server.decode and server.decode(chat.token_ids(PROMPT)) == chat.decode(chat.token_ids(PROMPT))
    assert open_server(config.address, config.model_copy(update={"api": "chat"})).decode is None


def test_a_prompt_that_comes_again_is_encoded_once():
    encoded: list[Prompt] = []

    def encode(prompt: Prompt) -> tuple[int, ...]:
        encoded.append(prompt)
        return (3, len(encoded))

    async def run(llm: ServerLLM, *texts: str) -> None:
        async with aclosing(llm):
            await asyncio.gather(*(llm.complete(Prompt((Message("user", text),)), Sampling()) for text in texts))

    with FakeOpenAI() as server:
        asyncio.run(run(ServerLLM(server.base_url, "fake", encode=encode), "a", "b", "a", "a"))
    assert len(encoded) == 2
    assert sorted(tuple(body["prompt"]) for body in server.requests) == [(3, 1), (3, 1), (3, 1), (3, 2)]


def test_prompt_ids_that_the_server_does_not_repeat_are_those_that_were_sent():
    with FakeOpenAI() as server:
        assert ask(server, encode=lambda prompt: (3, 4)).prompt_token_ids == (3, 4)


def test_a_server_that_read_other_ids_than_it_was_sent_is_not_believed():
    def cut(request: dict[str, Any], answer: dict[str, Any]) -> None:
        answer["choices"][0]["prompt_token_ids"] = request["prompt"][1:]

    with FakeOpenAI(edit=cut) as server, pytest.raises(LLMError, match="1 token ids that differ from the 2") as caught:
        ask(server, vllm=True, encode=lambda prompt: (3, 4))
    assert caught.value.cause == "bad_reply"


@pytest.mark.parametrize(
    ("sampling", "processed", "reported"),
    [
        (Sampling(temperature=0.7), True, True),
        (Sampling(temperature=1.0), True, True),
        (Sampling(temperature=1.0, top_p=0.9), True, False),
        (Sampling(temperature=0.7), False, False),
        (Sampling(temperature=1.0, top_p=0.9), False, True),
    ],
)
def test_logprobs_are_reported_where_they_are_those_of_the_whole_distribution_at_the_temperature(
    sampling: Sampling, processed: bool, reported: bool
):
    with FakeOpenAI(edit=vllm_says([("a</answer>", [1, 2])])) as server:
        completion = ask(
            server, sampling, vllm=True, logprobs=True, processed_logprobs=processed, encode=lambda prompt: (3, 4)
        )
    assert completion.logprobs == ((-0.25, -0.5) if reported else None)
