"""Tables of a run and their counts: trees from the journal, pairs from the trees, the shards of a run put together.

No model is called. Pairs are a function of the node table and the configuration, so another threshold,
reward or alpha needs no new search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import Config
from reasonrag.core.text import exact_match, excerpt, token_f1
from reasonrag.core.types import Action, Answer, Malformed, Note, Question, Search, Shard, Step
from reasonrag.dpo.pairs import (
    NODE_COLUMNS,
    PairRules,
    derive_pairs,
    derive_trajectory_pairs,
    in_test_split,
    repeated_questions,
)
from reasonrag.formats import Format
from reasonrag.mcts.search import Node, Tree
from reasonrag.spre.estimate import Weighting, node_rewards
from reasonrag.storage.files import write_json
from reasonrag.storage.folder import RunFolder
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import Row, ShardWriter, read_batches, read_shards, shard_paths, unpack
from reasonrag.storage.tables import GRADE, pair_schema, trajectory_pair_schema, tree_schema

if TYPE_CHECKING:
    import pyarrow as pa

_TREE_SHARD_ROWS = 20_000
_PAIR_SHARD_ROWS = 50_000
_SPLITS = ("train", "test")
_PATH = ("parent_id", "action", "f1")
_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}

PAIR_TABLES = {"step": pair_schema, "trajectory": trajectory_pair_schema}  # by the level of the pairs


def tree_rows(tree: Tree, format: Format, *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return `[len(tree.nodes)]` rows of `tables.tree_schema` by node id, with each node's SPRE."""
    rewards = node_rewards(tree, alpha=alpha, weighting=weighting)
    return [_node_row(tree.question, node, rewards[node.id], format) for node in tree.nodes]


def _node_row(question: Question, node: Node, reward: float | None, format: Format) -> Row:
    trajectory = node.trajectory
    answer = trajectory.answer
    return {
        # Texts of the question stand in every row: a table
        # is read without the files that it was made from.
        "dataset": question.dataset,
        "question_id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "node_id": node.id,
        # No null in the column: readers then take it as integers, not as floats.
        "parent_id": -1 if node.parent is None else node.parent,
        "depth": node.depth,
        "origin": node.origin.value,
        "stage": format.stage(trajectory.steps).value,
        "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
        **step_columns(node.step),
        "visits": node.visits,
        "valued": node.valued,
        "value": node.value,
        "spre": reward,
        "f1": None if answer is None else token_f1(answer, question.golden_answers),
        "em": None if answer is None else exact_match(answer, question.golden_answers),
        "grade": trajectory.grade and asdict(trajectory.grade),
    }


def step_columns(step: Step | None) -> Row:
    """Return the columns that describe a step: one that led to a node, None for the root, or one of a trajectory."""
    if step is None:
        return {"action": "", "content": "", "prompt": [], "prefix": "", "stop": [], "text": "", "passages": []}
    completion, prompt = step.completion, step.prompt
    # `dataclasses.asdict` takes ten times as long, and every step of every tree comes here.
    columns = ("id", "contents", "score")
    passages = [{name: getattr(passage, name) for name in columns} for passage in step.passages]
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
        "passages": passages,
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


def export_trees(run: RunFolder, questions: Iterable[Question], *, graded: bool = False) -> dict[str, Any]:
    """Write the node table from the journal, questions in their given order; return the counts of `count_trees`.

    `graded`: it has a column of grades, as the outcome is not token F1.
    """
    schema = tree_schema(graded=graded)
    writer = ShardWriter(run.path / "trees", "nodes", schema, shard_rows=_TREE_SHARD_ROWS, keep_empty=True)
    # A tree was packed once it was finished; its rows go from the journal into the table as they are.
    for question in questions:
        if (blob := run.journal.tree(question.dataset, question.id)) is not None:
            writer.add_batch(unpack(blob))
    writer.close()
    return count_trees(run.path)


def count_trees(run: Path) -> dict[str, Any]:
    """Return the counts of a run's node table for `run.json`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ("action", "stop_reason", "f1", "em", "prompt_tokens", "completion_tokens")
    counts: dict[str, Counter[Any]] = {name: Counter() for name in names}
    malformed, datasets, rounds = Counter[str](), Counter[str](), Counter[int]()
    examples: dict[str, str] = {}  # by reason, the first step that could not be read
    searches: list[int] = []  # on the path to each node of the tree at hand, its own step included
    unvalued = without_ids = without_logprobs = 0
    outcomes = Counter[Any]()
    columns = [*counts, "dataset", "parent_id", "content", "text", "visits", "valued", "token_ids", "logprobs", GRADE]
    for path in shard_paths(run / "trees", "nodes"):
        for batch in read_batches(path, tree_schema(), columns=columns):
            for name, count in counts.items():
                _add_values(count, batch.column(name))
            unreadable = batch.filter(pc.equal(batch.column("action"), "malformed"))
            _add_values(malformed, unreadable.column("content"))
            for step in unreadable.select(["content", "text"]).to_pylist():
                examples.setdefault(step["content"], excerpt(step["text"]))
            # Every iteration visits the root, which has no action: its counts are those of the tree.
            roots = batch.filter(pc.equal(batch.column("action"), ""))
            _add_values(datasets, roots.column("dataset"))
            unvalued += pc.sum(pc.subtract(roots.column("visits"), roots.column("valued"))).as_py() or 0
            if GRADE in batch.schema.names:
                _add_values(outcomes, pc.struct_field(batch.column(GRADE).drop_null(), "value"))
            without_ids += batch.column("token_ids").null_count - roots.num_rows
            without_logprobs += batch.column("logprobs").null_count - roots.num_rows
            for parent, action, score in zip(*map(pa.Array.to_pylist, batch.select(_PATH).columns), strict=True):
                searches = searches if parent >= 0 else []  # parents come before their children
                searches.append((searches[parent] if searches else 0) + (action == "query"))
                if score is not None:
                    # Searches and the answer (Algorithm 1). The paper does
                    # not define its iterations; they start at 1, too.
                    rounds[searches[-1] + 1] += 1
    nodes = counts["action"].total()
    for count in counts.values():
        del count[None]
    f1, em = counts["f1"], counts["em"]
    unknown_outcomes = outcomes.pop(None, 0)
    return {
        "questions": counts["action"].pop("", 0),
        "nodes": nodes,
        "by_dataset": dict(sorted(datasets.items())),
        "by_action": dict(sorted(counts["action"].items())),
        "by_stop_reason": dict(sorted(counts["stop_reason"].items())),
        "malformed": dict(sorted(malformed.items())),
        "unreadable": examples,
        "without_token_ids": without_ids,
        "without_logprobs": without_logprobs,
        "iterations_without_value": unvalued,
        "complete_trajectories": f1.total(),
        "mean_f1": fmean(f1.elements()) if f1 else None,
        "mean_em": fmean(em.elements()) if em else None,
        "mean_outcome": fmean(outcomes.elements()) if outcomes else None,
        "unknown_outcomes": unknown_outcomes,
        "distributions": {
            "rounds": distribution(rounds),
            "prompt tokens": distribution(counts["prompt_tokens"]),
            "completion tokens": distribution(counts["completion_tokens"]),
        },
    }


def distribution(counts: Mapping[Any, int]) -> dict[str, float] | None:
    """Return count, mean and quantiles (linear between neighbours) of values with their counts; None without values.

    >>> distribution({1: 1, 3: 1, 2: 2})["median"]
    2.0
    """
    import numpy as np

    if not counts:
        return None
    values, times = np.array(sorted(counts.items()), dtype=float).T
    ends = np.cumsum(times)  # [values] how many are not above each value
    places = np.array(list(_QUANTILES.values())) * (ends[-1] - 1)
    below, above = (values[np.searchsorted(ends, place, side="right")] for place in (np.floor(places), np.ceil(places)))
    quantiles = below + (above - below) * (places - np.floor(places))
    mean = float(np.average(values, weights=times))
    return {"count": int(ends[-1]), "mean": mean, **dict(zip(_QUANTILES, quantiles.tolist(), strict=True))}


def _add_values(counts: Counter[Any], column: pa.Array) -> None:
    """Count the values of a column, without making a Python object of each."""
    for group in column.value_counts().to_pylist():
        counts[group["values"]] += group["counts"]


def export_pairs(run: Path, config: Config, *, policy: str, config_hash: str) -> dict[str, Any]:
    """Derive pairs from a run's node table and write both splits to its `pairs/`.

    Returns:
        The counts of `count_pairs`, `left_out` by cause, and the settings of the comparison.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    settings = config.pairs
    whole = settings.level == "trajectory"
    folder, schema = run / "pairs", PAIR_TABLES[settings.level]()
    writers = {split: ShardWriter(folder, split, schema, shard_rows=_PAIR_SHARD_ROWS) for split in _SPLITS}
    left_out = Counter[str]()
    nodes = read_shards(run / "trees", "nodes", tree_schema(), columns=NODE_COLUMNS)
    # Questions of one text belong to one split, or the
    # test split would hold prompts of the training split.
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    common: dict[str, Any] = {"policy": policy, "config_hash": config_hash, "read_ids": config.policy.reads_ids}
    common |= {"repeated": repeated, "left_out": left_out}
    if whole:
        pairs = derive_trajectory_pairs(nodes, min_margin=settings.min_margin, **common)
    else:
        pairs = derive_pairs(nodes, rules_of(config), **common)
    for pair in pairs:
        question = (pair["dataset"], pair["question_id"])
        writers["test" if in_test_split(question, settings.test_share, repeated) else "train"].add(pair)
    for writer in writers.values():
        writer.close()
    return count_pairs(folder, config) | {
        "left_out": dict(sorted(left_out.items())),
        **settings.model_dump(
            include={"rule", "min_margin", "min_confidence", "path_share", "per_question", "test_share"}
        ),
        "reward": config.outcome.name if whole else settings.reward,
        "outcome": config.outcome.name,
        "alpha": None if whole else settings.alpha or config.value.alpha,
        "level": settings.level,
    }


def rules_of(config: Config) -> PairRules:
    """Return the rules by which a configuration makes pairs of steps."""
    settings = config.pairs
    names = {"rule", "min_margin", "min_confidence", "path_share", "per_question", "reward"}
    alpha, weighting = settings.alpha or config.value.alpha, config.value.weighting
    return PairRules(alpha=alpha, weighting=weighting, **settings.model_dump(include=names))


def count_pairs(folder: Path, config: Config) -> dict[str, Any]:
    """Return the counts of the pairs in a folder for `run.json`: by split, by type (of steps) and by depth."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = PAIR_TABLES[config.pairs.level]()
    compared = ("chosen_type", "rejected_type") if config.pairs.level == "step" else ()
    of_steps = ("confidence", "chosen_token_ids", "rejected_token_ids") if compared else ()
    splits, types, depths = Counter[str](), Counter[str](), Counter[int]()
    spread: dict[str, Counter[Any]] = {"margin": Counter()}
    questions = set()
    for split in _SPLITS:
        for path in shard_paths(folder, split) if any(folder.glob(f"{split}-*")) else ():  # none without a pair
            columns = ("dataset", "question_id", "depth", "margin", *compared, *of_steps)
            for batch in read_batches(path, schema, columns=columns):
                splits[split] += batch.num_rows
                _add_values(depths, batch.column("depth"))
                for name in ("margin", *of_steps):
                    values = batch.column(name)
                    # Four decimals, so that a million questions have some thousand numbers.
                    numbers = pc.list_value_length(values) if pa.types.is_list(values.type) else pc.round(values, 4)
                    counts = spread.setdefault(name.replace("_token_ids", " tokens"), Counter())
                    _add_values(counts, numbers.drop_null())
                for pair in batch.select([*columns[:2], *compared]).to_pylist():
                    questions.add((pair["dataset"], pair["question_id"]))
                    types.update([" > ".join(pair[side] for side in compared)] if compared else [])
    return {
        "total": splits.total(),
        "train": splits["train"],
        "test": splits["test"],
        "questions_with_pairs": len(questions),
        "by_type": dict(sorted(types.items())),
        "by_depth": {str(depth): count for depth, count in sorted(depths.items())},
        "by_dataset": dict(sorted(Counter(dataset for dataset, _ in questions).items())),
        "distributions": {name: distribution(counts) for name, counts in spread.items()},
    }


def count_calls(journal: Journal, config: Config) -> dict[str, Any]:
    """Return calls, tokens and cost by kind of call, over all processes that worked on the run."""
    prices = config.prices
    calls: dict[str, Any] = {}
    for kind, used in journal.usage().items():
        calls[kind] = {"calls": used.calls}
        # Tokens and cost are of models; a search has none.
        if kind in prices:
            calls[kind] |= {
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
                "calls_without_token_counts": used.unknown_tokens,
                "cost": prices[kind].cost(used.prompt_tokens, used.completion_tokens),
            }
    return calls


def link_trees(run: Path, others: Iterable[Path]) -> None:
    """Give a run the node tables of other runs, in their order, as second names of the same files."""
    writer = ShardWriter(run / "trees", "nodes", tree_schema(), shard_rows=1, keep_empty=True)
    for other in others:
        for path in shard_paths(other / "trees", "nodes"):
            writer.link(path)
    writer.close()


def finish_shard(shard: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Note in the folder of the run that a shard has finished; if it is the last one, put the run together.

    The run's folder is locked meanwhile, so of two shards that finish at once
    the second one finds both. The node table of the run has second names of
    the shards' files, in the order of the shards; pairs are derived from it.

    Returns:
        The content of the run's `run.json`, or the shard's `summary` if other shards have not finished.
    """
    with shard.whole() as run:
        notes = run.note_shard(shard.shard, {"summary": summary})
        if not all(notes):
            return dict(summary)
        summaries = [note["summary"] for note in notes]
        shards = [Shard(number, len(notes)).folder(run.path) for number in range(len(notes))]
        # `datasets` refuses an empty file.
        link_trees(run.path, [shards[number] for number, counted in enumerate(summaries) if counted["trees"]["nodes"]])
        # What follows from the tables is computed from them; the rest is known to the shards alone.
        whole = {**summaries[0], "shards": len(notes), "trees": count_trees(run.path)}
        for name in ("questions", "calls", "seconds"):
            whole[name] = _total([counted[name] for counted in summaries])
        whole["seconds"] = round(whole["seconds"], 3)
        whole["pairs"] = export_pairs(run.path, run.config, policy=whole["policy"], config_hash=whole["config_hash"])
        write_json(run.path / "run.json", whole)
        return whole


def _total(values: Sequence[Any]) -> Any:
    """Return a sum of counts; counts with names are added by name, and an unknown one (None) makes the sum unknown."""
    if not isinstance(values[0], dict):
        return None if None in values else sum(values)
    names = sorted({name for value in values for name in value})
    return {name: _total([value[name] for value in values if name in value]) for name in names}
