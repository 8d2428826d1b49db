"""A run's tables, a question at a time: its nodes and the pairs that were derived from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.errors import DataError
from reasonrag.inspection.trees import QuestionTree, trees
from reasonrag.parquet import Row, read_shards
from reasonrag.tables import pair_schema, trajectory_pair_schema

_SHOWN_OF_A_PAIR = ("depth", "margin", "chosen_type", "rejected_type", "chosen_node_id", "rejected_node_id")
Pairs = dict[tuple[str, str], list[Row]]


@dataclass(frozen=True, slots=True)
class TreeWithPairs:
    """A question's tree and the `pairs` that were derived from it, each with its `split`."""

    tree: QuestionTree
    pairs: list[Row]

    @property
    def nodes(self) -> tuple[Row, ...]:
        """Rows of `tables.tree_schema` by id."""
        return self.tree.nodes

    @property
    def root(self) -> Row:
        """The row that describes the question."""
        return self.tree.root

    @property
    def parents(self) -> list[int | None]:
        """`[N]` the parent of each node; None at the root."""
        return [None if row["parent_id"] < 0 else row["parent_id"] for row in self.nodes]


def read_trees(run: Path, summary: dict[str, Any]) -> Iterator[TreeWithPairs]:
    """The trees of a run in their order, with their pairs.

    Args:
        run: its folder.
        summary: what its `run.json` holds.

    Raises:
        RunError, DataError: the tables are missing or damaged.
    """
    pairs = _read_pairs(run / "pairs", (summary.get("pairs") or {}).get("level"))
    for tree in trees(run):
        found = pairs.get((tree.root["dataset"], tree.root["question_id"]), [])
        _check(tree, found)
        yield TreeWithPairs(tree, found)


def _read_pairs(folder: Path, level: str | None) -> Pairs:
    """Pairs by data set and question, without their texts: the nodes have them."""
    schema = trajectory_pair_schema() if level == "trajectory" else pair_schema()
    pairs: Pairs = defaultdict(list)
    for split in ("train", "test"):
        if not any(folder.glob(f"{split}-*.parquet")):  # a split without pairs has no file
            continue
        for row in read_shards(folder, split, schema):
            light = {name: row.get(name) for name in _SHOWN_OF_A_PAIR}
            pairs[row["dataset"], row["question_id"]].append(light | {"split": split})
    return pairs


def _check(tree: QuestionTree, pairs: list[Row]) -> None:
    for pair in pairs:
        if not max(pair["chosen_node_id"], pair["rejected_node_id"]) < len(tree.nodes):
            raise DataError(
                f"pairs of question {tree.root['question_id']!r} name nodes that its tree has not: they are of another "
                "run's trees; write them again with `reasonrag pairs`"
            )
