"""How far a build or an evaluation is: counts, calls, cost and time left of this process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reasonrag.core.config import ModelConfig
from reasonrag.core.http import RETRIES
from reasonrag.core.slots import SlotCounts
from reasonrag.core.text import duration, one_line, pace
from reasonrag.llm.journaled import JournaledLLM

_RECENT_S = 60.0  # the pace of the calls is that of the last minute
_SILENT_S = 30.0  # without a reply; then no pace and no time left is known
_SUMMED = ("done", "failed", "done_before", "planned", "iterations", "begun")  # over processes


class Usage(NamedTuple):
    """Requests, prompt and completion tokens, and their cost in the currency of the prices; None if one is unknown.

    `cached_tokens` were taken from engines' prefix caches, of `cached_of` prompt tokens of the calls that say so.
    `replayed` replies came from the journal, and are no calls.
    """

    calls: int = 0
    tokens: int = 0
    cost: float | None = 0.0
    cached_tokens: int = 0
    cached_of: int = 0
    replayed: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum of two."""
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        sums = [getattr(self, name) + getattr(other, name) for name in ("cached_tokens", "cached_of", "replayed")]
        return Usage(self.calls + other.calls, self.tokens + other.tokens, cost, *sums)


@dataclass(slots=True)
class Progress:
    """Counts of this process, read by the progress line.

    What the journal replays counts as done and costs no call.

    Args:
        total: how many units of work there are.
        unit: what `total`, `done` and `failed` count: "questions" of a build, "iterations" of a preview, "attempts" of
            an evaluation (a question at one setting of one policy).
        label: what is being worked on right now, such as a policy and its setting; "" shows nothing.
        done_before: units that an earlier process finished; they are part of `done` and say nothing about the pace.
        written: rows written so far by kind ("nodes", "pairs"), in the order shown.
        planned: iterations (of an evaluation, steps) of the units that this process works on, if it knows; those that
            have ended count with what they took. They say how far the work is while none has ended.
        begun: iterations in flight, which count as half done: with a lag they are most of what a young tree has.
        part: what `planned` and `iterations` count.
    """

    total: int
    unit: str = "attempts"
    label: str = ""
    done: int = 0
    failed: int = 0
    done_before: int = 0
    written: Counter[str] = field(default_factory=Counter)
    planned: int = 0
    iterations: int = 0
    begun: int = 0
    part: str = "iterations"
    causes: Counter[str] = field(default_factory=Counter)  # of what failed
    started: float = field(default_factory=time.monotonic)
    _retried_before: Counter[str] = field(default_factory=RETRIES.copy)
    _answered: tuple[float, int] = (0.0, 0)  # seconds at which the number of calls was seen to rise, and that number
    _calls: deque[tuple[float, int]] = field(default_factory=deque)  # seconds and calls, over the last minute
    _models: list[tuple[JournaledLLM, ModelConfig]] = field(default_factory=list)
    _closed: Usage = field(default_factory=Usage)

    def open(self, model: JournaledLLM, prices: ModelConfig) -> None:
        """Count the calls of one more model; what came before the first, such as loading it, is no part of the pace."""
        if not self._models and self._closed == Usage():
            self.started = time.monotonic()
        self._models.append((model, prices))

    def close(self) -> None:
        """Keep the counts of all models and drop the models themselves: the next one needs their memory."""
        self._closed = self.usage
        self._models.clear()

    @property
    def usage(self) -> Usage:
        """What this process has sent and received so far, as far as backends report it."""
        total = self._closed
        for model, prices in self._models:
            cost = prices.cost(model.prompt_tokens, model.completion_tokens)
            tokens = model.prompt_tokens + model.completion_tokens
            cached = (model.cached_tokens, model.cached_of)
            total = total.plus(Usage(model.answered, tokens, cost, *cached, model.replayed))
        return total

    def counts(self) -> dict[str, Any]:
        """Return all counts as JSON values, for `add_up` in another process."""
        counts = {name: getattr(self, name) for name in _SUMMED}
        return counts | {"written": dict(self.written), "causes": dict(self.causes), "usage": self.usage}

    def add_up(self, processes: Iterable[Mapping[str, Any]]) -> None:
        """Take the sums over other processes, each of which gives its `counts`, in place of the counts so far."""
        processes = list(processes)
        for name in _SUMMED:
            setattr(self, name, sum(counts[name] for counts in processes))
        self.written, self.causes = Counter(dict.fromkeys(self.written, 0)), Counter()
        self._closed = Usage()
        for counts in processes:
            self.written.update(counts["written"])
            self.causes.update(counts["causes"])
            self._closed = self._closed.plus(Usage(*counts["usage"]))

    @property
    def seconds(self) -> float:
        """Seconds since the first model was opened."""
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds left: the replies that the work left needs, as many as that so far, at the pace of the calls.

        None before the first reply, and while none comes. What a journal replays says how much the work needs, and
        takes no time itself; what is in flight counts as half done.
        """
        usage, (done, left) = self.usage, self._work
        if not done or not usage.calls or (left and self._silent_s(usage.calls) >= _SILENT_S):
            return None
        calls = usage.calls + sum(model.slots.in_flight for model, _ in self._models) / 2
        return self.seconds * left / done * (calls + usage.replayed) / calls

    @property
    def share(self) -> float:
        """How much of its work this process has done, in [0, 1]."""
        done, left = self._work
        return done / max(done + left, 1)

    @property
    def _work(self) -> tuple[float, float]:
        """What this process has done and what is left: iterations where they are planned, else units."""
        if self.planned:
            done = self.iterations + self.begun / 2
            return done, self.planned - done
        ended = self.done + self.failed
        return ended - self.done_before, self.total - ended

    def _silent_s(self, calls: int) -> float:
        """Return the seconds since the number of calls rose, as far as it was looked at."""
        if calls > self._answered[1]:
            self._answered = self.seconds, calls
        return self.seconds - self._answered[0]

    def failures(self) -> list[str]:
        """Return a line for each cause of failure, the most frequent first."""
        return [f"{count} failed: {one_line(cause)}" for cause, count in self.causes.most_common()]

    def line(self) -> str:
        """Return counts, rate, tokens, requests in flight and cost in one line, without the time left."""
        calls, tokens, cost, cached, cached_of, _ = self.usage
        seconds = self.seconds
        self._calls.append((seconds, calls))
        while self._calls[0][0] < seconds - _RECENT_S and len(self._calls) > 2:
            self._calls.popleft()
        since, before = self._calls[0] if len(self._calls) > 1 and seconds > _RECENT_S else (0.0, 0)
        parts = [self.label] if self.label else []
        parts += [f"{self.done}/{self.total} {self.unit}", f"{self.failed} failed"]
        if self.planned:
            parts.append(f"{self.iterations}/{self.planned} {self.part}")
        parts += [f"{count} {kind}" for kind, count in self.written.items()]
        if not calls and any(model.slots.in_flight for model, _ in self._models):
            parts.append(f"no reply yet in {duration(seconds)}")
        else:
            parts += [f"{calls} calls ({pace(calls - before, seconds - since, 'call')})"]
            parts += [f"{tokens} tokens ({pace(tokens, seconds)})"]
            if (silent_s := self._silent_s(calls)) >= _SILENT_S and self._work[1]:
                parts.append(f"no reply for {duration(silent_s)}")
        if retries := RETRIES - self._retried_before:
            parts.append(f"{retries.total()} retries ({', '.join(cause for cause, _ in retries.most_common(2))})")
        if cached_of:
            parts.append(f"{cached / cached_of:.0%} of the prompts cached")
        shown: list[SlotCounts] = []
        for model, _ in self._models:
            if model.slots not in shown:  # the policy may be the judge too
                where = "" if model.kind == "policy" else f" at the {model.kind}"
                parts.append(f"{model.slots.in_flight}/{model.slots.limit} in flight{where}")
                shown.append(model.slots)
        if cost:
            parts.append(f"cost {cost:.2f}")
        return ", ".join(parts)
