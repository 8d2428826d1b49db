"""The trees of a finished run, one question at a time, each checked to be a tree, with the pairs derived from it.

`stats` counts them for `reasonrag show` and the pages: Table 1 of
arXiv:2505.14069, and quantiles of what its Figure 3 draws.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import excerpt
from reasonrag.spre.estimate import SHAPE, check_tree
from reasonrag.storage.files import read_json
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row, by_question, read_shards
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

_UNSEEN = ("token_ids", "logprobs")  # columns of a tree that no page shows
_COUNTED = (*SHAPE, "action", "content", "text", "prompt_tokens", "completion_tokens")
# Without the pairs' texts: the trees hold them.
_PAIR_COLUMNS = (
    *("pair_id", "dataset", "question_id", "depth", "margin", "chosen_reward", "rejected_reward"),
    *("chosen_node_id", "rejected_node_id", "chosen_type", "rejected_type"),
    *("chosen_rollouts", "rejected_rollouts", "confidence"),
)
_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


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
            before = searches[row["parent_id"]] if searches else 0
            searches.append(before + (row["action"] == "query"))
        return searches

    @property
    def best_path(self) -> tuple[int, ...]:
        """Ids from the root to the answer of the highest SPRE (the oldest of equals); empty if no answer has any."""
        answers = [row for row in self.nodes if row["f1"] is not None and row["spre"]]
        return self.path(max(answers, key=lambda row: row["spre"])["node_id"]) if answers else ()

    def path(self, node_id: int) -> tuple[int, ...]:
        """Return the ids from the root to a node, both included."""
        path = []
        while node_id >= 0:
            path.append(node_id)
            node_id = self.nodes[node_id]["parent_id"]
        return tuple(reversed(path))


def read_trees(run: Path, question_id: str | None = None, *, columns: Sequence[str] = ()) -> Iterator[QuestionTree]:
    """Yield the trees of a finished run in the order of its questions, one at a time, with their pairs.

    Args:
        run: folder of a finished run.
        question_id: only the trees of questions with this id; None for all.
        columns: columns of a node; without any, all columns that a page shows.

    Raises:
        RunError: tables are missing.
        DataError: tables are damaged, hold rows that are not a
            tree, or the pairs name nodes that the trees lack.
    """
    # Pairs stand in the order of the trees, and those of a question in one split.
    splits = [by_question(_pairs(run, split, question_id)) for split in ("train", "test")]
    following = [next(split, None) for split in splits]
    columns = columns or [name for name in tree_schema().names if name not in _UNSEEN]
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


# Counts


def stats(run: Path) -> dict[str, Any]:
    """Return the metrics of a finished run, as JSON can hold them.

    Returns:
        `questions`, `trees`, `pairs`, `calls` and `seconds` of `run.json`, and `distributions` over
        answers, nodes or pairs. `questions` also has the trees `by_dataset`; `pairs` also has the
        `questions` with pairs by data set. `unreadable` has the
        beginning of a step for each reason why steps could not be read.

    Raises:
        RunError: the folder holds no finished run.
        DataError: its tables are damaged.
    """
    _, summary = read_run(run)
    counts = RunCounts()
    for tree in read_trees(run, columns=_COUNTED):
        counts.add(tree)
    return counts.metrics(summary)


class RunCounts:
    """Counts over the trees of a run and their pairs, one tree at a time, that `run.json` does not have.

    Attributes:
        values: numbers of each answer, node or pair, by name.
    """

    def __init__(self) -> None:
        names = ("rounds", "prompt tokens", "completion tokens", "tokens chosen", "margin", "confidence")
        self.values: dict[str, list[float]] = {name: [] for name in names}
        self._trees: Counter[str] = Counter()  # by data set
        self._trees_with_pairs: Counter[str] = Counter()
        self._unreadable: dict[str, str] = {}  # by reason, the first step that could not be read

    def add(self, tree: QuestionTree) -> None:
        """Count one more tree, its nodes and its pairs."""
        dataset = tree.root["dataset"]
        self._trees[dataset] += 1
        self._trees_with_pairs[dataset] += bool(tree.pairs)
        for row, searches in zip(tree.nodes, tree.searches(), strict=True):
            self._add("prompt tokens", row["prompt_tokens"])
            self._add("completion tokens", row["completion_tokens"])
            # Searches and the answer (Algorithm 1). The paper does
            # not define its iterations; they start at 1, too.
            self._add("rounds", None if row["f1"] is None else searches + 1)
            if row["action"] == "malformed":
                self._unreadable.setdefault(row["content"], excerpt(row["text"]))
        for pair in tree.pairs:
            self._add("margin", pair["margin"])
            self._add("confidence", pair.get("confidence"))  # pairs of older runs, of a judge, of trajectories: none
            self._add("tokens chosen", tree.nodes[pair["chosen_node_id"]]["completion_tokens"])

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.values[name].append(value)

    def metrics(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same as `stats`; `summary` is the content of `run.json`, of any version."""
        return {
            "questions": {**summary.get("questions", {}), "by_dataset": self._trees},
            "trees": summary.get("trees", {}),
            "pairs": {**summary.get("pairs", {}), "questions": +self._trees_with_pairs},
            "distributions": {name: distribution(values) for name, values in self.values.items()},
            "calls": summary.get("calls", {}),
            "seconds": summary.get("seconds"),
            "unreadable": self._unreadable,
        }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return count, mean and quantiles (linear between neighbours); None without values.

    >>> distribution([1, 2, 3, 4])["median"]
    2.5
    """
    import numpy as np

    if not values:
        return None
    quantiles = map(float, np.quantile(values, list(_QUANTILES.values())))
    return {"count": len(values), "mean": float(np.mean(values)), **dict(zip(_QUANTILES, quantiles, strict=True))}
