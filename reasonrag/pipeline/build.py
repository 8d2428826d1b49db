"""Questions to trees to tables: the body of `build-tree`.

Up to `run.concurrency` questions are worked on at a time, and each is replaced as soon as it finishes, never in
lockstep. A question whose backend fails is set aside with its cause and retried by the next run; every call that was
paid for is in the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.types import Question
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.mcts import Evaluator, TreeSearch
from reasonrag.pipeline.export import count_calls, export_pairs, export_trees, pairs_of, tree_rows
from reasonrag.pipeline.parts import Parts, open_judge, sampling, set_aside
from reasonrag.pipeline.progress import Progress
from reasonrag.retrieval.batched import BatchedRetriever, JournalStore
from reasonrag.rollout import Engine, gather_all
from reasonrag.spre import JudgeEvaluator, RolloutEvaluator
from reasonrag.storage.parquet import Row
from reasonrag.storage.runs import RunFolder, versions


class Build:
    """One run of `build-tree`: `trees` calls the models, `export` writes what the journal holds."""

    def __init__(self, config: Config, parts: Parts, run: RunFolder) -> None:
        self.config = config
        self.parts = parts
        self.run_folder = run
        self.progress = Progress(len(parts.questions), "questions", written=Counter(nodes=0, pairs=0))
        self.policy = self._journaled(parts.policy, "policy")
        self.judge = self._journaled(parts.judge, "judge") if parts.judge else None
        self.search = self._make_search()

    def _journaled(self, llm: LLM, kind: str) -> JournaledLLM:
        journaled = JournaledLLM(llm, self.run_folder.journal, kind=kind)
        self.progress.open(journaled, self.config.prices[kind])
        return journaled

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
        return TreeSearch(engine, evaluator, config.search, seed=config.seed)

    def drain(self) -> None:
        """Finish the calls in flight and begin no others; `trees` then returns."""
        self.run_folder.journal.drain()

    async def trees(self) -> None:
        """Build every tree that is not in the journal yet; stop once more than `run.max_failed` questions failed.

        Raises:
            RunError: the journal cannot be written.
        """
        journal = self.run_folder.journal
        finished_questions = journal.finished()
        unfinished = [q for q in self.parts.questions if (q.dataset, q.id) not in finished_questions]
        self.progress.done = self.progress.done_before = len(self.parts.questions) - len(unfinished)
        waiting = iter(unfinished)
        workers = min(self.config.run.concurrency, len(unfinished))
        self.run_folder.bind()
        seconds_before = journal.meta("seconds") or 0.0
        try:
            # The workers share one iterator: each takes the next question as soon as it has finished its last.
            await gather_all(self._work(waiting) for _ in range(workers))
        finally:
            journal.put_meta("seconds", seconds_before + self.progress.seconds)

    async def _work(self, waiting: Iterator[Question]) -> None:
        for question in waiting:
            too_many_failed = self.progress.failed > self.config.run.max_failed * self.progress.total
            if self.run_folder.journal.draining or too_many_failed:
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
        self.progress.written["nodes"] += len(rows)
        self.progress.written["pairs"] += self._count_pairs(rows)

    def _count_pairs(self, rows: Sequence[Row]) -> int:
        pairs = pairs_of(rows, self.config, policy=self.policy.name, config_hash=self.run_folder.config_hash)
        return sum(1 for _ in pairs)

    def export(self) -> dict[str, Any]:
        """Write `trees/`, `pairs/` and `run.json` from the journal alone, so that it can be repeated at any time.

        Returns:
            The content of `run.json`.
        """
        run, config, parts = self.run_folder, self.config, self.parts
        wanted = {(question.dataset, question.id) for question in parts.questions}
        causes: Counter[str] = Counter()
        for dataset, question_id, cause, _ in run.journal.failures():
            if (dataset, question_id) in wanted:
                causes[cause] += 1
        summary = {
            "questions": {
                "total": len(wanted),
                "finished": len(run.journal.finished() & wanted),
                "failed": dict(sorted(causes.items())),
            },
            "trees": export_trees(run, parts.questions),
            "pairs": export_pairs(run.path, config, policy=parts.policy.name, config_hash=run.config_hash),
            "calls": count_calls(run.journal, config),
            "seconds": round(run.journal.meta("seconds") or 0.0, 3),
            "seed": config.seed,
            "config_hash": run.config_hash,
            "content": parts.content,
            "policy": parts.policy.name,
            "judge": parts.judge.name if parts.judge else None,
            "versions": versions(),
        }
        run.write_summary(summary)
        return summary
