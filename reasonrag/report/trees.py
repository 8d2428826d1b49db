"""The trees of a finished run, one question at a time, each checked to be a tree, with the pairs derived from it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import DataError
from reasonrag.spre.estimate import check_tree
from reasonrag.storage.files import read_json
from reasonrag.storage.parquet import Row, by_question, read_shards
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_UNSEEN = ("token_ids", "logprobs")  # columns of a tree that no page shows
# Without the pairs' texts: the trees hold them.
_PAIR_COLUMNS = (
    *("pair_id", "dataset", "question_id", "depth", "margin", "chosen_reward", "rejected_reward"),
    *("chosen_node_id", "rejected_node_id", "chosen_type", "rejected_type"),
    *("chosen_rollouts", "rejected_rollouts", "confidence"),
)


@dataclass(frozen=True, slots=True)
class QuestionTree:
    """The search tree of one question.

    Attributes:
        nodes: `[N]` rows of `tables.tree_schema`, by id; the root is the first. Token ids and
            log-probabilities are left out by `read_trees`.
        pairs: rows of a pair table without their texts, each
            with its `split`; empty unless read by `read_trees`.
    """

    nodes: tuple[Row, ...]
    pairs: tuple[Row, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Row], *, pairs: Sequence[Row] = (), where: str = "the rows") -> QuestionTree:
        """Build the tree from one question's rows; raises what `check_tree` raises."""
        check_tree(rows, where=where)
        return cls(tuple(rows), tuple(pairs))

    @property
    def root(self) -> Row:
        """The state before any step; the columns that describe the question are the same in every row."""
        return self.nodes[0]

    def searches(self) -> list[int]:
        """Return `[N]` the searches on the path to each node, its own step included."""
        searches: list[int] = []
        for row in self.nodes:  # parents come before their children
            searches.append((searches[row["parent_id"]] if searches else 0) + (row["action"] == "query"))
        return searches

    @property
    def best_path(self) -> tuple[int, ...]:
        """Ids from the root to the answer of the highest SPRE (the oldest of equals); empty if no answer has any."""
        answers = [row for row in self.nodes if row["f1"] is not None and row["spre"]]
        node_id = max(answers, key=lambda row: row["spre"])["node_id"] if answers else -1
        path = []
        while node_id >= 0:
            path.append(node_id)
            node_id = self.nodes[node_id]["parent_id"]
        return tuple(reversed(path))


def read_trees(run: Path, question_id: str | None = None) -> Iterator[QuestionTree]:
    """Yield the trees of a finished run in the order of its questions, one at a time, with their pairs.

    Args:
        run: folder of a finished run.
        question_id: only the trees of questions with this id; None for all.

    Raises:
        RunError: tables are missing.
        DataError: tables are damaged, hold rows that are not a
            tree, or the pairs name nodes that the trees lack.
    """
    # Pairs stand in the order of the trees, and those of a question in one split.
    splits = [by_question(_pairs(run, split, question_id)) for split in ("train", "test")]
    following = [next(split, None) for split in splits]
    columns = [name for name in tree_schema().names if name not in _UNSEEN]
    nodes = read_shards(run / "trees", "nodes", tree_schema(), columns=columns, question_id=question_id)
    for question, rows in by_question(nodes):
        pairs: list[Row] = []
        for number, split in enumerate(splits):
            if (group := following[number]) and group[0] == question:
                pairs += group[1]
                following[number] = next(split, None)
        if any(max(pair["chosen_node_id"], pair["rejected_node_id"]) >= len(rows) for pair in pairs):
            raise _of_other_trees(question[1])
        yield QuestionTree.of(rows, pairs=pairs, where=str(run))
    for (_, other_id), _ in filter(None, following):
        raise _of_other_trees(other_id)


def tree_of(run: Path, question_id: str | None) -> QuestionTree:
    """Return the tree of one question, or the first one of the run, with its pairs if the run has any.

    Raises:
        DataError: the question is unknown (the message names the nearest ids), or two data sets have one
            of this id; see also `read_trees`.
    """
    trees = list(itertools.islice(read_trees(run, question_id), 1 if question_id is None else None))
    if not trees:
        if question_id is None:
            raise DataError(f"{run} has no trees")
        rows = read_shards(run / "trees", "nodes", tree_schema(), columns=["question_id"])
        known_ids = dict.fromkeys(row["question_id"] for row in rows)
        nearest = ", ".join(map(repr, difflib.get_close_matches(question_id, known_ids, n=3, cutoff=0.0)))
        raise DataError(f"{run} has no tree of question {question_id!r}; the nearest ids are {nearest}")
    if len(trees) > 1:
        raise DataError(f"{run} has a question {question_id!r} in several data sets; `reasonrag report` shows all")
    return trees[0]


def _pairs(run: Path, split: str, question_id: str | None) -> Iterator[Row]:
    """Yield the pairs of a split, with its name; pairs of whole trajectories have no types."""
    level = ((read_json(run / "run.json") or {}).get("pairs") or {}).get("level")
    schema = trajectory_pair_schema() if level == "trajectory" else pair_schema()
    columns = [name for name in _PAIR_COLUMNS if name in schema.names]
    if any((run / "pairs").glob(f"{split}-*.parquet")):  # a split without questions has no file
        for row in read_shards(run / "pairs", split, schema, columns=columns, question_id=question_id):
            yield row | {"split": split}


def _of_other_trees(question_id: str) -> DataError:
    return DataError(
        f"pairs of question {question_id!r} name nodes that no tree of this run has: they are of another run's trees; "
        "write them again with `reasonrag pairs`"
    )
