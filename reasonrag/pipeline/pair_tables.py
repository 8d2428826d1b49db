"""Preference pairs from a run's node table: the body of `pairs`, and the last step of `build-tree`.

No model is called: pairs are a function of the node table and the configuration, so another threshold, reward or alpha
needs no new search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any

from reasonrag.core.config import Config
from reasonrag.dpo.pairs import derive_pairs, derive_trajectory_pairs, in_test_split
from reasonrag.spre import Weighting, means_below
from reasonrag.storage.parquet import Row, ShardWriter, read_shards
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_PAIR_SHARD_ROWS = 50_000


def export_pairs(
    run: Path, config: Config, *, policy: str, config_hash: str, out: Path | None = None
) -> dict[str, Any]:
    """Derive pairs from a run's node table and write both splits to `out` (default: the run's `pairs/`).

    Returns:
        Counts: total, by split, by type of chosen and rejected (only for pairs of steps), by depth; the median margin.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    settings = config.pairs
    whole = settings.level == "trajectory"
    schema = trajectory_pair_schema() if whole else pair_schema()
    writers = {
        name: ShardWriter(out or run / "pairs", name, schema, shard_rows=_PAIR_SHARD_ROWS) for name in ("train", "test")
    }
    types: Counter[str] = Counter()
    depths: Counter[int] = Counter()
    questions: set[tuple[str, str]] = set()
    margins: list[float] = []
    nodes = read_shards(run / "trees", "nodes", tree_schema())
    for pair in pairs_of(nodes, config, policy=policy, config_hash=config_hash):
        question = (pair["dataset"], pair["question_id"])
        writers["test" if in_test_split(*question, settings.test_share) else "train"].add(pair)
        if not whole:
            types[f"{pair['chosen_type']} > {pair['rejected_type']}"] += 1
        depths[pair["depth"]] += 1
        questions.add(question)
        margins.append(pair["margin"])
    for writer in writers.values():
        writer.close()
    return {
        "total": len(margins),
        **{name: writer.rows for name, writer in writers.items()},
        "questions_with_pairs": len(questions),
        "by_type": dict(sorted(types.items())),
        "by_depth": {str(depth): count for depth, count in sorted(depths.items())},
        "median_margin": median(margins) if margins else None,
        "min_margin": settings.min_margin,
        "reward": "f1" if whole else settings.reward,
        "alpha": None if whole else settings.alpha or config.value.alpha,
        "level": settings.level,
    }


def pairs_of(nodes: Iterable[Row], config: Config, *, policy: str, config_hash: str) -> Iterator[Row]:
    """Yield the pairs that the configuration asks for.

    Args:
        nodes: rows of `tables.tree_schema`, the nodes of a question together and in the order of their ids.
        config: the run's configuration; `pairs` and `value` are used.
        policy: the policy's name, a column of every pair.
        config_hash: of the run that made the trees.
    """
    settings, value = config.pairs, config.value
    if settings.level == "trajectory":
        return derive_trajectory_pairs(nodes, policy=policy, config_hash=config_hash, min_margin=settings.min_margin)
    if settings.alpha not in (None, value.alpha):
        trees = groupby(nodes, key=lambda row: (row["dataset"], row["question_id"]))
        revalue = partial(revalued, alpha=settings.alpha or 1.0, weighting=value.weighting)
        nodes = chain.from_iterable(revalue(list(tree)) for _, tree in trees)
    return derive_pairs(
        nodes, policy=policy, config_hash=config_hash, min_margin=settings.min_margin, reward=settings.reward
    )


def revalued(tree: Sequence[Row], *, alpha: float, weighting: Weighting = "trajectories") -> list[Row]:
    """Return the rows of one tree with SPRE at another alpha, which needs no new search.

    Args:
        tree: rows of `tables.tree_schema` of one question, in the order of their ids.
        alpha: decay per step, in (0, 1].
        weighting: how trajectories through a node are averaged.
    """
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in tree]
    scores = [None if row["f1"] is None else row["f1"] * alpha ** row["depth"] for row in tree]
    weights = [row["visits"] for row in tree] if weighting == "visits" else None
    rewards = means_below(parents, scores, weights)
    return [{**row, "spre": reward} for row, reward in zip(tree, rewards, strict=True)]
