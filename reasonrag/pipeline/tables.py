"""Tables of a run and their counts: trees from the journal, pairs from the trees, the shards of a run put together.

No model is called. Pairs are a function of the node table and the configuration, so another threshold, reward or alpha
needs no new search.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.config import Config
from reasonrag.core.errors import RunError
from reasonrag.core.settings import differences
from reasonrag.core.text import common_length, exact_match, token_f1
from reasonrag.core.types import Action, Answer, Malformed, Note, Question, Search, Shard, Step
from reasonrag.dpo.pairs import (
    NODE_COLUMNS,
    count_pairs,
    derive_pairs,
    derive_trajectory_pairs,
    in_test_split,
    repeated_questions,
)
from reasonrag.formats import Format
from reasonrag.mcts import Node, Tree
from reasonrag.spre import Weighting, node_rewards
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import RunFolder
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, ShardWriter, read_batches, read_shards, shard_paths, unpack
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_TREE_SHARD_ROWS = 20_000
_PAIR_SHARD_ROWS = 50_000
_TABLES = ("trees/nodes", "pairs/train", "pairs/test")
_PROMPT = ["prompt", "prefix"]
_COUNTED = ["action", "content", "stop_reason", "visits", "valued", "f1", "em"]


def tree_rows(tree: Tree, format: Format, *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return `[len(tree.nodes)]` rows of `tables.tree_schema` by node id, with each node's SPRE."""
    rewards = node_rewards(tree, alpha=alpha, weighting=weighting)
    return [_node_row(tree.question, node, rewards[node.id], format) for node in tree.nodes]


def _node_row(question: Question, node: Node, reward: float | None, format: Format) -> Row:
    trajectory = node.trajectory
    answer = trajectory.answer
    return {
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "node_id": node.id,
        "parent_id": -1 if node.parent is None else node.parent,
        "depth": node.depth,
        "origin": node.origin.value,
        "stage": format.stage(trajectory.steps).value,
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
        **_step_columns(node.step),
        "visits": node.visits,
        "valued": node.valued,
        "value": node.value,
        "spre": reward,
        "f1": None if answer is None else token_f1(answer, question.golden_answers),
        "em": None if answer is None else exact_match(answer, question.golden_answers),
    }


def _step_columns(step: Step | None) -> Row:
    """Return the columns that describe the step that led to a node."""
    if step is None:
        return {"action": "", "content": "", "prompt": [], "prefix": "", "stop": [], "text": "", "passages": []}
    completion, prompt = step.completion, step.prompt
    action, content = label(step.action)
    return {
        "action": action,
        "content": content,
        "prompt": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "prefix": prompt.prefix,
        "stop": list(prompt.stop),
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "token_ids": completion.token_ids and list(completion.token_ids),
        "logprobs": completion.logprobs and list(completion.logprobs),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "passages": [{"id": p.id, "contents": p.contents, "score": p.score} for p in step.passages],
    }


def label(action: Action) -> tuple[str, str]:
    """Return the name of an action in tables and reports, and the text inside its tag."""
    match action:
        case Search(query):
            return "query", query
        case Note(evidence):
            return "evidence", evidence or "None"
        case Answer(answer):
            return "answer", answer
        case Malformed(reason):
            return "malformed", reason


def export_trees(run: RunFolder, questions: Iterable[Question]) -> dict[str, Any]:
    """Write the node table, questions in their given order; return the counts of its trees and rows for `run.json`."""
    schema = tree_schema()
    writer = ShardWriter(run.path / "trees", "nodes", schema, shard_rows=_TREE_SHARD_ROWS, keep_empty=True)
    trees = unvalued = 0
    actions, stop_reasons, malformed = Counter[str](), Counter[str](), Counter[str]()
    f1, em = Counter[float](), Counter[float]()
    chars = shared_chars = without_ids = without_logprobs = 0
    for question in questions:
        blob = run.journal.tree(question.dataset, question.id)
        if blob is None:
            continue
        trees += 1
        batch = unpack(blob, schema)
        writer.add_batch(batch)
        tree_chars, shared_tree_chars = prompt_chars(batch.select(_PROMPT).to_pylist())
        chars += tree_chars
        shared_chars += shared_tree_chars
        without_ids += batch.column("token_ids").null_count - 1  # the root has none
        without_logprobs += batch.column("logprobs").null_count - 1
        for row in batch.select(_COUNTED).to_pylist():
            if row["action"]:
                actions[row["action"]] += 1
            else:  # every iteration visits the root, so its counts are those of the tree
                unvalued += row["visits"] - row["valued"]
            if row["action"] == "malformed":
                malformed[row["content"]] += 1
            if row["stop_reason"]:
                stop_reasons[row["stop_reason"]] += 1
            if row["f1"] is not None:
                f1[row["f1"]] += 1
                em[row["em"]] += 1
    writer.close()
    return {
        "questions": trees,
        "nodes": writer.rows,
        "by_action": dict(sorted(actions.items())),
        "by_stop_reason": dict(sorted(stop_reasons.items())),
        "malformed": dict(sorted(malformed.items())),
        "prompt_chars": chars,
        "shared_prompt_chars": shared_chars,
        "without_token_ids": without_ids,
        "without_logprobs": without_logprobs,
        "iterations_without_value": unvalued,
        "complete_trajectories": f1.total(),
        "mean_f1": fmean(f1.elements()) if f1 else None,
        "mean_em": fmean(em.elements()) if em else None,
    }


def prompt_chars(rows: Iterable[Row]) -> tuple[int, int]:
    """Return the characters of a tree's prompts, and how many of them a perfect prefix cache would serve.

    Such a cache forgets nothing, so the order of the calls does not matter: in a sorted list, a text shares with its
    neighbour the longest beginning that it shares with any text before it. System texts count as served, because all
    questions share them.

    Args:
        rows: columns `prompt` and `prefix` of its nodes.
    """
    texts = []
    for row in rows:
        if row["prompt"]:
            system, *messages = (message["content"] for message in row["prompt"])
            texts.append((system, "\0".join([*messages, row["prefix"]])))
    chars = shared = 0
    before = ""
    for system, rest in sorted(texts):
        text = f"{system}\0{rest}"
        chars += len(text)
        shared += max(common_length(before, text), len(system))
        before = text
    return chars, shared


class PairCounts:
    """Counts of preference pairs, for `run.json`, `stats` and cards."""

    def __init__(self) -> None:
        self.splits: Counter[str] = Counter()
        self.types: Counter[str] = Counter()  # pairs of trajectories have none
        self.depths: Counter[int] = Counter()
        self.margins = array("d")
        self.questions = 0
        self._last_question: tuple[str, str] | None = None

    def add(self, pair: Row, split: str) -> None:
        """Count a pair; the pairs of a question come one after another."""
        self.splits[split] += 1
        if "chosen_type" in pair:
            self.types[f"{pair['chosen_type']} > {pair['rejected_type']}"] += 1
        self.depths[pair["depth"]] += 1
        self.margins.append(pair["margin"])
        question = pair["dataset"], pair["question_id"]
        self.questions += question != self._last_question
        self._last_question = question

    def summary(self, left_out: Mapping[str, int]) -> dict[str, Any]:
        """Return the counts as JSON values, with the median margin."""
        return {
            "total": self.splits.total(),
            "train": self.splits["train"],
            "test": self.splits["test"],
            "left_out": dict(sorted(left_out.items())),
            "questions_with_pairs": self.questions,
            "by_type": dict(sorted(self.types.items())),
            "by_depth": {str(depth): count for depth, count in sorted(self.depths.items())},
            "median_margin": _median(self.margins),
        }


def export_pairs(
    run: Path, config: Config, *, policy: str, config_hash: str, out: Path | None = None
) -> dict[str, Any]:
    """Derive pairs from a run's node table and write both splits to `out` (default: the run's `pairs/`).

    Returns:
        Counts: total, by split, `left_out` by cause, by type of chosen and rejected (only for pairs of steps), by
        depth; the median margin; the settings of the comparison.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    settings = config.pairs
    whole = settings.level == "trajectory"
    schema = trajectory_pair_schema() if whole else pair_schema()
    writers = {}
    for split in ("train", "test"):
        writers[split] = ShardWriter(out or run / "pairs", split, schema, shard_rows=_PAIR_SHARD_ROWS)
    counts, left_out = PairCounts(), Counter[str]()
    nodes = read_shards(run / "trees", "nodes", tree_schema(), columns=NODE_COLUMNS)
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    for pair in pairs_of(nodes, config, policy=policy, config_hash=config_hash, repeated=repeated, left_out=left_out):
        question = (pair["dataset"], pair["question_id"])
        split = "test" if in_test_split(question, settings.test_share, repeated) else "train"
        writers[split].add(pair)
        counts.add(pair, split)
    for writer in writers.values():
        writer.close()
    return counts.summary(left_out) | {
        "min_margin": settings.min_margin,
        "min_rollouts": settings.min_rollouts,
        "min_confidence": settings.min_confidence,
        "reward": "f1" if whole else settings.reward,
        "alpha": None if whole else settings.alpha or config.value.alpha,
        "level": settings.level,
    }


def count_pairs_of(tree: Sequence[Row], config: Config) -> int:
    """Return the number of pairs that `pairs_of` yields for the rows of one tree."""
    if config.pairs.level == "trajectory":
        return sum(1 for _ in pairs_of(tree, config, policy="", config_hash=""))
    return count_pairs(tree, **_comparison(config))


def pairs_of(
    nodes: Iterable[Row],
    config: Config,
    *,
    policy: str,
    config_hash: str,
    repeated: Collection[tuple[str, str]] | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[Row]:
    """Yield the pairs that the configuration asks for.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and in the order of their ids.
        config: the run's configuration; `pairs` and `value` are used.
        policy: the policy's name, a column of every pair.
        config_hash: of the run that made the trees.
        repeated: as in `derive_pairs`.
        left_out: gets the number of pairs left out, by cause.
    """
    common: dict[str, Any] = {"policy": policy, "config_hash": config_hash, "read_ids": config.policy.reads_ids}
    common |= {"repeated": repeated, "left_out": left_out}
    if config.pairs.level == "trajectory":
        return derive_trajectory_pairs(nodes, min_margin=config.pairs.min_margin, **common)
    return derive_pairs(nodes, **_comparison(config), **common)


def _comparison(config: Config) -> dict[str, Any]:
    """Return the arguments of `derive_pairs` and `count_pairs` for the settings of the comparison."""
    chosen = config.pairs.model_dump(include={"min_margin", "min_rollouts", "min_confidence", "reward"})
    return chosen | {"alpha": config.pairs.alpha or config.value.alpha, "weighting": config.value.weighting}


def count_calls(journal: Journal, config: Config) -> dict[str, Any]:
    """Return calls, tokens and cost by kind of call, over all processes that worked on the run."""
    prices = config.prices
    calls: dict[str, Any] = {}
    for kind, used in journal.usage().items():
        calls[kind] = {"calls": used.calls}
        if kind in prices:  # a search has no tokens
            calls[kind] |= {
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "calls_without_token_counts": used.unknown_tokens,
                "cached_tokens": used.cached_tokens,
                "cached_of": used.cached_of,
                "cost": prices[kind].cost(used.prompt_tokens, used.completion_tokens),
            }
    return calls


def finish_shard(shard: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Note in the folder of the run that a shard has finished; if it is the last one, put the run together.

    The run's folder is locked meanwhile, so of two shards that finish at once the second one finds both.

    Returns:
        The content of the run's `run.json`, or the shard's `summary` if other shards have not finished.

    Raises:
        RunError: the run cannot be put together, because the shards hold pairs of different settings.
    """
    files = {table: len(list(shard.path.glob(f"{table}-*.parquet"))) for table in _TABLES}
    note = {"summary": summary, "files": files, "pairs": shard.config.pairs.model_dump(mode="json")}
    with shard.whole() as run:
        notes = run.note_shard(shard.shard, note)
        return _join(run, notes) if all(notes) else dict(summary)


def _join(run: RunFolder, notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put a run together from the notes of all its shards; return the content of its `run.json`.

    Its tables are second names of the shards' files, in the order of the shards.
    """
    shards = [Shard(number, len(notes)) for number in range(len(notes))]
    for shard, note in zip(shards, notes, strict=True):
        if other := differences(note["pairs"], notes[-1]["pairs"]):
            raise RunError(
                f"{run.path} cannot be put together: shards {shard} and {shards[-1]} have pairs of different settings "
                f"({other}); run one of them again with the settings of the other"
            )
    margins = array("d")
    pair_table = trajectory_pair_schema() if run.config.pairs.level == "trajectory" else pair_schema()
    for table in _TABLES:
        place, _, stem = table.partition("/")
        writer = ShardWriter(run.path / place, stem, tree_schema(), shard_rows=1)
        for shard, note in zip(shards, notes, strict=True):
            # A shard without nodes has one empty file, which `datasets` refuses.
            count = note["files"][table] if place == "pairs" or note["summary"]["trees"]["nodes"] else 0
            for part in range(count):
                path = shard.folder(run.path) / f"{table}-{part:05d}-of-{count:05d}.parquet"
                writer.link(path)
                if place == "pairs":
                    for batch in read_batches(path, pair_table, columns=("margin",)):
                        margins.extend(batch.column(0).to_numpy())
        writer.close()
    summary = add_up([note["summary"] for note in notes])
    summary["pairs"]["median_margin"] = _median(margins)
    write_json(run.path / "run.json", summary)
    return summary


def add_up(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `run.json` of a run from that of its shards: counts and seconds added, means weighted."""
    added = {name: _total([summary[name] for summary in summaries]) for name in ("questions", "trees", "calls")}
    ended = added["trees"]["complete_trajectories"]
    for name in ("mean_f1", "mean_em"):
        weighted = 0.0
        for summary in summaries:
            weighted += (summary["trees"][name] or 0.0) * summary["trees"]["complete_trajectories"]
        added["trees"][name] = weighted / ended if ended else None
    counted = PairCounts().summary({}).keys() - {"median_margin"}
    pairs = {name: _total([summary["pairs"][name] for summary in summaries]) for name in counted}
    added["pairs"] = summaries[0]["pairs"] | pairs
    seconds = round(sum(summary["seconds"] for summary in summaries), 3)
    return {**summaries[0], **added, "seconds": seconds, "shards": len(summaries)}


def _total(values: Sequence[Any]) -> Any:
    """Return a sum of counts; counts with names are added by name, and an unknown one (None) makes the sum unknown."""
    if not isinstance(values[0], dict):
        return None if None in values else sum(values)
    names = {name for value in values for name in value}
    in_order = sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return {name: _total([value[name] for value in values if name in value]) for name in in_order}


def _median(margins: array[float]) -> float | None:
    import numpy as np

    return float(np.median(margins)) if margins else None
