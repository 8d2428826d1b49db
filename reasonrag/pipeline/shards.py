"""The shards of a run put together: links to their tables, and the sums of their counts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.core.settings import differences
from reasonrag.storage.files import write_json
from reasonrag.storage.parquet import ShardWriter, read_batches
from reasonrag.storage.runs import RunFolder
from reasonrag.storage.shards import Shard
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_TABLES = ("trees/nodes", "pairs/train", "pairs/test")
_COUNTED_PAIRS = ("total", "train", "test", "left_out", "questions_with_pairs", "by_type", "by_depth")


def finish(shard: RunFolder, summary: Mapping[str, Any]) -> dict[str, Any]:
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
        run.note_shard(shard.shard, note)
        return join(run) or dict(summary)


def unfinished(run: RunFolder) -> list[Shard]:
    """Return the shards of this run that lack a question's tree, or pairs as they are asked for now."""
    notes, pairs = run.shard_notes(), run.config.pairs.model_dump(mode="json")
    left = []
    for number, note in enumerate(notes):
        questions = note["summary"]["questions"] if note else {"total": 1, "finished": 0}
        if questions["finished"] < questions["total"] or note["pairs"] != pairs:
            left.append(Shard(number, len(notes)))
    return left


def join(run: RunFolder) -> dict[str, Any] | None:
    """Put a run together if all its shards have finished; return the content of its `run.json`, else None.

    Its tables are second names of the shards' files, in the order of the shards.

    Raises:
        RunError: the shards hold pairs of different settings.
    """
    notes = run.shard_notes()
    if not all(notes):
        return None
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
    summary = _added([note["summary"] for note in notes], margins)
    write_json(run.path / "run.json", summary)
    return summary


def _added(summaries: Sequence[Mapping[str, Any]], margins: array[float]) -> dict[str, Any]:
    """Return `run.json` of the whole run: counts and seconds of its shards added, means weighted."""
    import numpy as np

    trees = [summary["trees"] for summary in summaries]
    ended = sum(of["complete_trajectories"] for of in trees)
    all_trees = {name: _total([of.get(name) for of in trees]) for name in trees[0] if not name.startswith("mean_")}
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
