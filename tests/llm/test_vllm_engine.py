from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.models import ModelAddress
from reasonrag.core.types import FinishReason
from reasonrag.llm.vllm_engine import VLLMEngine, completion


def choice(text: str, ids: list[int], finish: str = "stop", logprobs: list[float] | None = None):
    steps = None if logprobs is None else [{i: SimpleNamespace(logprob=x)} for i, x in zip(ids, logprobs, strict=True)]
    return SimpleNamespace(text=text, token_ids=ids, finish_reason=finish, logprobs=steps)


def output(*choices):
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], num_cached_tokens=2, outputs=list(choices))


def test_an_output_is_read():
    read = completion(output(choice("a</answer>", [5, 6], "stop", [-0.5, -1.0])), ("</answer>",), exact_logprobs=True)
    assert (read.text, read.token_ids, read.logprobs) == ("a</answer>", (5, 6), (-0.5, -1.0))
    assert (read.prompt_token_ids, read.prompt_tokens, read.completion_tokens) == ((1, 2, 3), 3, 2)
    assert (read.finish_reason, read.cached_tokens) == (FinishReason.STOP, 2)
    cut = completion(output(choice("b", [7], "length", [-2.0])), (), exact_logprobs=False)
    # Those of a cut nucleus are not reported.
    assert (cut.finish_reason, cut.logprobs) == (FinishReason.LENGTH, None)


def test_a_request_that_ended_without_output_is_an_error():
    with pytest.raises(LLMError):
        completion(None, (), exact_logprobs=True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"reasonrag\[vllm\]"):
        VLLMEngine(ModelAddress("vllm", "any/model"), ModelConfig())
