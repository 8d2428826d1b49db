"""An LLM that fails on demand, to rehearse outages: it hangs, or writes junk, for a share of its calls."""

from __future__ import annotations

import asyncio
from random import Random

from reasonrag.core.types import Completion, Prompt
from reasonrag.llm.base import LLM, Sampling

HANG_S = 1e6  # beyond any deadline: whoever calls has to give up
# What judges have been seen to write in place of a verdict.
JUNK = (
    "",
    "I cannot judge this.",
    "<answer>maybe</answer>",
    "<answer>True",
    "<answer>True</answer> or <answer>False</answer>",
    "YES or NO",
    '{"planner_score": 7, "model_plan_steps": -1}',
    '{"planner_score": 1.0, "model_plan_steps": 2, "effective_',
    "The score lies somewhere between the two.",
    "<correct_reasoning_path>\n</correct_reasoning_path>",
)


class FaultyLLM:
    """Wraps any LLM; which calls fail depends on the prompt, the seed of the sampling and its own seed alone."""

    def __init__(self, inner: LLM, *, timeout_share: float = 0.0, junk_share: float = 0.0, seed: int = 0) -> None:
        """Wrap `inner`: the shares are of all calls, in [0, 1] together; another seed lets other calls fail."""
        self.inner = inner
        self._timeout_share = timeout_share
        self._junk_share = junk_share
        self._seed = seed

    @property
    def name(self) -> str:
        """The inner model's, and that it fails."""
        return f"faulty:{self._timeout_share:g}:{self._junk_share:g}:{self._seed}:{self.inner.name}"

    async def complete(self, prompt: Prompt, sampling: Sampling) -> tuple[Completion, ...]:
        """`[n]` completions of the inner model, or of junk, or none for longer than anybody waits.

        Raises:
            LLMError: as the inner model does.
        """
        texts = (*(message.content for message in prompt.messages), prompt.prefix)
        rng = Random("\0".join(["faulty", str(self._seed), str(sampling.seed), *texts]))
        fate = rng.random()
        if fate < self._timeout_share:
            await asyncio.sleep(HANG_S)
        elif fate < self._timeout_share + self._junk_share:
            return tuple(Completion(rng.choice(JUNK), completion_tokens=1) for _ in range(sampling.n))
        return await self.inner.complete(prompt, sampling)

    async def aclose(self) -> None:
        """Close the inner model."""
        await self.inner.aclose()
