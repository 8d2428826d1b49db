"""A run's tables, a question at a time: its nodes and the pairs that were derived from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.report.pairs import pairs
from reasonrag.report.trees import QuestionTree, trees
from reasonrag.storage.parquet import Row


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
    by_question: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for pair in pairs(run, (summary.get("pairs") or {}).get("level")):
        by_question[pair["dataset"], pair["question_id"]].append(pair)
    for tree in trees(run):
        found = by_question.pop((tree.root["dataset"], tree.root["question_id"]), [])
        if any(max(pair["chosen_node_id"], pair["rejected_node_id"]) >= len(tree.nodes) for pair in found):
            raise _of_other_trees(tree.root["question_id"])
        yield TreeWithPairs(tree, found)
    for _, question_id in by_question:
        raise _of_other_trees(question_id)


def _of_other_trees(question_id: str) -> DataError:
    return DataError(
        f"pairs of question {question_id!r} name nodes that no tree of this run has: they are of another run's trees; "
        "write them again with `reasonrag pairs`"
    )
