"""Run policies on questions at every combination of settings, and report (Algorithm 1 of arXiv:2505.14069).

OUT/
├── NAME/                        one folder per policy
│   ├── config.yaml, journal.sqlite
│   └── trajectories/SETTING-*.parquet
├── metrics.json, report.md
└── plots/*.svg, *.png

The seed of a call depends only on the run's seed, the question and the step.
So two settings send the same requests until they differ, and the journal
answers them: a second step limit pays for its forced answers and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PureWindowsPath
from typing import Any

from reasonrag.core import event_loop
from reasonrag.core.config import Config, carried_settings
from reasonrag.core.errors import ConfigError, Interrupted, LLMError, RunError
from reasonrag.core.plugins import code_of
from reasonrag.core.settings import identity, validate
from reasonrag.core.text import Rules, normalize_answer
from reasonrag.core.types import Question, Trajectory
from reasonrag.evaluation.metrics import Attempt, Examiner, attempt_values, check_judged, trajectory_row
from reasonrag.evaluation.summary import Outcome, PolicyResult, Setting, asked_differently, how_asked, summarize
from reasonrag.evaluation.tables import write_report
from reasonrag.formats import PromptSet, open_format
from reasonrag.llm.base import LLM, Caller, StepScorer, caller
from reasonrag.pipeline import parts
from reasonrag.pipeline.tables import count_calls
from reasonrag.pipeline.work import Count, Progress, work_through
from reasonrag.rewards.answers import check_gradable, check_outcome, open_outcome
from reasonrag.rollout import Engine, callable_in_notebooks, derive_seed
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import Folder, RunFolder
from reasonrag.storage.parquet import Row, ShardWriter
from reasonrag.storage.tables import trajectory_schema

_SHARD_ROWS = 2_000

# All points of a sweep share a folder and its journal: requests that differ have different keys there.
_SWEPT = (
    *("policy.temperature", "format.max_steps", "format.max_searches", "retrieval.top_k"),
    *("choice.candidates", "choice.best_of", "choice.rule"),
)
# Settings of tree search, which no evaluation depends on.
_TREE_SETTINGS = ("search.", "value.", "judge.", "pairs.", "outcome.")
_SAFE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")  # Windows drops a last dot
_RESERVED = frozenset({"plots", "report", "report.md", "metrics.json"})

Show = Callable[["Evaluation"], AbstractAsyncContextManager[object]]


class Evaluation:
    """One evaluation of one or more policies.

    The policies run one after the other, because a device holds one model. Calls that an earlier
    evaluation in the same folder has paid for are not made again, whatever its settings were.
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        out: Path,
        *,
        temperatures: Sequence[float] | None = None,
        max_steps: Sequence[int] | None = None,
        max_searches: Sequence[int] | None = None,
        top_ks: Sequence[int] | None = None,
        choose: Sequence[str] | None = None,
        rules: Rules = "house",
        judged: Sequence[str] = (),
        differently: bool = False,
        questions: list[Question] | None = None,
    ) -> None:
        """Open questions and retriever, and check everything that needs no model.

        Args:
            configs: configurations by policy name, which is also the name of a folder in `out`. The first
                policy is the baseline. All share questions, corpus and seed.
            out: folder of the evaluation.
            temperatures: sampling temperatures to sweep; 0 is greedy
                decoding. None, here and below: as configured.
            max_steps: step limits to sweep.
            max_searches: limits of the searches to sweep.
            top_ks: passages per search to sweep.
            choose: rules to compare that keep one of `choice.best_of`
                attempts. All choose among the same attempts.
            rules: normalisation rules of EM, F1 and ACC.
            judged: which of LasJ, OSR and USR the judge of the first policy is asked for: lasj, osr, usr.
            differently: whether a policy with a card may be
                compared with one that has none and other prompts.
            questions: taken instead of the configured ones.

        Raises:
            ConfigError, DataError: the settings do not fit together, or a file cannot be read.
            LLMError: a policy's server does not answer.
        """
        check_names(configs)
        # A server names its model; its card has the prompts that the model was trained with.
        configs = {name: parts.as_served(config, out / name, asked=["policy"]) for name, config in configs.items()}
        for config in configs.values():  # check all of them before the first call is paid for
            parts.check_llm(config.policy, "policy")
        first = next(iter(configs.values()))
        self.judged = tuple(judged) or ("outcome",) * bool(first.outcome.verdicts)
        if self.judged:
            parts.check_llm(first.judge.llm, "judge")
            with contextlib.suppress(LLMError):  # found before the first call, or waited for by one that had begun
                first = parts.as_served(first, asked=["judge"])
            configs = {name: config.model_copy(update={"judge": first.judge}) for name, config in configs.items()}
            for config in configs.values():
                check_judged(self.judged, PromptSet.find(config.format.prompts))
        self.out = out
        self.rules = rules
        # Settings of two policies are paired by their place in these lists.
        swept = (temperatures, max_steps, max_searches, top_ks, choose)
        self.points = {name: sweep(config, *swept) for name, config in configs.items()}
        self._formats = {name: open_format(config) for name, config in configs.items()}
        if not differently:
            self._check_asked_alike()
        # Differences are paired by question, and the seed decides which questions are sampled.
        for name, config in configs.items():
            if _shared_settings(config) != _shared_settings(first):
                raise ConfigError(
                    f"policies {next(iter(configs))} and {name} differ in seed, questions, corpus or outcome; give "
                    "them the same"
                )
        self.questions = questions if questions is not None else parts.open_questions(first)
        check_gradable(first.outcome, self.questions)
        self.retriever = parts.open_retriever(first, self.questions)
        settings = [config for points in self.points.values() for _, config in points]
        self.progress = Progress(len(self.questions) * len(settings), part="steps")
        self.progress.planned = len(self.questions) * sum(map(_most_steps, settings))
        self.graded = settings[0].outcome.name != "f1"
        check_outcome(settings[0].outcome)
        self._draining = False
        self._folder: RunFolder | None = None
        self._judge: LLM | None = None
        self._scorer: StepScorer | None = None

    def _check_asked_alike(self) -> None:
        """Raise if a policy without a card is prompted differently from one with a card, unless all have begun.

        The same weights, prompted otherwise than in training, have had an EM of 0.000 for 0.200.
        """
        prompted, without_card = {}, []
        for name, points in self.points.items():
            config = points[0][1]
            if config.policy.spec != "extractive":  # which is not trained
                prompted[name] = how_asked(config, self._formats[name].fingerprint)
                if not carried_settings(config.policy.carrier):
                    without_card.append(name)
        if len(without_card) in (0, len(prompted)):
            return
        differences = list(asked_differently(prompted))
        if differences and not all(RunFolder.begun_with(self.out / name) for name in prompted):
            raise ConfigError(
                f"{'; '.join(differences)}. It is not known how {', '.join(without_card)} was prompted in training: "
                f"give its folder (--card {without_card[0]}=FOLDER, which may be that of another policy), or pass "
                "--allow-prompt-mismatch to compare them anyway"
            )

    def drain(self) -> None:
        """Finish the calls in flight and start no others; `run` then raises Interrupted."""
        self._draining = True
        if self._folder is not None:
            self._folder.journal.drain()

    @callable_in_notebooks
    def run(self, show: Show | None = None) -> dict[str, Any]:
        """Run the policies on all questions that the journals do not hold yet, and write the report.

        Args:
            show: context manager that is entered around the work of each policy,
                inside the event loop. It gets this evaluation: `progress` to
                show, `drain` to call on Ctrl-C. Models are loaded outside of it.

        Returns:
            The contents of `metrics.json`. `incomplete` lists settings at which more questions are
            missing than `run.max_failed` allows, `unjudged` those at which more verdicts failed.

        Raises:
            Interrupted: `drain` was called; the same evaluation run again resumes.
            ConfigError, RunError, LLMError, RetrievalError: a model, a retriever or the folder cannot be
                used, or too few of a policy's first steps can be read.
        """
        metrics = summarize(self.run_policies(show), self.questions, rules=self.rules)
        write_report(metrics, self.out)
        write_json(self.out / "metrics.json", metrics)  # last: if it is there, everything else is there too
        return metrics

    def run_policies(self, show: Show | None = None) -> list[PolicyResult]:
        """Run the policies without writing a report; arguments and exceptions are those of `run`."""
        if (self.out / "journal.sqlite").exists():
            other = self.out / "eval"
            raise RunError(f"{self.out} is a run of build-tree; choose another folder for --out, such as {other}")
        # One loop for all policies: they share a retriever, whose connections belong to the loop.
        with (
            Folder(self.out, "evaluation", "*/trajectories", ignore=self.points).locked(),
            event_loop.runner() as runner,
        ):
            try:
                name, points = next(iter(self.points.items()))
                if self.judged:
                    self._judge = parts.open_llm(points[0][1].judge.llm, "judge")
                self._scorer = parts.open_step_scorer(points[0][1], self._formats[name])
                return [self._run_policy(runner, name, show) for name in self.points]
            finally:
                for part in (self._judge, self._scorer, self.retriever):
                    if part is not None:
                        runner.run(part.aclose())

    def _run_policy(self, runner: asyncio.Runner, name: str, show: Show | None) -> PolicyResult:
        config = self.points[name][0][1]
        llm = parts.open_llm(config.policy, "policy")
        content = parts.contents(self.questions, self.retriever, self._formats[name], llm)
        if self._scorer is not None:
            content["prm"] = self._scorer.name
        varying = [*_SWEPT, *(setting for setting in identity(config) if setting.startswith(_TREE_SETTINGS))]
        try:
            with RunFolder(self.out / name, config, content, varying=varying).open() as folder:
                self._folder = folder
                if self._draining:
                    folder.journal.drain()
                return runner.run(self._run_settings(name, llm, folder, show))
        finally:
            self._folder = None
            self.progress.close()
            runner.run(llm.aclose())
            del llm
            release_memory()

    async def _run_settings(self, name: str, llm: LLM, folder: RunFolder, show: Show | None) -> PolicyResult:
        config, format = folder.config, self._formats[name]
        # The judge's replies go to the journal of the policy that they are about.
        opened = parts.Parts(self.questions, self.retriever, format, llm, self._judge, {})
        policy, judge, retriever = opened.journaled(self.progress, folder.journal, config)
        outcome = open_outcome(config.outcome, judge) if self.graded else None
        examiner = Examiner(judge, policy, self.judged, outcome)
        async with show(self) if show else contextlib.nullcontext():
            before = folder.facts().get("served")
            served = await parts.check(opened, begun=folder.begun, before=before, wait_s=config.run.wait_s)
            folder.bind()
            folder.keep_served(served | code_of(config.model_dump(mode="json")))
            outcomes = []
            for setting, at_setting in self.points[name]:
                self.progress.label = f"{name} {setting.name}"
                engine = parts.open_engine(at_setting, policy, retriever, format, self._scorer)
                outcomes.append(await self._run_setting(setting, at_setting, engine, examiner, folder))
        judged = examiner.describe() if judge or outcome else None
        return PolicyResult(name, config, folder.content, outcomes, count_calls(folder.journal, config), judged)

    async def _run_setting(
        self, setting: Setting, config: Config, engine: Engine, examiner: Examiner, folder: RunFolder
    ) -> Outcome:
        """Make one attempt at each question; give up once more than `run.max_failed` of them have failed."""
        outcome = Outcome(setting, [None] * len(self.questions), [None] * len(self.questions))
        place, schema = folder.path / "trajectories", trajectory_schema(graded=self.graded)
        shards = ShardWriter(place, setting.name, schema, shard_rows=_SHARD_ROWS, keep_empty=True)
        # Rows are written in the order of the questions; a row
        # that is finished before an earlier one waits here.
        waiting: dict[int, Row | None] = {}
        next_index = 0

        def keep(index: int, row: Row | None) -> None:
            nonlocal next_index
            waiting[index] = row
            while next_index in waiting:
                if ready := waiting.pop(next_index):
                    shards.add(ready)
                next_index += 1

        async def try_question(index: int, question: Question, count: Count) -> None:
            caller.set(Caller(f"{question.dataset}/{question.id}"))
            # Algorithm 1: search and read until the answer;
            # several times if one of the attempts is to be chosen.
            seed = derive_seed(config.seed, question.dataset, question.id)
            seeds = [seed, *(derive_seed(seed, "attempt", number) for number in range(1, config.choice.best_of))]
            trajectories = await engine.run([Trajectory(question)] * len(seeds), seeds=seeds, completed=count)
            trajectory = await choose(trajectories, config.choice.rule, self._scorer)
            reading = engine.format.read(trajectory)
            verdicts = await examiner.examine(trajectory, reading, outcome.asked)
            attempt = Attempt(trajectory, reading, verdicts, self.rules)
            values = attempt_values(attempt)
            outcome.add(index, attempt, values)
            keep(index, trajectory_row(attempt, values))

        async def keep_failure(index: int, question: Question, cause: str, error: Exception) -> None:
            outcome.failures[index] = cause
            keep(index, None)

        await work_through(
            self.questions,
            try_question,
            self.progress.engines,
            self.progress,
            failed=keep_failure,
            planned=_most_steps(config),
            most_failed=config.run.max_failed * len(self.questions),
            stopped=lambda: self._draining,
            stall_s=config.stall_s,
        )
        if self._draining and len(outcome.failures) + outcome.ends.total() < len(self.questions):
            raise Interrupted("the evaluation was stopped; everything paid for is kept")
        for index in sorted(waiting):  # they wait for questions that were never tried
            if row := waiting[index]:
                shards.add(row)
        shards.close()
        return outcome


def _most_steps(config: Config) -> int:
    """Return the most steps of a question at one setting."""
    return config.format.max_steps * config.choice.best_of


async def choose(attempts: Sequence[Trajectory], rule: str, scorer: StepScorer | None) -> Trajectory:
    """Return one of some attempts by a rule, the first of equals; one without an answer only if none has one.

    prm takes the attempt with the highest value of its last step: this step is
    scored after all notes, so its value is that of the whole attempt. majority
    takes the most frequent answer, normalised; first takes the first attempt.
    """
    if len(attempts) == 1 or rule == "first":
        return attempts[0]
    answered = [attempt for attempt in attempts if attempt.answer is not None] or attempts[:1]
    if rule == "majority" or scorer is None:
        answers = [normalize_answer(attempt.answer or "") for attempt in answered]
        return answered[answers.index(Counter(answers).most_common(1)[0][0])]
    last = [[step for step in attempt.steps if step.asked][-1] for attempt in answered]
    values = await scorer.score([(step.prompt, step.completion) for step in last])
    return answered[values.index(max(values))]


def _shared_settings(config: Config) -> list[Any]:
    """Return the settings of questions and search, without how passages are shown."""
    shown = {"top_k", "passage_order", "max_passage_chars"}
    return [config.seed, config.questions, config.retrieval.model_dump(exclude=shown), config.outcome]


def release_memory() -> None:
    """Return a closed model's memory to the device, so that the next model fits."""
    # Cycles of modules and hooks hold a model until they are collected.
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def sweep(config: Config, *swept: Sequence[Any] | None) -> list[tuple[Setting, Config]]:
    """Return every combination with its configuration; settings that are not swept (None) stay as configured.

    Args:
        config: of the policy.
        swept: temperatures, step limits, limits of the searches, passages per search, and rules of choice.

    Raises:
        ConfigError: a value is out of range.
    """
    choice, limits = config.choice, config.format
    configured = (config.policy.temperature, limits.max_steps, limits.max_searches, config.retrieval.top_k, choice.rule)
    values = [given or (value,) for given, value in zip(swept, configured, strict=True)]
    if choice.best_of == 1:
        values[-1] = ("",)
    configs = {}
    # The first point has the first value of everything: curves and differences start from it.
    for temperature, steps, searches, top_k, rule in itertools.product(*values):
        candidates = f"_c{choice.candidates}" if choice.candidates > 1 else ""
        kept = f"_{rule}-of-{choice.best_of}" if rule else ""
        tree = config.model_dump(mode="json")
        tree["choice"]["rule"] = rule or choice.rule
        tree["policy"]["temperature"] = temperature
        tree["format"] |= {"max_steps": steps, "max_searches": searches}
        tree["retrieval"]["top_k"] = top_k
        configs[Setting(temperature, steps, top_k, candidates + kept, searches)] = validate(Config, tree)
    return list(configs.items())


def folder_name(text: str) -> str:
    """Return a safe folder name for a policy's address or path.

    >>> folder_name("hf:out/my policy/"), folder_name("http://host:8000/v1")
    ('my-policy', 'http-host-8000-v1')
    """
    last = text if "://" in text else re.split(r"[:/\\]", text.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-._")[:64] or "policy"


def check_names(names: Collection[str]) -> None:
    """Check that the names of policies can be names of folders.

    Raises:
        ConfigError: no name is given, or one cannot be a folder.
    """
    for name in names:
        if not _SAFE_NAME.fullmatch(name) or name in _RESERVED or PureWindowsPath(name).is_reserved():
            raise ConfigError(
                f"policy name {name!r} cannot be a folder; use up to 64 letters, digits, `.`, `_` and `-`, and none of "
                f"{', '.join(sorted(_RESERVED))}"
            )
    if not names:
        raise ConfigError("no policy to evaluate; name at least one with --policy")
