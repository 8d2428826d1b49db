"""How far an evaluation is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from reasonrag.core.config import ModelConfig
from reasonrag.llm.journaled import JournaledLLM


@dataclass(slots=True)
class Progress:
    """Counts of this process over all policies and settings, for whoever shows them.

    `total`, `done` and `failed` count attempts: a question at one setting of one policy. Attempts that the journal
    replays count as done and cost no call.
    """

    total: int
    at: str = ""  # policy and setting at work
    done: int = 0
    failed: int = 0
    started: float = field(default_factory=time.monotonic)
    _models: list[tuple[JournaledLLM, ModelConfig]] = field(default_factory=list)
    _closed: list[tuple[int, int, int, float | None]] = field(default_factory=list)

    def open(self, model: JournaledLLM, prices: ModelConfig) -> None:
        """Count the calls of one more model."""
        self._models.append((model, prices))

    def close(self) -> None:
        """Keep the counts of the models and let go of them: the next one needs their memory."""
        self._closed += map(_counts, self._models)
        self._models.clear()

    @property
    def _used(self) -> list[tuple[int, int, int, float | None]]:
        return [*self._closed, *map(_counts, self._models)]

    @property
    def calls(self) -> int:
        """Requests sent by this process."""
        return sum(calls for calls, *_ in self._used)

    @property
    def tokens(self) -> int:
        """Read and written, as far as backends report them."""
        return sum(prompt + written for _, prompt, written, _ in self._used)

    @property
    def cost(self) -> float | None:
        """In the currency of the prices; None where one is unknown."""
        costs = [cost for *_, cost in self._used]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    @property
    def seconds(self) -> float:
        """Since this process started."""
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first attempt is done."""
        paced = self.done + self.failed
        return self.seconds / paced * (self.total - paced) if paced else None

    def line(self) -> str:
        """Everything but the time left, in one line."""
        rate = self.calls / max(self.seconds, 1e-9)
        parts = [
            f"{self.done}/{self.total} attempts",
            f"{self.failed} failed",
            f"{self.calls} calls ({rate:.0f}/s)",
            f"{self.tokens} tokens",
        ]
        if self.cost is not None:
            parts.append(f"cost {self.cost:.2f}")
        return ", ".join([self.at, *parts] if self.at else parts)


def _counts(opened: tuple[JournaledLLM, ModelConfig]) -> tuple[int, int, int, float | None]:
    model, prices = opened
    cost = prices.cost(model.prompt_tokens, model.completion_tokens)
    return model.sent, model.prompt_tokens, model.completion_tokens, cost
