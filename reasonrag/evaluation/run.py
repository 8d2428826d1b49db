"""Policies at settings, every question once each: Algorithm 1 of arXiv:2505.14069, kept in a journal.

OUT/
├── NAME/                        one folder a policy
│   ├── config.yaml, journal.sqlite
│   ├── trajectories/SETTING-*.parquet
│   └── metrics.json
├── metrics.json, report.md
└── plots/*.svg, *.png

The seed of a call depends on the run's seed, the question and the step alone. So points of a sweep ask the same until
they differ: another step limit pays for the forced answers, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError, Interrupted, RunError
from reasonrag.core.text import Rules
from reasonrag.core.types import Question, Trajectory
from reasonrag.evaluation.judged import JUDGED, NOT_JUDGED, Examiner, Judging, Verdicts
from reasonrag.evaluation.metrics import Scores, scores, trajectory_row
from reasonrag.evaluation.progress import Progress
from reasonrag.evaluation.sweep import Setting, check_alike, check_names, sweep, varying
from reasonrag.formats import PromptSet
from reasonrag.llm.base import LLM
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.pipeline.export import count_calls
from reasonrag.pipeline.models import check_llm, open_llm
from reasonrag.pipeline.parts import (
    Parts,
    check,
    judge_service,
    open_format,
    open_questions,
    open_retriever,
    sampling,
    set_aside,
)
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.batched import BatchedRetriever
from reasonrag.retrieval.journaled import JournalStore
from reasonrag.rewards.judge import JudgeService
from reasonrag.rollout import Engine, derive_seed, gather_all
from reasonrag.storage.parquet import Row, ShardWriter
from reasonrag.storage.questions import questions_fingerprint
from reasonrag.storage.runs import RunFolder, claim_folder, lock
from reasonrag.storage.tables import trajectory_schema

log = structlog.get_logger()

_SHARD_ROWS = 2_000
_JOURNAL = "journal.sqlite"

Show = Callable[["Evaluation"], AbstractAsyncContextManager[object]]


@dataclass(slots=True)
class Outcome:
    """What a policy did at one setting; questions by their place in the list."""

    setting: Setting
    scores: list[Scores | None]  # [n]; None where the question was set aside, or not tried
    verdicts: list[Verdicts | None]  # [n]; likewise
    failures: dict[int, str] = field(default_factory=dict)  # the cause for which a question was set aside
    ends: Counter[str] = field(default_factory=Counter)
    out_of_form: Counter[str] = field(default_factory=Counter)  # attempts by why they are not well-formed
    asked: Counter[str] = field(default_factory=Counter)  # of a judge, as `Examiner.examine` counts it


@dataclass(slots=True)
class PolicyResult:
    """What a policy did at all settings, in the order of the sweep."""

    name: str
    config: Config
    content: dict[str, str]
    outcomes: list[Outcome]
    calls: dict[str, Any]  # of its folder, over all processes
    judge: dict[str, Any] | None = None  # who judged it by which prompts, and on which metrics


class Evaluation:
    """One run of `eval`: policies one after the other, as a device holds one model."""

    def __init__(
        self,
        configs: Mapping[str, Config],
        out: Path,
        *,
        temperatures: Sequence[float] | None = None,
        max_steps: Sequence[int] | None = None,
        top_ks: Sequence[int] | None = None,
        rules: Rules = "house",
        judging: Judging | None = None,
    ) -> None:
        """Open questions and retriever, and check everything that needs no model.

        Args:
            configs: by name, which is the name of a folder; the first one is what the others are compared with.
            out: the evaluation's folder.
            temperatures: to sweep; as configured where None. Likewise `max_steps` and `top_ks`.
            max_steps: actions of a trajectory.
            top_ks: passages per search.
            rules: of the metrics.
            judging: a judge and what it is asked about each attempt; nobody is asked where None.

        Raises:
            ConfigError, DataError: one clear line.
        """
        check_names(configs)
        check_alike(configs)
        for config in configs.values():  # before the first of them is paid for
            check_llm(config.policy, "policy")
        if judging is not None:
            check_llm(judging.model, "judge")
            for config in configs.values():
                judging.check(PromptSet.find(config.format.prompts))
        self.out = out
        self.rules = rules
        self.judging = judging
        self.points = {
            name: sweep(config, temperatures=temperatures, max_steps=max_steps, top_ks=top_ks)
            for name, config in configs.items()
        }
        self._formats = {name: open_format(config) for name, config in configs.items()}
        self.questions, self.retriever = _open_shared(configs)
        attempts = len(self.questions) * sum(map(len, self.points.values()))
        self.progress = Progress(attempts)
        self._draining = False
        self._folder: RunFolder | None = None
        self._judge: LLM | None = None

    def drain(self) -> None:
        """Let calls in flight end and begin no other; `run` then raises Interrupted."""
        self._draining = True
        if self._folder is not None:
            self._folder.journal.draining = True

    def run(self, show: Show | None = None) -> list[PolicyResult]:
        """Everything that the journals have not got yet.

        Args:
            show: entered around the work of each policy, inside the event loop: the place for signal handlers and a
                progress line. A model is loaded outside of it, and outside of the loop.

        Raises:
            Interrupted: `drain` was called before the end. Everything paid for is kept.
            ConfigError, RunError, LLMError, RetrievalError: one clear line; a part that is not there.
        """
        _prepare(self.out)
        # One loop for all policies, which share a retriever whose connections belong to it.
        with lock(self.out / ".lock"), asyncio.Runner() as runner:
            try:
                if self.judging is not None:
                    self._judge = open_llm(self.judging.model, "judge")
                return [self._policy(runner, name, show) for name in self.points]
            finally:
                if self._judge is not None:
                    runner.run(self._judge.aclose())
                runner.run(self.retriever.aclose())

    def _policy(self, runner: asyncio.Runner, name: str, show: Show | None) -> PolicyResult:
        config = self.points[name][0][1]
        llm = open_llm(config.policy, "policy")
        content = {
            "questions": questions_fingerprint(self.questions),
            "corpus": self.retriever.fingerprint,
            "prompts": self._formats[name].fingerprint,
            "policy": llm.name,
        }
        try:
            with RunFolder.open(self.out / name, config, content, varying=varying(config)) as folder:
                self._folder = folder
                folder.journal.draining = self._draining
                judge = self._judge_service(config, folder)
                outcomes = runner.run(self._settings(name, llm, judge, folder, show))
                calls = count_calls(folder.journal, self._priced(config))
                return PolicyResult(name, config, content, outcomes, calls, self._told(judge))
        finally:
            self._folder = None
            self.progress.close()
            runner.run(llm.aclose())
            del llm
            _release_memory()

    def _judge_service(self, config: Config, folder: RunFolder) -> JudgeService | None:
        """The judge, as it is asked about one policy: what it says is kept in the policy's folder."""
        if self._judge is None or self.judging is None:
            return None
        journaled = JournaledLLM(self._judge, folder.journal, kind="judge")
        model = self.judging.model
        self.progress.open(journaled, model)
        return judge_service(journaled, model, PromptSet.find(config.format.prompts))

    def _priced(self, config: Config) -> Config:
        """With the prices of the judge."""
        return config if self.judging is None else config.model_copy(update={"judge": self.judging.model})

    def _told(self, judge: JudgeService | None) -> dict[str, Any] | None:
        """For the record."""
        if judge is None or self.judging is None:
            return None
        return {
            "model": judge.llm.name,
            "prompts": judge.fingerprint,
            "metrics": [m for m in JUDGED if m in self.judging.metrics],
        }

    async def _settings(
        self, name: str, llm: LLM, judge: JudgeService | None, folder: RunFolder, show: Show | None
    ) -> list[Outcome]:
        journaled = JournaledLLM(llm, folder.journal, kind="policy")
        self.progress.open(journaled, self.points[name][0][1].policy)
        examiner = Examiner(judge, journaled, self.judging.metrics) if judge and self.judging else None
        store = JournalStore(folder.journal, self.retriever.fingerprint)
        retriever = BatchedRetriever(self.retriever, store=store)
        async with show(self) if show else contextlib.nullcontext():
            await check(Parts(self.questions, self.retriever, self._formats[name], llm, self._judge, {}))
            folder.bind()
            outcomes = []
            for setting, config in self.points[name]:
                self.progress.at = f"{name} {setting.name}"
                engine = Engine(
                    journaled,
                    retriever,
                    self._formats[name],
                    max_steps=setting.max_steps,
                    top_k=setting.top_k,
                    sampling=sampling(config.policy),
                )
                outcomes.append(await self._attempts(setting, config, engine, examiner, folder))
            return outcomes

    async def _attempts(
        self, setting: Setting, config: Config, engine: Engine, examiner: Examiner | None, folder: RunFolder
    ) -> Outcome:
        """One attempt at each question; gives up once more than `run.max_failed` have failed."""
        outcome = Outcome(setting, [None] * len(self.questions), [None] * len(self.questions))
        shards = ShardWriter(
            folder.path / "trajectories", setting.name, trajectory_schema(), shard_rows=_SHARD_ROWS, keep_empty=True
        )
        writer = _InOrder(shards)
        waiting = iter(enumerate(self.questions))
        workers = min(config.run.concurrency, len(self.questions))
        work = _Work(config, engine, examiner, outcome, writer)
        await gather_all(self._work(waiting, work) for _ in range(workers))
        tried = len(outcome.failures) + outcome.ends.total()
        if self._draining and tried < len(self.questions):
            raise Interrupted("the evaluation was stopped; everything paid for is kept")
        writer.close()
        return outcome

    async def _work(self, waiting: Iterator[tuple[int, Question]], work: _Work) -> None:
        config, outcome = work.config, work.outcome
        for place, question in waiting:
            if self._draining or len(outcome.failures) > config.run.max_failed * len(self.questions):
                return
            seed = derive_seed(config.seed, question.dataset, question.id)
            try:
                (trajectory,) = await work.engine.run([Trajectory(question)], seeds=[seed])
                reading = work.engine.format.read(trajectory)
                verdicts = NOT_JUDGED
                if work.examiner is not None:
                    verdicts = await work.examiner.examine(trajectory, reading, outcome.asked)
            except Interrupted:
                return
            except RunError:
                raise
            except Exception as error:
                outcome.failures[place] = set_aside(question, error)
                self.progress.failed += 1
                work.writer.put(place, None)
                continue
            outcome.scores[place] = scores(trajectory, reading=reading, rules=self.rules)
            outcome.verdicts[place] = verdicts
            outcome.ends[str(trajectory.stop_reason)] += 1
            if not reading.well_formed:
                outcome.out_of_form[reading.reason] += 1
            self.progress.done += 1
            work.writer.put(place, trajectory_row(trajectory, reading, verdicts, rules=self.rules))


@dataclass(frozen=True, slots=True)
class _Work:
    """What the attempts at one setting share."""

    config: Config
    engine: Engine
    examiner: Examiner | None
    outcome: Outcome
    writer: _InOrder


class _InOrder:
    """Rows come as questions finish and are written in the questions' order; few have to wait in memory."""

    def __init__(self, shards: ShardWriter) -> None:
        self._shards = shards
        self._waiting: dict[int, Row | None] = {}
        self._next = 0

    def put(self, place: int, row: Row | None) -> None:
        """Take the row of a place; None where it will have none."""
        self._waiting[place] = row
        while self._next in self._waiting:
            self._add(self._next)
            self._next += 1

    def close(self) -> None:
        """Write what waits behind questions that were not tried, and name the shards."""
        for place in sorted(self._waiting):
            self._add(place)
        self._shards.close()

    def _add(self, place: int) -> None:
        if (row := self._waiting.pop(place)) is not None:
            self._shards.add(row)


def _open_shared(configs: Mapping[str, Config]) -> tuple[list[Question], Retriever]:
    """Questions and retriever of the first policy, which have to be those of all others.

    Raises:
        ConfigError: they are not.
    """
    (first_name, first), *others = configs.items()
    questions = open_questions(first)
    retriever = open_retriever(first, questions)
    for name, config in others:
        if config.questions != first.questions:
            asked = questions_fingerprint(open_questions(config))
            if asked != questions_fingerprint(questions):
                raise ConfigError(f"policies {first_name} and {name} are given different questions; give them the same")
        if _place(config) != _place(first):
            other = open_retriever(config, questions)
            asyncio.run(other.aclose())
            if other.fingerprint != retriever.fingerprint:
                raise ConfigError(f"policies {first_name} and {name} search different corpora; give them the same")
    return questions, retriever


def _place(config: Config) -> dict[str, Any]:
    """Where searches go, without how their results are shown."""
    shown = {"top_k", "passage_order", "max_passage_chars"}
    return config.retrieval.model_dump(exclude=shown) | {"world_seed": config.questions.world_seed}


def _prepare(out: Path) -> None:
    """Create the folder, or see that an evaluation may be in it."""
    if (out / _JOURNAL).exists():
        raise RunError(f"{out} is a run of build-tree; choose another folder for --out, such as {out / 'eval'}")
    claim_folder(out, "evaluation", holds=(out / ".lock").exists())


def _release_memory() -> None:
    """Give a closed model's memory back to the device, for the next one."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
