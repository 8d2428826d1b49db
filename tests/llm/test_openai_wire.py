"""Numbers of a server's reply: what no journal or table could hold is left out, and the text is kept."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Completion, Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.openai_wire import MOST_TOKENS, Wire, readable
from reasonrag.pipeline.parts import check_llm
from tests.faults.matrix import Figure

LARGEST = MOST_TOKENS - 1
UNUSABLE = [2**31 - 1, 10**12, 10**19, -1, True, 1.0, "1", None]


def read(choice: dict[str, Any] | None = None, vocabulary: int = MOST_TOKENS, **reply: Any) -> Completion:
    message = {"message": {"content": "ok"}, "finish_reason": "stop"}
    raw = json.dumps({"choices": [message | (choice or {})], **reply}).encode()
    prompt = Prompt((Message("user", "?"),))
    completion = Wire("m", logprobs=True, vocabulary=vocabulary).completion(raw, prompt, Sampling(temperature=1.0))
    assert completion.text == "ok"
    return completion


def test_ids_and_counts_that_can_be_are_kept():
    completion = read({"token_ids": [0, LARGEST]}, prompt_token_ids=[LARGEST], usage={"prompt_tokens": LARGEST})
    assert completion.token_ids == (0, LARGEST)
    assert completion.prompt_token_ids == (LARGEST,)
    assert completion.prompt_tokens == LARGEST
    assert read(usage={"completion_tokens": LARGEST}).completion_tokens == LARGEST


@pytest.mark.fault(
    "A12", "token ids 2147483647, negative, no numbers", "set aside as missing", before="kept, exit code 0"
)
def test_ids_that_the_model_cannot_have_are_set_aside(figure: Figure):
    kept = [read({"token_ids": [1, id]}, prompt_token_ids=[id]) for id in UNUSABLE]
    kept.append(read({"token_ids": [1, 151_665]}, 151_665, prompt_token_ids=[151_665]))
    used = [reply for reply in kept if (reply.token_ids, reply.prompt_token_ids) != (None, None)]
    figure(f"{len(used)} of {len(kept)} kept")
    assert not used and read({"token_ids": [151_664]}, 151_665).token_ids == (151_664,)


@pytest.mark.parametrize("number", UNUSABLE)
def test_counts_that_are_none_are_unknown(number):
    completion = read(usage={"prompt_tokens": number, "completion_tokens": number})
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)


@pytest.mark.fault("A12", "log-probabilities above 0, NaN, infinite", "set aside as missing", before="3.0 was kept")
@pytest.mark.fault("24", "NaN and infinite log-probabilities from an engine", "set aside as missing")
def test_logprobs_that_are_none_are_set_aside(figure: Figure):
    numbers = [3.0, 0.01, -(10**400), 10**400, math.nan, math.inf, -math.inf, True, "-1", None]
    chats = [read({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": number}]}}) for number in numbers]
    texts = [read({"logprobs": {"token_logprobs": [-0.5, number]}}) for number in numbers]
    figure(f"{sum(reply.logprobs is not None for reply in chats + texts)} of {len(chats + texts)} kept")
    assert {reply.logprobs for reply in chats + texts} == {None}


def test_whole_numbers_are_logprobs_too_and_so_is_what_rounding_leaves_above_0():
    assert read({"logprobs": {"token_logprobs": [0, -1, -0.5, 1e-6]}}).logprobs == (0.0, -1.0, -0.5, 1e-6)


def test_an_error_body_is_read_without_any_secret_also_where_one_would_be_cut():
    foreign = "hf_" + "aB3dE5fG7h" * 4
    body = json.dumps({"error": {"message": f"{'so ' * 60} {foreign}, and Bearer the-key of yours"}}).encode()
    shown = readable(body, "the-key")
    assert "so ***, and Bearer ***" in shown and len(shown) <= 200
    assert "the-key" not in readable(body, "the-key", limit=400)


def test_a_model_is_told_to_think_or_not_only_if_someone_says_so():
    prompt = Prompt((Message("user", "Who?"),))
    bodies = [Wire("m", think=think).body(prompt, None, Sampling()) for think in (None, True, False)]
    assert [body.get("chat_template_kwargs") for body in bodies] == [
        None,
        {"enable_thinking": True},
        {"enable_thinking": False},
    ]
    with pytest.raises(ConfigError, match=r"policy\.think is for a server"):
        check_llm(ModelConfig(spec="extractive", think=False), "policy")
