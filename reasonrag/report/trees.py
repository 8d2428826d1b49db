"""The node table of a run, one checked tree a question."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from reasonrag.core.errors import DataError
from reasonrag.storage.parquet import Row, read_shards
from reasonrag.storage.tables import tree_schema

_FIGURES = ("value", "spre", "f1", "em")


@dataclass(frozen=True, slots=True)
class QuestionTree:
    """What was tried for one question.

    Attributes:
        nodes: `[N]` rows of `tables.tree_schema`, by id; the root is the first.
        children: `[N]` ids of each node's children, oldest first.
    """

    nodes: tuple[Row, ...]
    children: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Row], *, where: str = "the rows") -> QuestionTree:
        """From a question's rows, which `check_tree` has to accept."""
        check_tree(rows, where=where)
        children: list[list[int]] = [[] for _ in rows]
        for row in rows[1:]:
            children[row["parent_id"]].append(row["node_id"])
        return cls(tuple(rows), tuple(map(tuple, children)))

    @property
    def root(self) -> Row:
        """The state before any step; the columns that describe the question are the same in every row."""
        return self.nodes[0]

    @property
    def best_path(self) -> tuple[int, ...]:
        """Ids from the root to the answer of the highest SPRE, the oldest of several; empty where no answer has any."""
        answers = [row for row in self.nodes if row["f1"] is not None and row["spre"]]
        return self.path(max(answers, key=lambda row: row["spre"])["node_id"]) if answers else ()

    def path(self, node_id: int) -> tuple[int, ...]:
        """Ids from the root to a node, both included."""
        path = []
        while node_id >= 0:
            path.append(node_id)
            node_id = self.nodes[node_id]["parent_id"]
        return tuple(reversed(path))


def trees(run: Path) -> Iterator[QuestionTree]:
    """The trees of a finished run in the order of its questions; no more than one shard of them is held in memory.

    Raises:
        RunError: the tables are not there, or not all of them.
        DataError: they are damaged, or hold something that is no tree.
    """
    for rows in _questions(run):
        yield QuestionTree.of(rows, where=str(run))


def tree_of(run: Path, question_id: str, dataset: str | None = None) -> QuestionTree:
    """The tree of one question.

    Args:
        run: folder of a finished run.
        question_id: as in the data set.
        dataset: its name; needed where two data sets have a question of that id.

    Raises:
        RunError: the tables are not there, or not all of them.
        DataError: no such question (with the nearest ids), several of them, or what is there is no tree.
    """
    found: list[list[Row]] = []
    ids: dict[str, None] = {}
    for rows in _questions(run):
        if dataset in (None, rows[0]["dataset"]):
            ids[rows[0]["question_id"]] = None
            if rows[0]["question_id"] == question_id:
                found.append(rows)
    if not found:
        of = "" if dataset is None else f" of data set {dataset!r}"
        nearest = ", ".join(map(repr, difflib.get_close_matches(question_id, ids, n=3, cutoff=0.0)))
        raise DataError(
            f"{run} has no tree of question {question_id!r}{of}; "
            + (f"the nearest ids are {nearest}" if nearest else "it has none at all")
        )
    if len(found) > 1:
        names = ", ".join(repr(rows[0]["dataset"]) for rows in found)
        raise DataError(f"{run} has a question {question_id!r} in several data sets ({names}); name one of them")
    return QuestionTree.of(found[0], where=str(run))


def check_tree(rows: Sequence[Row], *, where: str = "the rows") -> None:
    """See that a question's rows are one tree: ids count from 0, and each node hangs one step below an earlier one.

    As every node but the root then has exactly one parent, which is there and older, nothing is apart and no path
    comes back to where it was. Figures have to be numbers.

    Args:
        rows: of `tables.tree_schema`, of one question, by id.
        where: they come from, for the message.

    Raises:
        DataError: they are not; it names the question and the node.
    """
    if not rows:
        raise DataError(f"{where}: a tree has no node, not even a root")
    for place, row in enumerate(rows):
        if wrong := _fault(place, row, rows):
            raise DataError(
                f"{where}: question {row['question_id']!r}, node {row['node_id']}: {wrong}, so this is no tree that "
                "build-tree wrote; the same build-tree command writes the tables anew"
            )


def _fault(place: int, row: Row, rows: Sequence[Row]) -> str:
    """What is wrong with one node, in words; empty where nothing is."""
    node, parent = row["node_id"], row["parent_id"]
    if node != place:
        return f"it comes twice or nodes before it are missing (it is row {place} of the tree)"
    if place == 0:
        if parent != -1:
            return f"it is the first, but has a parent, {parent}"
        return "" if row["depth"] == 0 else f"the root is at depth {row['depth']}, not 0"
    if parent == -1:
        return "it is a second root"
    if not 0 <= parent < node:
        return f"its parent, {parent}, does not come before it"
    if row["depth"] != rows[parent]["depth"] + 1:
        return f"it is at depth {row['depth']}, and its parent, {parent}, at {rows[parent]['depth']}"
    odd = [name for name in _FIGURES if row[name] is not None and not math.isfinite(row[name])]
    return f"its {odd[0]} is no number" if odd else ""


def _questions(run: Path) -> Iterator[list[Row]]:
    nodes = read_shards(run / "trees", "nodes", tree_schema())
    for _, rows in groupby(nodes, key=lambda row: (row["dataset"], row["question_id"])):
        yield list(rows)
