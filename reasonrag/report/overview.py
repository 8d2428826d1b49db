"""What the first page tells of all questions: the paper's Table 1 and the distributions of its Figure 3."""

from __future__ import annotations

from collections import Counter

from reasonrag.report.figures import Bar, Column, Spread, bars, margin_histogram, spread, whole_number_histogram
from reasonrag.report.reading import TreeWithPairs
from reasonrag.storage.parquet import Row

_TYPES = ("query", "evidence", "answer", "malformed")


class Overview:
    """Counts over the trees of a run, one at a time (arXiv:2505.14069, sec. 2.2.3)."""

    def __init__(self) -> None:
        self.trees = 0
        self.nodes = 0
        self.pairs = 0
        self.questions_with_pairs: Counter[str] = Counter()  # by data set
        self.types: Counter[tuple[str, str]] = Counter()  # chosen, rejected
        self.depths: Counter[int] = Counter()
        self.margins: list[float] = []
        self.rounds: list[int] = []
        self.tokens: list[int] = []
        self.without_tokens = 0

    def add(self, tree: TreeWithPairs) -> Row:
        """Count one more question; returns its line of the list of questions, in the order of the columns."""
        self.trees += 1
        self.nodes += len(tree.nodes)
        self.pairs += len(tree.pairs)
        self.rounds += rounds(tree)
        if tree.pairs:
            self.questions_with_pairs[tree.root["dataset"]] += 1
        for pair in tree.pairs:
            self._add_pair(pair, tree.nodes[pair["chosen_node_id"]])
        root = tree.root
        return {
            "dataset": root["dataset"],
            "id": root["question_id"],
            "question": root["question"],
            "answers": root["golden_answers"],
            "nodes": len(tree.nodes),
            "depth": max(row["depth"] for row in tree.nodes),
            "pairs": len(tree.pairs),
            "f1": max((row["f1"] for row in tree.nodes if row["f1"] is not None), default=None),
        }

    def _add_pair(self, pair: Row, chosen: Row) -> None:
        self.depths[pair["depth"]] += 1
        self.margins.append(pair["margin"])
        if "chosen_type" not in pair:  # a whole trajectory is of no one type
            return
        self.types[pair["chosen_type"], pair["rejected_type"]] += 1
        if chosen["completion_tokens"] is None:
            self.without_tokens += 1
        else:
            self.tokens.append(chosen["completion_tokens"])

    @property
    def actions(self) -> list[Bar]:
        """Pairs by the type of the chosen step."""
        return bars({kind: sum(self.types[kind, other] for other in _TYPES) for kind in _TYPES[:-1]})

    @property
    def matrix(self) -> list[tuple[str, list[int]]]:
        """Pairs by type: a row a chosen type, a column a rejected type (`rejected_types`)."""
        return [(chosen, [self.types[chosen, rejected] for rejected in _TYPES]) for chosen in _TYPES[:-1]]

    @property
    def rejected_types(self) -> tuple[str, ...]:
        """The columns of `matrix`."""
        return _TYPES

    @property
    def by_depth(self) -> list[Bar]:
        """Pairs by the steps before the decision."""
        return bars({str(depth): count for depth, count in sorted(self.depths.items())})

    @property
    def by_dataset(self) -> list[Bar]:
        """Questions that have pairs."""
        return bars(dict(sorted(self.questions_with_pairs.items())))

    @property
    def spreads(self) -> dict[str, Spread | None]:
        """Iterations of a complete trajectory, tokens of a chosen step, margins of a pair."""
        return {"iterations": spread(self.rounds), "tokens": spread(self.tokens), "margins": spread(self.margins)}

    @property
    def histograms(self) -> dict[str, list[Column]]:
        """The same three, as columns; empty where there is nothing."""
        return {
            "iterations": whole_number_histogram(self.rounds),
            "tokens": whole_number_histogram(self.tokens),
            "margins": margin_histogram(self.margins),
        }


def rounds(tree: TreeWithPairs) -> list[int]:
    """Rounds of reasoning (Algorithm 1) of each trajectory that ends with an answer: its searches, and the answer."""
    searches = [0] * len(tree.nodes)
    for row, parent in zip(tree.nodes, tree.parents, strict=True):
        if parent is not None:
            searches[row["node_id"]] = searches[parent] + (row["action"] == "query")
    return [searches[row["node_id"]] + 1 for row in tree.nodes if row["f1"] is not None]
