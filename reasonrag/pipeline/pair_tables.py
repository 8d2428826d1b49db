"""Preference pairs from a run's node table: the body of `pairs`, and the last step of `build-tree`.

No model is called: pairs are a function of the node table and the configuration, so another threshold, reward or alpha
needs no new search.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.config import Config
from reasonrag.dpo.pairs import (
    NODE_COLUMNS,
    count_pairs,
    derive_pairs,
    derive_trajectory_pairs,
    in_test_split,
    repeated_questions,
)
from reasonrag.storage.parquet import Row, ShardWriter, read_shards, shard_paths
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_PAIR_SHARD_ROWS = 50_000


def export_pairs(
    run: Path, config: Config, *, policy: str, config_hash: str, out: Path | None = None
) -> dict[str, Any]:
    """Derive pairs from a run's node table and write both splits to `out` (default: the run's `pairs/`).

    Returns:
        Counts: total, by split, `left_out` by cause, by type of chosen and rejected (only for pairs of steps), by
        depth; the median margin.

    Raises:
        RunError, DataError: the tree tables are missing or damaged.
    """
    import numpy as np

    settings = config.pairs
    whole = settings.level == "trajectory"
    schema = trajectory_pair_schema() if whole else pair_schema()
    writers = {
        name: ShardWriter(out or run / "pairs", name, schema, shard_rows=_PAIR_SHARD_ROWS) for name in ("train", "test")
    }
    types: Counter[str] = Counter()
    depths: Counter[int] = Counter()
    questions, last = 0, None
    margins = array("d")
    left_out: Counter[str] = Counter()
    nodes = read_shards(run / "trees", "nodes", tree_schema(), columns=NODE_COLUMNS)
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    for pair in pairs_of(nodes, config, policy=policy, config_hash=config_hash, repeated=repeated, left_out=left_out):
        question = (pair["dataset"], pair["question_id"])
        writers["test" if in_test_split(question, settings.test_share, repeated) else "train"].add(pair)
        if not whole:
            types[f"{pair['chosen_type']} > {pair['rejected_type']}"] += 1
        depths[pair["depth"]] += 1
        questions += question != last
        last = question
        margins.append(pair["margin"])
    for writer in writers.values():
        writer.close()
    return {
        "total": len(margins),
        **{name: writer.rows for name, writer in writers.items()},
        "left_out": dict(sorted(left_out.items())),
        "questions_with_pairs": questions,
        "by_type": dict(sorted(types.items())),
        "by_depth": {str(depth): count for depth, count in sorted(depths.items())},
        "median_margin": float(np.median(margins)) if margins else None,
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
        left_out: counts what is left out, by cause.
    """
    common: dict[str, Any] = {"policy": policy, "config_hash": config_hash, "read_ids": config.policy.reads_ids}
    common |= {"repeated": repeated, "left_out": left_out}
    if config.pairs.level == "trajectory":
        return derive_trajectory_pairs(nodes, min_margin=config.pairs.min_margin, **common)
    return derive_pairs(nodes, **_comparison(config), **common)


def _comparison(config: Config) -> dict[str, Any]:
    """Return the arguments of `derive_pairs` and `count_pairs` that say what is compared, and how strictly."""
    chosen = config.pairs.model_dump(include={"min_margin", "min_rollouts", "min_confidence", "reward"})
    return chosen | {"alpha": config.pairs.alpha or config.value.alpha, "weighting": config.value.weighting}
