from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.types import FinishReason
from reasonrag.llm.vllm_engine import VLLMEngine, completions


def choice(index: int, text: str, ids: list[int], finish: str = "stop", logprobs: list[float] | None = None):
    steps = None if logprobs is None else [{i: SimpleNamespace(logprob=x)} for i, x in zip(ids, logprobs, strict=True)]
    return SimpleNamespace(index=index, text=text, token_ids=ids, finish_reason=finish, logprobs=steps)


def output(*choices):
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2, outputs=list(choices))


def test_an_output_of_two_samples_is_read_in_order():
    second, first = choice(1, "b", [7], "length", [-2.0]), choice(0, "a</answer>", [5, 6], "stop", [-0.5, -1.0])
    a, b = completions(output(second, first), ("</answer>",), exact_logprobs=True)
    assert (a.text, a.token_ids, a.logprobs, a.finish_reason) == ("a</answer>", (5, 6), (-0.5, -1.0), FinishReason.STOP)
    assert (b.text, b.token_ids, b.logprobs, b.finish_reason) == ("b", (7,), (-2.0,), FinishReason.LENGTH)
    assert (a.prompt_token_ids, a.prompt_tokens, a.completion_tokens) == ((1, 2, 3), 3, 2)
    assert (b.prompt_token_ids, b.prompt_tokens, b.completion_tokens) == ((1, 2, 3), 0, 1)
    assert (a.cached_tokens, b.cached_tokens) == (2, 0)


def test_logprobs_of_a_cut_nucleus_are_not_reported():
    (completion,) = completions(output(choice(0, "a", [5], "stop", [-0.5])), (), exact_logprobs=False)
    assert completion.logprobs is None


def test_a_request_that_ended_without_output_is_an_error():
    with pytest.raises(LLMError):
        completions(None, (), exact_logprobs=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"reasonrag\[vllm\]"):
        VLLMEngine("any/model")
