from __future__ import annotations

import asyncio

import pytest

from reasonrag.demo import policy_folder
from reasonrag.formats import PromptSet, ReasonRAGFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM
from reasonrag.types import Completion, Prompt
from tests.toys import QUESTION

pytestmark = pytest.mark.gpu

PROMPT = ReasonRAGFormat(PromptSet.find("brief")).prompt(QUESTION, ())


def ask(device: str, *samplings: Sampling, prompt: Prompt = PROMPT) -> list[Completion]:
    llm = TransformersLLM(str(policy_folder()), device=device)

    async def run() -> list[Completion]:
        try:
            return [
                c
                for completions in await asyncio.gather(*(llm.complete(prompt, s) for s in samplings))
                for c in completions
            ]
        finally:
            await llm.aclose()

    return asyncio.run(run())


def test_greedy_text_on_the_gpu_is_that_of_the_cpu():
    greedy = Sampling(temperature=0.0, max_tokens=32)
    (on_gpu,), (on_cpu,) = ask("cuda", greedy), ask("cpu", greedy)
    assert on_gpu.token_ids == on_cpu.token_ids
    assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-3)


def test_the_same_seed_gives_the_same_text_in_any_batch():
    samplings = [Sampling(seed=seed, max_tokens=32) for seed in range(8)]
    (alone,) = ask("cuda", samplings[3])
    assert ask("cuda", *samplings)[3].token_ids == alone.token_ids
