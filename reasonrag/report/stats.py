"""A run in figures: Table 1 and Figure 3 of arXiv:2505.14069 for one's own data set, and what it took to make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.report.pairs import pairs
from reasonrag.report.trees import QuestionTree, trees
from reasonrag.storage.parquet import Row
from reasonrag.storage.runs import read_run

Node = tuple[str, str, int]  # data set, question, id

_TOKENS = ("prompt_tokens", "completion_tokens")
_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def stats(run: Path) -> dict[str, Any]:
    """The figures of a finished run, all of which JSON can hold.

    Returns:
        `questions`: total, finished, failed by cause, trees by data set; `nodes`: total, by origin, stage and action;
        `answers`: total, mean F1 and EM, steps and rounds up to one; `tokens` of prompts, completions, and the chosen
        and rejected completions `in_pairs`, None where the backend reports none; `iterations` of a question's search;
        `pairs`: total, their questions by data set, `by_type[chosen][rejected]`, depths, margins; `calls`: calls,
        tokens and cost by kind. What is spread over questions, answers, nodes or pairs is a `distribution`.

    Raises:
        RunError: there is no finished run in the folder.
        DataError: its tables are damaged.
    """
    _, summary = read_run(run)
    preferences = _PairFigures()
    for pair in pairs(run, summary["pairs"]["level"]):
        preferences.add(pair)
    nodes = _NodeFigures(preferences.written)
    for tree in trees(run):
        nodes.add(tree)
    return {
        "questions": {**summary["questions"], "by_dataset": _counts(nodes.datasets)},
        **nodes.figures(),
        "pairs": preferences.figures(),
        "calls": summary["calls"],
        "seconds": summary.get("seconds"),
    }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean and quantiles (linear between neighbours); None of nothing.

    >>> distribution([1, 2, 3, 4])["median"]
    2.5
    """
    import numpy as np

    if not values:
        return None
    quantiles = np.quantile(np.asarray(values, dtype=np.float64), list(_QUANTILES.values()))
    return {
        "count": len(values),
        "mean": float(np.mean(values)),
        **dict(zip(_QUANTILES, map(float, quantiles), strict=True)),
    }


class _NodeFigures:
    """Counts over trees, one at a time. `written` says in how many pairs a node is."""

    def __init__(self, written: Counter[Node]) -> None:
        self.written = written
        self.datasets: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {"origin": Counter(), "stage": Counter(), "action": Counter()}
        self.values: dict[str, list[float]] = {
            name: [] for name in ("iterations", "steps", "rounds", "f1", "em", *_TOKENS, "pair_tokens")
        }
        self.nodes = 0

    def add(self, tree: QuestionTree) -> None:
        """Count one more tree."""
        self.datasets[tree.root["dataset"]] += 1
        self.values["iterations"].append(tree.root["visits"])
        for row in tree.nodes:
            self._add_node(row)
            if row["f1"] is not None:
                actions = Counter(tree.nodes[node]["action"] for node in tree.path(row["node_id"]))
                self.values["steps"].append(row["depth"])
                self.values["rounds"].append(actions["query"] + actions["answer"])

    def _add_node(self, row: Row) -> None:
        self.nodes += 1
        for column, counts in self.by.items():
            if row[column]:  # the root has no action
                counts[row[column]] += 1
        for column in ("f1", "em", *_TOKENS):
            if row[column] is not None:
                self.values[column].append(row[column])
        if row["completion_tokens"] is not None:
            pairs = self.written[row["dataset"], row["question_id"], row["node_id"]]
            self.values["pair_tokens"] += [row["completion_tokens"]] * pairs

    def figures(self) -> dict[str, Any]:
        """The part of `stats` that trees tell."""
        spread = {name: distribution(values) for name, values in self.values.items()}
        f1, em = spread["f1"], spread["em"]
        return {
            "nodes": {"total": self.nodes, **{f"by_{name}": _counts(counts) for name, counts in self.by.items()}},
            "answers": {
                "total": len(self.values["f1"]),
                "mean_f1": f1 and f1["mean"],
                "mean_em": em and em["mean"],
                "steps": spread["steps"],
                # The paper does not say what its iterations are; rounds of reasoning begin at 1, as they do.
                "rounds": spread["rounds"],
            },
            "tokens": {
                "prompt": spread["prompt_tokens"],
                "completion": spread["completion_tokens"],
                "in_pairs": spread["pair_tokens"],
            },
            "iterations": spread["iterations"],
        }


class _PairFigures:
    """Counts over rows of a pair table, one at a time; pairs of whole trajectories have no types."""

    def __init__(self) -> None:
        self.written: Counter[Node] = Counter()  # in how many pairs a node is the chosen or the rejected step
        self.types: dict[str, Counter[str]] = {}
        self.depths: Counter[int] = Counter()
        self.margins: list[float] = []

    def add(self, pair: Row) -> None:
        """Count one more pair."""
        question = pair["dataset"], pair["question_id"]
        self.written.update([(*question, pair["chosen_node_id"]), (*question, pair["rejected_node_id"])])
        if "chosen_type" in pair:
            self.types.setdefault(pair["chosen_type"], Counter())[pair["rejected_type"]] += 1
        self.depths[pair["depth"]] += 1
        self.margins.append(pair["margin"])

    def figures(self) -> dict[str, Any]:
        """The part of `stats` that pairs tell."""
        questions = {(dataset, question) for dataset, question, _ in self.written}
        return {
            "total": len(self.margins),
            "questions": _counts(Counter(dataset for dataset, _ in questions)),
            "by_type": {chosen: _counts(rejected) for chosen, rejected in sorted(self.types.items())},
            "by_depth": {str(depth): count for depth, count in sorted(self.depths.items())},
            "margin": distribution(self.margins),
        }


def _counts(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items()))
