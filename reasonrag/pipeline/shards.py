"""The shards of a run put together: links to their tables, and the sums of their counts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.storage.parquet import ShardWriter, read_batches
from reasonrag.storage.runs import RunFolder
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_COUNTED_PAIRS = ("total", "train", "test", "left_out", "questions_with_pairs", "by_type", "by_depth")


def join(shard: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Note in the folder of the run that a shard has finished; if it is the last one, put the run together.

    The run's folder is locked meanwhile, so of two shards that finish at once the second one finds both. The tables of
    the run are second names of the shards' files, in the order of the shards.

    Returns:
        The content of the run's `run.json`, or None if other shards have not finished.
    """
    whole_trajectories = summary["pairs"]["level"] == "trajectory"
    pairs = trajectory_pair_schema() if whole_trajectories else pair_schema()
    tables = {"trees/nodes": tree_schema(), "pairs/train": pairs, "pairs/test": pairs}
    files = {table: len(list(shard.path.glob(f"{table}-*.parquet"))) for table in tables}
    with shard.whole() as run:
        run.journal.put_meta(f"shard {shard.shard.number}", {"summary": summary, "files": files})
        shards = [run.journal.meta(f"shard {number}") or {} for number in range(shard.shard.of)]
        if not all(shards):
            return None
        margins = array("d")
        for table, schema in tables.items():
            folder, stem = (run.path / table).parent, Path(table).name
            writer = ShardWriter(folder, stem, schema, shard_rows=1)
            for number, finished in enumerate(shards):
                count = finished["files"][table]
                if table == "trees/nodes" and not finished["summary"]["trees"]["nodes"]:
                    count = 0  # a shard without nodes has an empty file, which `datasets` refuses
                for part in range(count):
                    path = (
                        shard.path.parent / f"{number}-of-{len(shards)}" / f"{table}-{part:05d}-of-{count:05d}.parquet"
                    )
                    writer.link(path)
                    if stem != "nodes":
                        for batch in read_batches(path, schema, columns=("margin",)):
                            margins.extend(batch.column(0).to_numpy())
            writer.close()
        whole = _added([finished["summary"] for finished in shards], margins)
        run.write_summary(whole)
        return whole


def _added(summaries: Sequence[Mapping[str, Any]], margins: array[float]) -> dict[str, Any]:
    """Return `run.json` of the whole run: counts and seconds of its shards added, means weighted."""
    import numpy as np

    trees = [summary["trees"] for summary in summaries]
    ended = sum(of["complete_trajectories"] for of in trees)
    all_trees = {name: _total([of[name] for of in trees]) for name in trees[0] if not name.startswith("mean_")}
    for name in ("mean_f1", "mean_em"):
        sums = [of[name] * of["complete_trajectories"] for of in trees if of[name] is not None]
        all_trees[name] = sum(sums) / ended if ended else None
    first = summaries[0]
    pairs = {name: _total([summary["pairs"][name] for summary in summaries]) for name in _COUNTED_PAIRS}
    pairs["median_margin"] = float(np.median(margins)) if margins else None
    return {
        **first,
        "questions": _total([summary["questions"] for summary in summaries]),
        "trees": all_trees,
        "pairs": first["pairs"] | pairs,
        "calls": _total([summary["calls"] for summary in summaries]),
        "seconds": round(sum(summary["seconds"] for summary in summaries), 3),
        "shards": len(summaries),
    }


def _total(values: Sequence[Any]) -> Any:
    """Return a sum of counts; those with names are added by name, and an unknown one (None) makes the sum unknown."""
    if not isinstance(values[0], dict):
        return None if None in values else sum(values)
    names = {name for value in values for name in value}
    in_order = sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))
    return {name: _total([value[name] for value in values if name in value]) for name in in_order}
