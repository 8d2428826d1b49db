"""The worker loop of builds and evaluations, and how far it is.

The next question, or the next attempt, begins as soon as every engine has room for its requests.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from reasonrag.core.calls import RETRIES, SlotCounts
from reasonrag.core.errors import BackendError, Interrupted, RunError, check_limits, readable_error
from reasonrag.core.event_loop import STALL_S, progressing
from reasonrag.core.plugins import place_of
from reasonrag.core.text import excerpt, one_line, pace
from reasonrag.core.types import Question
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.rollout import gather_all
from reasonrag.storage.journal import Journal

log = structlog.get_logger()

# Three times as many requests wait at an engine as are in flight. With fewer, the
# trees that begin last have no time to catch up, and the slots empty at the end:
# 1,000 questions kept 256 slots busy for .93 of the time with as many, .95 with
# twice as many, .99 with three times as many (benchmarks/utilisation.py). With
# more, more trees would be in memory, and their prefixes in the engine's cache.
_QUEUE = 3.0
_ITEMS_PER_SLOT = 3  # questions that search, or wait for the other engine, hold no slot
_TURNS = 6  # of the event loop, until a new question has asked for its first slots
_POLL_S = 0.005

Count = Callable[[], object]


async def work_through(
    questions: Sequence[Question],
    work: Callable[[int, Question, Count], Coroutine[Any, Any, object]],
    engines: Sequence[SlotCounts],
    progress: Progress,
    *,
    failed: Callable[[int, Question, str, Exception], Awaitable[object]] | None = None,
    planned: int = 0,
    most_failed: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
    stall_s: float = STALL_S,
) -> None:
    """Work on all questions, and begin each as soon as every engine has room for it.

    How many are in work follows from their requests: a tree has few in
    flight at its root and more below. A question that fails is set
    aside with its cause; an interrupted one is neither done nor failed.

    Args:
        questions: in the order in which they begin.
        work: gets the place of a question, the question, and a function to call as each of its parts
            ends. May wait for anything.
        engines: of the models that `work` calls; their limits may change on the way.
        progress: is counted on.
        failed: called with place, question, cause and error of a
            question that failed; None: the first error ends the work.
        planned: most parts of a question (iterations, steps), which `progress.planned` holds already.
        most_failed: nothing begins once more questions than this have failed.
        stopped: nothing begins once this returns true.
        stall_s: seconds without any progress after which the run is ended.

    Raises:
        Stalled: the work made no progress for `stall_s`; the work in flight is cancelled.
        RunError: the run cannot go on, after all work in flight has ended. Nothing begins after it.
    """
    failures = 0

    async def do(place: int, question: Question) -> None:
        nonlocal failures
        left = planned

        def count() -> None:
            nonlocal left
            left -= 1
            progress.iterations += 1

        try:
            await work(place, question, count)
        except Interrupted:
            left = 0  # these are still to be done
        except RunError:
            left = 0
            raise
        except Exception as raised:
            if failed is None:
                raise
            error = readable_error(raised)
            check_limits(error)  # a limit of this process, such as its open files: the other questions would fail too
            cause = error.cause if isinstance(error, BackendError) else f"bug:{type(error).__name__}"
            failures += 1
            progress.failed += 1
            progress.causes[cause] += 1
            if progress.causes[cause] == 1:
                message = "question set aside; others for this cause are counted"
                line = place_of(error) if cause.startswith("bug:") else ""
                bug = {"place": line} if line else {}
                log.warning(message, question=question.id, cause=cause, error=excerpt(str(error)), **bug)
            await failed(place, question, cause, error)
        else:
            progress.done += 1
        finally:
            progress.planned -= left  # a tree may end before its iterations do, an attempt before its steps

    # Tasks that failed are kept apart: one that ended is dropped with its tree, which may be large.
    working: set[asyncio.Task[None]] = set()
    broken: list[asyncio.Task[None]] = []

    def end(task: asyncio.Task[None]) -> None:
        working.discard(task)
        if task.cancelled() or task.exception() is not None:
            broken.append(task)

    # Look for cyclic garbage after 100,000 new objects instead of 700: steps and trees hold no
    # cycles, and walking through them takes a sixth of our CPU, or a twentieth after 10,000.
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, 100_000) if young else 0, *older)
    try:
        async with progressing(stall_s):
            for place, question in enumerate(questions):
                if stopped() or failures > most_failed:
                    break
                task = asyncio.create_task(do(place, question))
                working.add(task)
                task.add_done_callback(end)
                # Until it has asked for its first slots, the engines seem to have room for another one.
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                while not _has_room(len(working), engines):  # noqa: ASYNC110 -- several engines, with limits that move
                    await asyncio.sleep(_POLL_S)
                if broken:
                    break
            await gather_all([*broken, *working])
    finally:
        gc.set_threshold(young, *older)
        for task in working:
            task.cancel()


def _has_room(working: int, engines: Sequence[SlotCounts]) -> bool:
    # Bounded twice: by the requests that wait, and by items that neither hold a slot nor wait for one.
    most = _ITEMS_PER_SLOT * max(slots.limit for slots in engines)
    return working < most and all(slots.free > -_QUEUE * slots.limit for slots in engines)


@dataclass(slots=True)
class Progress:
    """Counts of this process, read by the progress line.

    A reply that the journal replays costs no call.

    Args:
        total: how many units of work there are.
        unit: what `total`, `done` and `failed` count: "questions" of a build, "iterations" of a preview,
            "attempts" of an evaluation (a question at one setting of one policy).
        label: the current part of the work, such as a policy and its setting; "" shows nothing.
        done_before: units that an earlier process finished; they
            are part of `done` and do not count for the pace.
        written: rows written so far by kind ("nodes"), in the order shown.
        planned: iterations (of an evaluation, steps) of the units that this
            process works on, if it knows; ended units count with the iterations
            that they took. They show the progress before the first unit has ended.
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
    part: str = "iterations"
    causes: Counter[str] = field(default_factory=Counter)  # of what failed
    started: float = field(default_factory=time.monotonic)
    _retried_before: Counter[str] = field(default_factory=RETRIES.copy)
    _models: list[JournaledLLM] = field(default_factory=list)
    _closed: Counter[str] = field(default_factory=Counter)  # calls and tokens of the models before them

    def open(self, model: LLM, journal: Journal, kind: str, concurrency: int | None = None) -> JournaledLLM:
        """Return a model with its journal, and count its calls. The time before the first one does not count."""
        if not self._models and not self._closed:
            self.started = time.monotonic()
        self._models.append(JournaledLLM(model, journal, kind=kind, concurrency=concurrency))
        return self._models[-1]

    @property
    def engines(self) -> list[SlotCounts]:
        """The requests in flight of each model."""
        return [model.slots for model in self._models]

    def close(self) -> None:
        """Keep the counts of all models and drop the models themselves: the next one needs their memory."""
        self._closed = Counter(calls=self.calls, tokens=self.tokens)
        self._models.clear()

    @property
    def calls(self) -> int:
        """Calls of this process that have been answered."""
        return self._closed["calls"] + sum(model.answered for model in self._models)

    @property
    def tokens(self) -> int:
        """Tokens that this process has sent and received, as far as backends report them."""
        open_tokens = sum(model.prompt_tokens + model.completion_tokens for model in self._models)
        return self._closed["tokens"] + open_tokens

    @property
    def seconds(self) -> float:
        """Seconds since the first model was opened."""
        return time.monotonic() - self.started

    @property
    def share(self) -> float:
        """How much of its work this process has done, in [0, 1]: iterations where they are planned, else units."""
        # Units end all at once at the end of a small run, so iterations tell more.
        if self.planned:
            return self.iterations / self.planned
        ended = self.done + self.failed - self.done_before
        return ended / max(self.total - self.done_before, 1)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first reply."""
        return self.seconds * (1 / self.share - 1) if self.share and self.calls else None

    def failures(self) -> list[str]:
        """Return a line for each cause of failure, the most frequent first."""
        return [f"{count} failed: {one_line(cause)}" for cause, count in self.causes.most_common()]

    def line(self) -> str:
        """Return counts, rate, tokens and requests in flight in one line, without the time left."""
        parts = [self.label] if self.label else []
        parts += [f"{self.done}/{self.total} {self.unit}", f"{self.failed} failed"]
        if self.planned:
            parts.append(f"{self.iterations}/{self.planned} {self.part}")
        parts += [f"{count} {kind}" for kind, count in self.written.items()]
        parts.append(f"{self.calls} calls ({pace(self.calls, self.seconds)})")
        parts.append(f"{self.tokens} tokens ({pace(self.tokens, self.seconds)})")
        if retries := RETRIES - self._retried_before:
            parts.append(f"{retries.total()} retries ({', '.join(cause for cause, _ in retries.most_common(2))})")
        shown: list[SlotCounts] = []
        for model in self._models:
            if model.slots not in shown:  # the policy may be the judge too
                role = "" if model.kind == "policy" else f" at the {model.kind}"
                parts.append(f"{model.slots.in_flight}/{model.slots.limit} in flight{role}")
                shown.append(model.slots)
        return ", ".join(parts)
