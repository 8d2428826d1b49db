"""Questions to trees to tables: the body of `build-tree`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core import event_loop
from reasonrag.core.config import Config, OutcomeConfig
from reasonrag.core.plugins import code_of
from reasonrag.core.settings import expect
from reasonrag.core.types import WHOLE, Question, Shard, Trajectory
from reasonrag.dpo.pairs import rivals_of
from reasonrag.formats import open_format
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.mcts.search import Evaluator, Origin, Tree, TreeSearch, graft
from reasonrag.pipeline.parts import Parts, as_served, check, open_engine, open_parts, open_questions
from reasonrag.pipeline.tables import count_calls, export_pairs, export_trees, finish_shard, rules_of, tree_rows
from reasonrag.pipeline.work import Count, Progress, work_through
from reasonrag.rewards.answers import graded, open_outcome
from reasonrag.rewards.judge import TRIES
from reasonrag.rollout import callable_in_notebooks, derive_seed, gather_all
from reasonrag.spre.decisions import confidence
from reasonrag.spre.estimate import JudgeEvaluator, PRMEvaluator, RolloutEvaluator
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import RunFolder, versions
from reasonrag.storage.parquet import pack
from reasonrag.storage.questions import cut
from reasonrag.storage.tables import tree_schema

log = structlog.get_logger()

_WRITTEN = 60  # tokens of a step, as most formats and models write them
# Outside of these confidences fresh rollouts seldom change what
# becomes of a pair: for 2,129 pairs on real questions they cost a
# sixth more, and not one pair in a hundred more was kept or right.
_HOPELESS, _SURE = 0.55, 0.9
_PASSAGE_CHARS = 600  # a passage of 100 words, as Wikipedia is cut

Show = Callable[["Build"], AbstractAsyncContextManager[object]]


@callable_in_notebooks
def build_trees(
    config: Config, out: Path | str, *, parts: Parts | None = None, shard: Shard = WHOLE, show: Show | None = None
) -> dict[str, Any]:
    """Search a tree for each question and write nodes and preference pairs into a folder, as `build-tree` does.

    The same call resumes a run that was stopped or killed; it repeats only calls that were in flight.

    Args:
        config: from `load_config`.
        out: the folder of the run.
        parts: from `open_parts`, for example with a retriever or a policy of yours; closed at the end.
        shard: the part of the questions to build. The last shard that finishes puts the run together.
        show: returns a context manager that is entered while trees are built; it may read
            `Build.progress` and call `Build.drain`.

    Returns:
        The content of `run.json`: counts of questions, nodes, pairs, calls
        and failures by cause. It is that of the shard until all shards
        have finished, then that of the run, with their number as `shards`.

    Raises:
        Interrupted: `Build.drain` was called; everything paid for is kept.
        ConfigError, DataError, RunError: bad input, or a folder that cannot be used.
    """
    expect(Config, config)
    # The parts: questions, retriever, format (states to prompts),
    # policy, and the judge of Eq. 6 if it values nodes.
    if parts is None:
        config = as_served(config, Path(out))
        parts = open_parts(config)
    parts = replace(parts, questions=cut(parts.questions, shard.of)[shard.number])
    if parts.outcome is not None:  # the run is named after it
        name = getattr(parts.outcome, "__name__", type(parts.outcome).__name__)
        config = config.model_copy(update={"outcome": OutcomeConfig(name=name)})
    with RunFolder(Path(out), config, parts.content, shard=shard).open() as run:
        build = Build(config, parts, run)

        async def build_tree(place: int, question: Question, count: Count) -> None:
            # Sec. 2.2.2: select by Eq. 5, expand by a step of
            # the policy, value by SPRE (Eq. 1), back up (Eq. 7).
            tree = await build.search.run(question, count=count)
            await build.confirm(tree)
            # SPRE of every node, over the complete trajectories through it. A node is a row.
            rows = tree_rows(tree, build.parts.format, alpha=config.value.alpha, weighting=config.value.weighting)
            await run.journal.put_tree(question.dataset, question.id, pack(rows, tree_schema(graded=build.graded)))
            build.progress.written["nodes"] += len(rows)

        async def keep_failure(place: int, question: Question, cause: str, error: Exception) -> None:
            await run.journal.put_failure(question.dataset, question.id, cause, str(error))

        async def build_all() -> None:
            async with contextlib.aclosing(build.parts):
                before = run.facts().get("served")
                served = await check(build.parts, begun=run.begun, before=before, wait_s=config.run.wait_s)
                run.keep_served(served | code_of(config.model_dump(mode="json")))
                async with show(build) if show else contextlib.nullcontext():
                    # As many questions at once as keep the engines busy,
                    # never in lockstep. A finished tree is in the journal;
                    # a question that fails is retried by the next run.
                    run.bind()
                    try:
                        await work_through(
                            build.unfinished(),
                            build_tree,
                            build.progress.engines,
                            build.progress,
                            failed=keep_failure,
                            planned=config.search.iterations,
                            most_failed=config.run.max_failed * len(build.parts.questions),
                            stopped=lambda: run.journal.ended_by is not None,
                            stall_s=config.stall_s,
                        )
                    finally:
                        run.note(seconds=run.facts().get("seconds", 0.0) + build.progress.seconds)

        event_loop.run(build_all())
        run.journal.admit()  # raises if the run was stopped
        # Sec. 2.2.3: of two siblings that differ enough in SPRE, the
        # higher one is chosen. Tables follow from the journal alone.
        summary = build.export()
        return summary if shard == WHOLE else finish_shard(run, summary)


class Build:
    """The parts of one run of `build-tree`, ready to search.

    Attributes:
        search: builds the tree of a question.
        progress: of this process.
        graded: whether the answers have grades, as their outcome is not token F1.
    """

    def __init__(self, config: Config, parts: Parts, run: RunFolder) -> None:
        self.config = config
        self.parts = parts
        self.run_folder = run
        self.progress = Progress(len(parts.questions), "questions", written=Counter(nodes=0))
        policy, judge, retriever = parts.journaled(self.progress, run.journal, config)
        engine = open_engine(config, policy, retriever, parts.format, parts.scorer)
        self.completing = engine
        if parts.completer is not None:
            completer = self.progress.open(parts.completer, run.journal, "completer")
            self.completing = open_engine(config, completer, retriever, parts.format, parts.scorer)
        self.graded = config.outcome.name != "f1"
        if self.graded:
            engine.grade = partial(graded, open_outcome(config.outcome, judge, parts.outcome))
            self.completing.grade = engine.grade
        evaluator: Evaluator
        if config.value.kind == "prm" and parts.scorer is not None:
            evaluator = PRMEvaluator(parts.scorer, alpha=config.value.alpha)
        elif config.value.kind == "judge" and judge is not None:
            evaluator = JudgeEvaluator(judge)
        else:
            evaluator = RolloutEvaluator(self.completing, k=config.value.rollouts, alpha=config.value.alpha)
        # Each step of a recorded agent is branched before the search goes its own way.
        recorded = parts.format.trajectories if isinstance(parts.format, RecordedFormat) else {}
        self.search = TreeSearch(
            engine,
            evaluator,
            config.search,
            seed=config.seed,
            rollouts=Origin.ROLLOUT if parts.completer is None else Origin.COMPLETION,
            recorded=lambda question: recorded.get((question.dataset, question.id), ()),
        )

    async def confirm(self, tree: Tree) -> None:
        """Make fresh rollouts below both sides of each pair that is in doubt, `pairs.confirm` of each.

        The search went on where it looked good, so the higher of two rewards
        is often too high. Where answering is compared with searching, as
        many answers are demanded instead. `search.max_calls` holds here too.
        """
        count = self.config.fresh_rollouts
        starts = self._to_confirm(tree) if count else []

        async def go_on(start: int, is_stop: bool, number: int) -> Trajectory:
            question, trajectory = tree.question, tree.nodes[start].trajectory
            seed = derive_seed(self.config.seed, question.dataset, question.id, "confirm", start, number)
            if is_stop:
                return await self.search.engine.step(trajectory, seed=seed, final=True)
            return (await self.completing.run([trajectory], seeds=[seed]))[0]

        attempts = [(*start, number) for start in starts for number in range(count)]
        rollouts = await gather_all([go_on(*attempt) for attempt in attempts])
        for (start, _, _), rollout in zip(attempts, rollouts, strict=True):
            # Without a value: the search is over, and these are no part of its means.
            graft(tree, tree.nodes[start], rollout, None, Origin.CONFIRMATION)

    def _to_confirm(self, tree: Tree) -> list[tuple[int, bool]]:
        """Return nodes to go on from, the surest pairs first, and whether an answer is demanded there."""
        config, search = self.config, self.config.search
        rows = tree_rows(tree, self.parts.format, alpha=config.value.alpha, weighting=config.value.weighting)
        sides: dict[tuple[int, bool], None] = {}
        for better, worse in rivals_of(rows, rules_of(config)):
            if _HOPELESS <= confidence(better.decision, worse.decision) < _SURE:
                for side in (better, worse):
                    is_stop = side.decision.drawn
                    if not side.decision.known:
                        sides[side.node["parent_id" if is_stop else "node_id"], is_stop] = None
        if search.max_calls is None:
            return list(sides)
        calls_left = search.max_calls - (len(tree.nodes) - 1) * config.choice.candidates - tree.verdicts
        longest = config.format.max_steps * config.choice.candidates + config.outcome.verdicts
        longest *= config.fresh_rollouts
        return list(sides)[: max(calls_left, 0) // longest]

    def unfinished(self) -> list[Question]:
        """Return the questions without a tree in the journal, and count the others as done."""
        finished = self.run_folder.journal.finished()
        questions = self.parts.questions
        unfinished = [question for question in questions if (question.dataset, question.id) not in finished]
        self.progress.done = self.progress.done_before = len(questions) - len(unfinished)
        self.progress.planned = len(unfinished) * self.config.search.iterations
        if self.run_folder.begun and unfinished:
            log.info(f"going on: {self.progress.done} of {len(questions)} questions are finished")
        return unfinished

    def drain(self) -> None:
        """Finish the calls in flight and begin no others; the build then ends."""
        self.run_folder.journal.drain()

    def export(self) -> dict[str, Any]:
        """Write `trees/`, `pairs/` and `run.json` from the journal alone, so that it can be repeated at any time.

        Returns:
            The content of `run.json`.
        """
        run, config, parts = self.run_folder, self.config, self.parts
        keys = {(question.dataset, question.id) for question in parts.questions}
        failures = run.journal.failures()
        failed = Counter(cause for dataset, question_id, cause, _ in failures if (dataset, question_id) in keys)
        trees = export_trees(run, parts.questions, graded=self.graded)
        summary = {
            "questions": {
                "total": len(parts.questions),
                "finished": trees["questions"],
                "failed": dict(sorted(failed.items())),
            },
            "trees": trees,
            "pairs": export_pairs(run.path, config, policy=parts.policy.name, config_hash=run.config_hash),
            "calls": count_calls(run.journal, config),
            "seconds": round(run.facts().get("seconds", 0.0), 3),
            "seed": config.seed,
            "config_hash": run.config_hash,
            "content": parts.content,
            "policy": parts.policy.name,
            "judge": parts.judge.name if parts.judge else None,
            "outcome": config.outcome.name,
            **({"prm": parts.scorer.name} if parts.scorer else {}),
            **({"completer": parts.completer.name} if parts.completer else {}),
            "versions": versions(),
        }
        write_json(run.path / "run.json", summary)
        return summary


def most_calls(config: Config) -> dict[str, int]:
    """Return the most calls of a tree by role: every expansion and every rollout goes to the step limit."""
    search, choices, value = config.search, config.choice.candidates, config.value
    # An iteration is one step, and with rollouts (Eq. 1) k completions of it to the step limit.
    rollout_steps = value.rollouts * max(config.format.max_steps - 1, 0) if value.kind == "rollout" else 0
    answers = value.rollouts if value.kind == "rollout" else 1
    per_iteration = Counter(policy=choices, judge=int(value.kind == "judge") + config.outcome.verdicts * answers)
    completing = "completer" if config.completer.spec else "policy"
    per_iteration[completing] += rollout_steps * choices
    most = Counter({role: search.iterations * calls for role, calls in per_iteration.items()})
    # Both sides of each pair are confirmed by rollouts to the step limit, or by answers of the policy.
    nodes = search.iterations * (1 + rollout_steps)
    rollouts = config.fresh_rollouts * min(2 * config.pairs.per_question or nodes, nodes)
    most["judge"] += rollouts * config.outcome.verdicts
    fresh = rollouts * choices
    most[completing] += fresh * max(config.format.max_steps - 1, 1)
    most["policy"] += fresh if config.completer.spec else 0
    if search.max_calls is not None:  # iterations in flight are completed, as `TreeSearch` says
        limit = search.max_calls - 1 + per_iteration.total() * (search.in_flight + 1)
        most = Counter({role: min(calls, limit) for role, calls in most.items()})
    return dict(most) | {"judge": most["judge"] * TRIES}


def estimate(config: Config) -> str:
    """Return in words the calls, tokens and cost that a run needs at most. Calls no model."""
    questions = open_questions(config)
    format = open_format(config)
    steps = config.format.max_steps
    a_tree = most_calls(config)
    first_prompts = [format.prompt(question, ()) for question in questions[:100]]
    prompt_chars = sum(len(message.content) for prompt in first_prompts for message in prompt.messages)
    passage_chars = min(_PASSAGE_CHARS, config.retrieval.max_passage_chars) * config.retrieval.top_k
    # About 4 characters a token; every second step shows passages; thoughts grow by what a step writes.
    prompt_tokens = (prompt_chars / len(first_prompts) + passage_chars / 2) / 4 + _WRITTEN * steps / 2
    written = {role: min(_WRITTEN, model.max_tokens) for role, model in config.prices.items()}
    calls = {role: len(questions) * count for role, count in a_tree.items()}
    millions = (calls["policy"] + calls.get("completer", 0)) * (prompt_tokens + written["policy"]) / 1e6
    lines = [
        f"{len(questions)} questions; at most {a_tree['policy']} policy calls and {a_tree['judge']} judge calls each",
        f"at most {calls['policy']} policy calls and {calls['judge']} judge calls; early ends save most of them",
        f"about {prompt_tokens:.0f} prompt tokens and {written['policy']} written ones a call: {millions:.1f} M tokens "
        f"at most (--max-tokens allows {config.policy.max_tokens} written ones)",
    ]
    if completions := a_tree.get("completer", 0):
        lines.insert(2, f"at most {calls['completer']} calls of the completer, {completions} for each question")
    for role, count in calls.items():
        cost = config.prices[role].cost(round(count * prompt_tokens), count * written[role])
        if count and cost is not None:
            lines.append(f"{role} cost at most {cost:.2f}")
    return "\n".join(lines)
