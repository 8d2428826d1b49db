"""Questions to trees: the body of `build-tree`.

Questions are admitted through a window and replaced as they finish, never in lockstep. A question that a backend lets
down is set aside with its cause and tried again by the next run; everything that it paid for is in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from reasonrag.core.config import Config, ModelConfig
from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.types import Question
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.mcts import Evaluator, SearchSettings, TreeSearch
from reasonrag.pipeline.export import export_run, pairs_of
from reasonrag.pipeline.parts import Parts, open_judge, sampling, set_aside
from reasonrag.pipeline.rows import tree_rows
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.retrieval.journaled import JournalStore
from reasonrag.rollout import Engine, gather_all
from reasonrag.spre import JudgeEvaluator, RolloutEvaluator
from reasonrag.storage.parquet import Row
from reasonrag.storage.runs import RunFolder

log = structlog.get_logger()


@dataclass(slots=True)
class Progress:
    """What is happening, for whoever shows it: counts of this process, and `done` of the whole run."""

    total: int
    models: tuple[JournaledLLM, ...] = ()
    prices: Mapping[str, ModelConfig] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    nodes: int = 0
    pairs: int = 0
    done_before: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def calls(self) -> int:
        """Requests sent by this process."""
        return sum(model.sent for model in self.models)

    @property
    def cost(self) -> float | None:
        """What this process has spent; None where a price is unknown."""
        costs = [self.prices[m.kind].cost(m.prompt_tokens, m.completion_tokens) for m in self.models]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    def line(self) -> str:
        """Counts, rate, tokens and cost, in one line."""
        tokens = sum(model.prompt_tokens + model.completion_tokens for model in self.models)
        parts = [
            f"{self.done}/{self.total} questions",
            f"{self.failed} failed",
            f"{self.nodes} nodes",
            f"{self.pairs} pairs",
            f"{self.calls} calls ({self.calls / max(self.seconds, 1e-9):.0f}/s)",
            f"{tokens} tokens",
        ]
        return ", ".join(parts if self.cost is None else [*parts, f"cost {self.cost:.2f}"])

    @property
    def seconds(self) -> float:
        """Since this process started."""
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None before the first question is done."""
        paced = self.done + self.failed - self.done_before
        return self.seconds / paced * (self.total - self.done - self.failed) if paced else None


class Build:
    """One run of `build-tree`."""

    def __init__(self, config: Config, parts: Parts, run: RunFolder) -> None:
        self.config = config
        self.parts = parts
        self.run_folder = run
        self.policy = JournaledLLM(parts.policy, run.journal, kind="policy")
        self.judge = JournaledLLM(parts.judge, run.journal, kind="judge") if parts.judge else None
        self.progress = Progress(len(parts.questions), tuple(m for m in (self.policy, self.judge) if m), config.prices)
        self.search = self._make_search()

    def _make_search(self) -> TreeSearch:
        """Introduce engine, evaluator and search to each other."""
        config, parts = self.config, self.parts
        engine = Engine(
            self.policy,
            BatchedRetriever(parts.retriever, store=JournalStore(self.run_folder.journal, parts.retriever.fingerprint)),
            parts.format,
            max_steps=config.format.max_steps,
            top_k=config.retrieval.top_k,
            sampling=sampling(config.policy),
        )
        evaluator: Evaluator
        if self.judge is not None:
            evaluator = JudgeEvaluator(open_judge(self.judge, config))
        else:
            evaluator = RolloutEvaluator(engine, k=config.value.rollouts, alpha=config.value.alpha)
        return TreeSearch(engine, evaluator, SearchSettings(**config.search.model_dump()), seed=config.seed)

    def drain(self) -> None:
        """Let calls in flight end and begin no other; `trees` then returns."""
        self.run_folder.journal.draining = True

    async def trees(self) -> None:
        """Build every tree that the journal has not got yet; give up once more than `run.max_failed` have failed.

        Raises:
            RunError: the journal cannot be written.
        """
        journal = self.run_folder.journal
        finished = journal.finished()
        todo = [q for q in self.parts.questions if (q.dataset, q.id) not in finished]
        self._count_finished(finished)
        waiting = iter(todo)
        workers = min(self.config.run.concurrency, len(todo))
        self.run_folder.bind()
        before = journal.meta("seconds") or 0.0
        try:
            await gather_all(self._work(waiting) for _ in range(workers))
        finally:
            journal.put_meta("seconds", before + self.progress.seconds)

    async def _work(self, waiting: Iterator[Question]) -> None:
        for question in waiting:
            if self.run_folder.journal.draining or self._too_many_failed():
                return
            await self._build(question)

    async def _build(self, question: Question) -> None:
        journal, value = self.run_folder.journal, self.config.value
        try:
            tree = await self.search.run(question)
            rows = tree_rows(tree, self.parts.format, alpha=value.alpha, weighting=value.weighting)
            await journal.put_tree(question.dataset, question.id, rows)
        except Interrupted:
            return
        except RunError:
            raise
        except Exception as error:
            await journal.put_failure(question.dataset, question.id, set_aside(question, error), str(error))
            self.progress.failed += 1
            return
        self.progress.done += 1
        self.progress.nodes += len(rows)
        self.progress.pairs += sum(1 for _ in self._pairs(rows))

    def _count_finished(self, finished: set[tuple[str, str]]) -> None:
        for question in self.parts.questions:
            if (question.dataset, question.id) in finished:
                self.progress.done += 1
        self.progress.done_before = self.progress.done

    def _too_many_failed(self) -> bool:
        return self.progress.failed > self.config.run.max_failed * self.progress.total

    def _pairs(self, rows: Sequence[Row]) -> Iterator[Row]:
        return pairs_of(rows, self.config, policy=self.policy.name, config_hash=self.run_folder.config_hash)

    def export(self) -> dict[str, Any]:
        """Write trees, pairs and `run.json` from the journal alone; returns what `run.json` holds."""
        seconds = self.run_folder.journal.meta("seconds") or 0.0
        return export_run(self.run_folder, self.config, self.parts, seconds=seconds)
