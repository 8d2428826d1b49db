"""Metrics of a run, counted once for `reasonrag show` and for its pages: Table 1 and Figure 3 of arXiv:2505.14069."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.dpo.pairs import repeated_questions
from reasonrag.dpo.preferences import PairRules
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.spre import decisions_of, full_prompt
from reasonrag.spre.decisions import Decision
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row, shard_paths

_QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def stats(run: Path) -> dict[str, Any]:
    """Return the metrics of a finished run, as JSON can hold them.

    Returns:
        `questions`: total, finished, failed by cause, trees by data set; `nodes`: total, by origin, stage and action;
        `answers`: total, mean F1 and EM, steps and rounds up to one; `tokens` of prompts, of completions, of the
        completions `in_pairs` and of the `chosen` ones, without those of which the backend reports none; `iterations`
        of a question's search; `pairs`: total, their questions by data set, `by_type[chosen][rejected]`, depths,
        margins, confidence, pairs `on_one_trajectory` (of a side that is not an answer), pairs `by_length_alone` (the
        chosen step's mean F1 is not above that of the rejected one), `contradictory` ones (`PairRules.summary`);
        `calls`: calls, tokens and cost by kind. Spreads over questions, answers, nodes or pairs are each a
        `distribution`.

    Raises:
        RunError: the folder holds no finished run.
        DataError: its tables are damaged.
    """
    _, summary = read_run(run)
    counts = RunCounts(run)
    for tree in read_trees(run):
        counts.add(tree)
    return counts.metrics(summary)


class RunCounts:
    """Counts over the trees of a run and their pairs, one tree at a time.

    Attributes:
        values: numbers of each question, answer, node or pair, by name.
        contradictions: pairs that contradict each other.
    """

    def __init__(self, run: Path) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.contradictions = PairRules(repeated_questions(shard_paths(run / "trees", "nodes")))
        self._counters: defaultdict[str, Counter[Any]] = defaultdict(Counter)
        self._types: defaultdict[str, Counter[str]] = defaultdict(Counter)  # chosen, then rejected

    def add(self, tree: QuestionTree) -> None:
        """Count one more tree, its nodes and its pairs."""
        dataset = tree.root["dataset"]
        self._counters["dataset"][dataset] += 1
        self._counters["questions with pairs"][dataset] += bool(tree.pairs)
        self.values["iterations"].append(tree.root["visits"])
        for row, searches in zip(tree.nodes, tree.searches(), strict=True):
            for column in ("origin", "stage", "action"):
                self._counters[column][row[column]] += 1
            self._add_known("prompt_tokens", row["prompt_tokens"])
            self._add_known("completion_tokens", row["completion_tokens"])
            self._add_known("em", row["em"])
            if row["f1"] is not None:
                self.values["f1"].append(row["f1"])
                self.values["steps"].append(row["depth"])
                self.values["rounds"].append(searches + 1)
        by_f1 = decisions_of(tree.nodes, alpha=1.0) if tree.pairs else []
        for pair in tree.pairs:
            self._add_pair(pair, tree, by_f1)

    def _add_known(self, name: str, value: float | None) -> None:
        if value is not None:
            self.values[name].append(value)

    def _add_pair(self, pair: Row, tree: QuestionTree, by_f1: Sequence[Decision | None]) -> None:
        sides = [tree.path(pair[f"{side}_node_id"]) for side in ("chosen", "rejected")]
        self._counters["depth"][pair["depth"]] += 1
        self.values["margin"].append(pair["margin"])
        self._add_known("confidence", pair.get("confidence"))  # pairs of older runs, of a judge, of trajectories: none
        if "chosen_type" in pair:  # pairs of trajectories have no types
            self._types[pair["chosen_type"]][pair["rejected_type"]] += 1
            decisions = [by_f1[path[-1]] for path in sides]
            f1 = [decision.reward for decision in decisions if decision is not None and decision.reward is not None]
            self._counters["pairs"]["by length alone"] += len(f1) == 2 and f1[0] < f1[1] + 1e-9
        # An answer's own reward is known; a step's on one trajectory may be luck.
        lone = [side for side in ("chosen", "rejected") if pair.get(f"{side}_rollouts") == 1]
        self._counters["pairs"]["on one trajectory"] += any(pair[f"{side}_type"] != "answer" for side in lone)
        steps = [[tree.nodes[node] for node in path[pair["depth"] + 1 :]] for path in sides]
        texts = [[(step["action"], step["text"]) for step in side] for side in steps]
        self.contradictions.add(pair["pair_id"], tree.question, full_prompt(steps[0][0]), *texts)
        for side, name in zip(steps, ("chosen_tokens", "rejected_tokens"), strict=True):
            self._add_known(name, side[-1]["completion_tokens"])

    def metrics(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `stats` returns; `summary` is the content of `run.json`, of any version."""
        values, counters = self.values, self._counters
        f1, em = distribution(values["f1"]), distribution(values["em"])
        actions = {name: count for name, count in counters["action"].items() if name}  # the root has none
        return {
            "questions": {**summary.get("questions", {}), "by_dataset": _sorted(counters["dataset"])},
            "nodes": {
                "total": counters["origin"].total(),
                "by_origin": _sorted(counters["origin"]),
                "by_stage": _sorted(counters["stage"]),
                "by_action": _sorted(actions),
            },
            "answers": {
                "total": len(values["f1"]),
                "mean_f1": f1 and f1["mean"],
                "mean_em": em and em["mean"],
                "steps": distribution(values["steps"]),
                # Searches and the answer (Algorithm 1). The paper does not define its iterations; they start at 1, too.
                "rounds": distribution(values["rounds"]),
            },
            "tokens": {
                "prompt": distribution(values["prompt_tokens"]),
                "completion": distribution(values["completion_tokens"]),
                "in_pairs": distribution(values["chosen_tokens"] + values["rejected_tokens"]),
                "chosen": distribution(values["chosen_tokens"]),
            },
            "iterations": distribution(values["iterations"]),
            "pairs": {
                "total": len(values["margin"]),
                "questions": _sorted({name: n for name, n in counters["questions with pairs"].items() if n}),
                "by_type": {chosen: _sorted(rejected) for chosen, rejected in sorted(self._types.items())},
                "by_depth": {str(depth): count for depth, count in sorted(counters["depth"].items())},
                "margin": distribution(values["margin"]),
                "confidence": distribution(values["confidence"]),
                "on_one_trajectory": counters["pairs"]["on one trajectory"],
                "by_length_alone": counters["pairs"]["by length alone"],
                "contradictory": self.contradictions.summary(),
            },
            "calls": summary.get("calls", {}),
            "seconds": summary.get("seconds"),
        }


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


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


def histogram(values: Sequence[float], *, bins: int = 20) -> dict[str, int]:
    """Count values in equal bins: whole numbers from the least to the largest, other numbers (margins) in [0, 1].

    >>> histogram([3, 5, 5])
    {'3': 1, '4': 0, '5': 2}
    >>> histogram([0.2, 0.6, 1.0], bins=2)
    {'0 to 0.5': 1, '0.5 to 1': 2}
    """
    import numpy as np

    if not values:
        return {}
    low, high = min(values), max(values)
    if all(float(value).is_integer() for value in values):
        width = math.ceil((high - low + 1) / bins)
        edges = np.arange(low, high + width + 1, width)
        names = [f"{start:g}" if width == 1 else f"{start:g} to {start + width - 1:g}" for start in edges[:-1]]
    else:
        # 1e-9: 0.15 is the third edge of twentieths, and falls short of it by rounding.
        edges = np.linspace(0.0, 1.0, bins + 1) - 1e-9
        edges[-1] = 1.0
        names = [f"{number / bins:g} to {(number + 1) / bins:g}" for number in range(bins)]
    return dict(zip(names, np.histogram(values, edges)[0].tolist(), strict=True))
