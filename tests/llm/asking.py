"""Requests to the engine in this process, and what a plain forward pass says of its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from reasonrag.core.types import Completion, Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM

PROMPT = Prompt((Message("user", "Who directed Jaws?"),))
OTHERS = [Prompt((Message("user", "The river runs through the old town. " * count),)) for count in range(1, 8)]
SAMPLING = Sampling(max_tokens=24, seed=11)


def ask(llm: TransformersLLM, prompt: Prompt = PROMPT, sampling: Sampling = SAMPLING) -> Completion:
    return asyncio.run(llm.complete(prompt, sampling))


def ask_together(llm: TransformersLLM, requests: list[tuple[Prompt, Sampling]]) -> list[Completion]:
    async def run():
        return await asyncio.gather(*(llm.complete(prompt, sampling) for prompt, sampling in requests))

    return asyncio.run(run())


def forward(model: Any, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """`[T, V]` log-probabilities of a plain forward pass at the completion's positions."""
    ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def assert_logprobs_are_real(model: Any, completion: Completion, temperature: float = 1.0) -> None:
    expected = forward(model, completion, temperature).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
