"""Metrics of a run, counted once for `reasonrag show` and for its pages: Table 1 and Figure 3 of arXiv:2505.14069."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.dpo.pairs import repeated_questions
from reasonrag.dpo.preferences import Contradictions
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.spre import decisions_of, full_prompt
from reasonrag.storage.parquet import Row, shard_paths
from reasonrag.storage.runs import read_run

_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_TOKENS = ("prompt_tokens", "completion_tokens")


def stats(run: Path) -> dict[str, Any]:
    """Return the metrics of a finished run, as JSON can hold them.

    Returns:
        `questions`: total, finished, failed by cause, trees by data set; `nodes`: total, by origin, stage and action;
        `answers`: total, mean F1 and EM, steps and rounds up to one; `tokens` of prompts, of completions, of the
        completions `in_pairs` and of the `chosen` ones, without those of which the backend reports none; `iterations`
        of a question's search; `pairs`: total, their questions by data set, `by_type[chosen][rejected]`, depths,
        margins, confidence, those `on_one_trajectory` (a side that is no answer), those `by_length_alone` (steps whose
        mean F1 is not above that of the rejected one), `contradictory` ones (`Contradictions.summary`); `calls`: calls,
        tokens and cost by kind. Spreads over questions, answers, nodes or pairs are each a `distribution`.

    Raises:
        RunError: there is no finished run in the folder.
        DataError: its tables are damaged.
    """
    _, summary = read_run(run)
    counts = RunCounts(run)
    for tree in read_trees(run, summary):
        counts.add(tree)
    return counts.metrics(summary)


class RunCounts:
    """Counts over the trees of a run and their pairs, one tree at a time."""

    def __init__(self, run: Path) -> None:
        self.nodes = 0
        self.trees_by_dataset: Counter[str] = Counter()
        self.nodes_by: dict[str, Counter[str]] = {"origin": Counter(), "stage": Counter(), "action": Counter()}
        self.questions_with_pairs: Counter[str] = Counter()  # by data set
        self.pair_types: dict[str, Counter[str]] = {}  # chosen, then rejected; pairs of trajectories have no types
        self.pair_depths: Counter[int] = Counter()
        self.contradictions = Contradictions(repeated_questions(shard_paths(run / "trees", "nodes")))
        self.pairs_on_one_trajectory = self.pairs_by_length = 0
        of_trees = ("iterations", "steps", "rounds", "f1", "em", *_TOKENS)
        of_pairs = ("tokens_in_pairs", "chosen_tokens", "margin", "confidence")
        self.values = {name: array("d") for name in (*of_trees, *of_pairs)}

    def add(self, tree: QuestionTree) -> None:
        """Count one more tree, its nodes and its pairs."""
        self.trees_by_dataset[tree.root["dataset"]] += 1
        self.values["iterations"].append(tree.root["visits"])
        for row, searches in zip(tree.nodes, tree.searches(), strict=True):
            self._add_node(row)
            if row["f1"] is not None:
                self.values["steps"].append(row["depth"])
                self.values["rounds"].append(searches + 1)
        if tree.pairs:
            self.questions_with_pairs[tree.root["dataset"]] += 1
        self.contradictions.begin(*tree.question)
        by_f1 = decisions_of(tree.nodes, alpha=1.0) if tree.pairs else []
        for pair in tree.pairs:
            self._add_pair(pair, tree)
            if "chosen_type" in pair:
                sides = [by_f1[pair[f"{side}_node_id"]] for side in ("chosen", "rejected")]
                f1 = [side.reward for side in sides if side is not None and side.reward is not None]
                self.pairs_by_length += len(f1) == 2 and f1[0] < f1[1] + 1e-9

    def _add_node(self, row: Row) -> None:
        self.nodes += 1
        for column, counts in self.nodes_by.items():
            if row[column]:  # the root has no action
                counts[row[column]] += 1
        for column in ("f1", "em", *_TOKENS):
            if row[column] is not None:
                self.values[column].append(row[column])

    def _add_pair(self, pair: Row, tree: QuestionTree) -> None:
        nodes = tree.nodes
        if "chosen_type" in pair:
            self.pair_types.setdefault(pair["chosen_type"], Counter())[pair["rejected_type"]] += 1
        self.pair_depths[pair["depth"]] += 1
        self.values["margin"].append(pair["margin"])
        if pair.get("confidence") is not None:  # pairs of older runs, of a judge and of trajectories have none
            self.values["confidence"].append(pair["confidence"])
        self.pairs_on_one_trajectory += any(
            pair.get(f"{side}_rollouts") == 1 and pair[f"{side}_type"] != "answer" for side in ("chosen", "rejected")
        )
        chosen, rejected = (
            [nodes[node] for node in tree.path(pair[f"{side}_node_id"])[pair["depth"] + 1 :]]
            for side in ("chosen", "rejected")
        )
        said = ([(step["action"], step["text"]) for step in side] for side in (chosen, rejected))
        self.contradictions.add(pair["pair_id"], full_prompt(chosen[0]), *said)
        chosen_tokens = nodes[pair["chosen_node_id"]]["completion_tokens"]
        rejected_tokens = nodes[pair["rejected_node_id"]]["completion_tokens"]
        if chosen_tokens is not None:
            self.values["chosen_tokens"].append(chosen_tokens)
        self.values["tokens_in_pairs"].extend(count for count in (chosen_tokens, rejected_tokens) if count is not None)

    def metrics(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `stats` returns; `summary` is the content of `run.json`, of any version."""
        spread = {name: distribution(values) for name, values in self.values.items()}
        f1, em = spread["f1"], spread["em"]
        return {
            "questions": {**summary.get("questions", {}), "by_dataset": _sorted(self.trees_by_dataset)},
            "nodes": {"total": self.nodes} | {f"by_{name}": _sorted(counts) for name, counts in self.nodes_by.items()},
            "answers": {
                "total": len(self.values["f1"]),
                "mean_f1": f1 and f1["mean"],
                "mean_em": em and em["mean"],
                "steps": spread["steps"],
                # Searches and the answer (Algorithm 1). The paper does not define its iterations; they start at 1, too.
                "rounds": spread["rounds"],
            },
            "tokens": {
                "prompt": spread["prompt_tokens"],
                "completion": spread["completion_tokens"],
                "in_pairs": spread["tokens_in_pairs"],
                "chosen": spread["chosen_tokens"],
            },
            "iterations": spread["iterations"],
            "pairs": {
                "total": len(self.values["margin"]),
                "questions": _sorted(self.questions_with_pairs),
                "by_type": {chosen: _sorted(rejected) for chosen, rejected in sorted(self.pair_types.items())},
                "by_depth": {str(depth): count for depth, count in sorted(self.pair_depths.items())},
                "margin": spread["margin"],
                "confidence": spread["confidence"],
                "on_one_trajectory": self.pairs_on_one_trajectory,
                "by_length_alone": self.pairs_by_length,
                "contradictory": self.contradictions.summary(),
            },
            "calls": summary.get("calls", {}),
            "seconds": summary.get("seconds"),
        }


def _sorted(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items()))


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return count, mean and quantiles (linear between neighbours); None without values.

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


def margin_histogram(margins: Sequence[float], *, bins: int = 20) -> dict[str, int]:
    """Count differences of rewards, in [0, 1], in equal bins `[low, high)`; the last bin includes 1.

    >>> margin_histogram([0.2, 0.6, 1.0], bins=2)
    {'0.00 to 0.50': 1, '0.50 to 1.00': 2}
    """
    if not margins:
        return {}
    # 1e-9: 0.15 is the third edge of twentieths, and 0.15 / 0.05 falls short of 3 by rounding.
    counts = Counter(min(int(margin * bins + 1e-9), bins - 1) for margin in margins)
    return {f"{i / bins:.2f} to {(i + 1) / bins:.2f}": counts[i] for i in range(bins)}


def whole_number_histogram(values: Sequence[float], *, bins: int = 20) -> dict[str, int]:
    """Count whole numbers: a bin for each, or for several in a row if there would be more than `bins`.

    >>> whole_number_histogram([3, 5, 5])
    {'3': 1, '4': 0, '5': 2}
    """
    if not values:
        return {}
    low, high = int(min(values)), int(max(values))
    width = math.ceil((high - low + 1) / bins)
    counts = Counter((int(value) - low) // width for value in values)
    histogram = {}
    for i in range((high - low) // width + 1):
        start, end = low + i * width, low + (i + 1) * width - 1
        histogram[str(start) if width == 1 else f"{start} to {end}"] = counts[i]
    return histogram
