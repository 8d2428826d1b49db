"""What has to hold of the rows of a tree: that they are one, and that their values follow from its answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from reasonrag.core.errors import DataError
from reasonrag.spre.estimate import Weighting, means_below
from reasonrag.storage.parquet import Row

_SCORES = ("value", "spre", "f1", "em")
# The columns that are checked, and the names of the question.
SHAPE = ("dataset", "question_id", "question", "node_id", "parent_id", "depth", "visits", "valued", *_SCORES)
_ROUNDING = 1e-9


def check_tree(
    rows: Sequence[Row],
    *,
    where: str = "the rows",
    fully: bool = False,
    alpha: float | None = None,
    weighting: Weighting | None = None,
) -> None:
    """Check that a question's rows are one tree: ids count from 0, and each node is one step below an earlier one.

    Every node but the root then has exactly one parent, which exists and is older, so the graph is connected and has
    no cycle. Scores have to be in [0, 1]. `fully` checks also that each value is of as many visits as had one, and
    SPRE, if the `alpha` of the run is known, by the answers below each node.

    Args:
        rows: of `tables.tree_schema`, of one question, by id.
        where: the rows' origin, for the message.
        fully: whether to check how values were computed.
        alpha: as SPRE was computed.
        weighting: as SPRE was computed.

    Raises:
        DataError: they are not a tree; the message names the question and the node.
    """
    if not rows:
        raise DataError(f"{where}: a tree has no node, not even a root")
    for node, problem in chain(_misplaced(rows), _misvalued(rows, alpha, weighting) if fully else ()):
        raise DataError(
            f"{where}: question {rows[0]['question_id']!r}, node {node}: {problem}, so this is not a tree that "
            "build-tree wrote; run the same build-tree command to write the tables again"
        )


def _misplaced(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    for position, row in enumerate(rows):
        node, parent, depth = row["node_id"], row["parent_id"], row["depth"]
        if node != position:
            yield node, f"it comes twice or nodes before it are missing (it is row {position} of the tree)"
        elif node == 0:
            if parent != -1:
                yield node, f"it is the first, but has a parent, {parent}"
            if depth != 0:
                yield node, f"the root is at depth {depth}, not 0"
        elif parent == -1:
            yield node, "it is a second root"
        elif not 0 <= parent < node:
            yield node, f"its parent, {parent}, does not come before it"
        elif depth != rows[parent]["depth"] + 1:
            yield node, f"it is at depth {depth}, and its parent, {parent}, at {rows[parent]['depth']}"
        for name in _SCORES:
            if row[name] is not None and not -_ROUNDING <= row[name] <= 1 + _ROUNDING:
                yield node, f"its {name}, {row[name]}, is not in [0, 1]"


def _misvalued(rows: Sequence[Row], alpha: float | None, weighting: Weighting | None) -> Iterator[tuple[int, str]]:
    for row in rows:
        if not 0 <= row["valued"] <= row["visits"] or (row["value"] is None) != (row["valued"] == 0):
            yield row["node_id"], f"its value, {row['value']}, is of {row['valued']} of {row['visits']} visits"
    if alpha is None:
        return
    parents = [None if row["parent_id"] < 0 else row["parent_id"] for row in rows]
    ends = [None if row["f1"] is None else row["f1"] * alpha ** row["depth"] for row in rows]
    expected = means_below(parents, ends, [row["visits"] for row in rows] if weighting == "visits" else None)
    for row, spre in zip(rows, expected, strict=True):
        found = row["spre"]
        if (spre is None) != (found is None) or not math.isclose(spre or 0, found or 0, abs_tol=_ROUNDING):
            yield row["node_id"], f"its spre is {found}, and by the answers below it {spre}"
