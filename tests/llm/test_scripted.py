from __future__ import annotations

import asyncio

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.types import Completion, Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.scripted import ScriptedLLM

PROMPT = Prompt((Message("user", "who directed Jaws"),))


def ask(llm: ScriptedLLM, **sampling) -> tuple[Completion, ...]:
    return asyncio.run(llm.complete(PROMPT, Sampling(**sampling)))


def test_a_script_that_runs_out_is_an_error():
    llm = ScriptedLLM(["a"])
    with pytest.raises(LLMError) as caught:
        ask(llm, n=2)
    assert caught.value.cause == "script_exhausted"


def test_a_function_is_called_once_per_sample_with_its_seed():
    llm = ScriptedLLM(lambda prompt, sampling: f"{prompt.messages[0].content[:3]} {sampling.n} {sampling.seed}")
    assert [completion.text for completion in ask(llm, n=2, seed=5)] == ["who 1 5", "who 1 6"]


def test_tokens_are_words_and_the_prompt_counts_once():
    first, second = ask(ScriptedLLM(["a b", "c"]), n=2)
    assert (first.prompt_tokens, first.completion_tokens) == (3, 2)
    assert (second.prompt_tokens, second.completion_tokens) == (0, 1)
