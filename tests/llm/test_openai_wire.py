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
from reasonrag.llm.openai_wire import Wire, readable
from reasonrag.pipeline.models import check_llm

LARGEST = 2**31 - 1
UNUSABLE = [2**31, 10**12, 10**19, -1, True, 1.0, "1", None]


def read(choice: dict[str, Any] | None = None, **reply: Any) -> Completion:
    message = {"message": {"content": "ok"}, "finish_reason": "stop"}
    raw = json.dumps({"choices": [message | (choice or {})], **reply}).encode()
    prompt = Prompt((Message("user", "?"),))
    (completion,) = Wire("m", logprobs=True).completions(raw, prompt, Sampling(temperature=1.0))
    assert completion.text == "ok"
    return completion


def test_ids_and_counts_are_kept_up_to_int32():
    completion = read({"token_ids": [0, LARGEST]}, prompt_token_ids=[LARGEST], usage={"prompt_tokens": LARGEST})
    assert completion.token_ids == (0, LARGEST)
    assert completion.prompt_token_ids == (LARGEST,)
    assert completion.prompt_tokens == LARGEST
    assert read(usage={"completion_tokens": LARGEST}).completion_tokens == LARGEST


@pytest.mark.parametrize("number", UNUSABLE)
def test_ids_that_are_none_are_not_reported(number):
    completion = read({"token_ids": [1, number]}, prompt_token_ids=[number])
    assert (completion.token_ids, completion.prompt_token_ids) == (None, None)


@pytest.mark.parametrize("number", UNUSABLE)
def test_counts_that_are_none_are_unknown(number):
    completion = read(usage={"prompt_tokens": number, "completion_tokens": number})
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)


def test_tokens_from_the_prefix_cache_are_read_where_a_server_reports_them():
    assert read(usage={"prompt_tokens": 50, "prompt_tokens_details": {"cached_tokens": 48}}).cached_tokens == 48
    for details in (None, {}, {"cached_tokens": None}, {"cached_tokens": -1}, [1]):
        assert read(usage={"prompt_tokens": 50, "prompt_tokens_details": details}).cached_tokens is None


@pytest.mark.parametrize("number", [-(10**400), 10**400, math.nan, math.inf, -math.inf, True, "-1", None])
def test_logprobs_that_are_no_finite_numbers_are_not_reported(number):
    assert read({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": number}]}}).logprobs is None
    assert read({"logprobs": {"token_logprobs": [-0.5, number]}}).logprobs is None


def test_whole_numbers_are_logprobs_too():
    assert read({"logprobs": {"token_logprobs": [0, -1, -0.5]}}).logprobs == (0.0, -1.0, -0.5)


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
