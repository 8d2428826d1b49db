"""How far a build or an evaluation is: counts, calls, cost and time left of this process."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from reasonrag.core.config import ModelConfig
from reasonrag.llm.journaled import JournaledLLM


@dataclass(slots=True)
class Progress:
    """Counts of this process, read by the progress line.

    What the journal replays counts as done and costs no call.

    Args:
        total: how many units of work there are.
        unit: what `total`, `done` and `failed` count: "questions" of a build, "attempts" of an evaluation (a question
            at one setting of one policy).
        label: what is being worked on right now, such as a policy and its setting; "" shows nothing.
        done_before: units that an earlier process finished; they are part of `done` and say nothing about the pace.
        written: rows written so far by kind ("nodes", "pairs"), in the order shown.
    """

    total: int
    unit: str = "attempts"
    label: str = ""
    done: int = 0
    failed: int = 0
    done_before: int = 0
    written: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)
    _open_models: list[tuple[JournaledLLM, ModelConfig]] = field(default_factory=list)
    _closed_usages: list[_Usage] = field(default_factory=list)

    def open(self, model: JournaledLLM, prices: ModelConfig) -> None:
        """Count the calls of one more model."""
        self._open_models.append((model, prices))

    def close(self) -> None:
        """Keep the counts of all models and drop the models themselves: the next one needs their memory."""
        self._closed_usages = self._usages()
        self._open_models.clear()

    @property
    def calls(self) -> int:
        """Requests sent by this process."""
        return sum(usage.calls for usage in self._usages())

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens, as far as backends report them."""
        return sum(usage.tokens for usage in self._usages())

    @property
    def cost(self) -> float | None:
        """Cost of this process in the currency of the prices; None if a price is unknown."""
        total = 0.0
        for usage in self._usages():
            if usage.cost is None:
                return None
            total += usage.cost
        return total

    @property
    def seconds(self) -> float:
        """Seconds since this process started."""
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first unit is done."""
        paced = self.done + self.failed - self.done_before
        return self.seconds / paced * (self.total - self.done - self.failed) if paced else None

    def line(self) -> str:
        """Return counts, rate, tokens and cost in one line, without the time left."""
        rate = self.calls / max(self.seconds, 1e-9)
        parts = [self.label] if self.label else []
        parts += [f"{self.done}/{self.total} {self.unit}", f"{self.failed} failed"]
        parts += [f"{count} {kind}" for kind, count in self.written.items()]
        parts += [f"{self.calls} calls ({rate:.0f}/s)", f"{self.tokens} tokens"]
        if self.cost is not None:
            parts.append(f"cost {self.cost:.2f}")
        return ", ".join(parts)

    def _usages(self) -> list[_Usage]:
        usages = list(self._closed_usages)
        for model, prices in self._open_models:
            cost = prices.cost(model.prompt_tokens, model.completion_tokens)
            usages.append(_Usage(model.sent, model.prompt_tokens + model.completion_tokens, cost))
        return usages


class _Usage(NamedTuple):
    calls: int
    tokens: int
    cost: float | None
