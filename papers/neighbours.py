"""Which way of answering suits a question: the one that suited the labelled questions most like it.

SKR decides so whether to search (arXiv:2310.05002, its k nearest neighbours). Adaptive-RAG asks a trained T5 for one of
three ways (arXiv:2403.14403); the labels that it learns are as here: the simplest way that gave the right answer.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import read_yaml
from reasonrag.core.text import normalize_answer
from reasonrag.formats.base import Format, fingerprint
from reasonrag.storage.parquet import read_batches
from reasonrag.storage.tables import trajectory_schema


class Neighbours:
    """Labelled questions, of which the `k` nearest ones label another question.

    Questions are compared by their words, each weighted by how few of the questions have it.
    """

    def __init__(self, labels: Mapping[str, str], ways: Sequence[str], *, k: int = 5) -> None:
        """Store the labels by question; of equally good ones, the first of `ways` counts."""
        self.labels = labels
        self.k = k
        self.fingerprint = fingerprint(json.dumps(labels, sort_keys=True), str(k))
        total = Counter(labels.values())
        self._totals = {way: total[way] for way in ways if total[way]}
        self._words = {question: _words(question) for question in labels}
        frequency = Counter(word for words in self._words.values() for word in words)
        self._weights = {word: math.log(1 + len(labels) / count) ** 2 for word, count in frequency.items()}

    @classmethod
    def read(cls, folder: str, ways: Sequence[type[Format]]) -> Neighbours:
        """Read the labels from an evaluation of one model on training questions in each format, simplest first.

        A question is labelled with the first format that answered it exactly (EM 1), and left out if none did, or if
        an attempt in a simpler format failed.
        """
        names = {f"python:{way.__module__}:{way.__name__}": str(way.name) for way in ways}
        is_right: dict[str, dict[str, bool]] = {name: {} for name in names.values()}
        for config in sorted(named_path(folder).glob("*/config.yaml")):
            of_way = is_right.get(names.get(read_yaml(config)["format"]["name"], ""), {})
            for file in sorted(config.parent.glob("trajectories/*.parquet")):
                for batch in read_batches(file, trajectory_schema(), columns=("question", "em")):
                    for row in batch.to_pylist():
                        of_way[row["question"]] = of_way.get(row["question"], False) or row["em"] == 1
        missing = [path for path, name in names.items() if not is_right[name]]
        if missing:
            raise ConfigError(f"{folder}: nothing was evaluated there in format {' or '.join(missing)}")
        labels: dict[str, str] = {}
        first = next(iter(is_right.values()))
        for question in first:
            for name, of_name in is_right.items():
                answered = of_name.get(question)
                if answered:
                    labels[question] = name
                if answered or answered is None:
                    break
        if not labels:
            raise ConfigError(f"{folder}: no question was answered in any of these formats")
        return cls(labels, list(is_right))

    def nearest(self, question: str) -> list[str]:
        """Return the `k` labelled questions most like another one, best first; never itself."""
        words = _words(question)
        scores: dict[str, float] = {}
        for known, known_words in self._words.items():
            if known != question:  # the cosine, but for a factor that all have
                scores[known] = self._weight(words & known_words) / (math.sqrt(self._weight(known_words)) or 1.0)
        return sorted(scores, key=lambda known: -scores[known])[: self.k]

    def label(self, question: str) -> str:
        """Return the label that is frequent among the neighbours, measured by how frequent it is among all.

        Of two labels that is SKR's rule: l / (k - l) >= m / n.
        """
        votes = Counter(self.labels[neighbour] for neighbour in self.nearest(question))
        return max(self._totals, key=lambda way: votes[way] / self._totals[way])

    def _weight(self, words: frozenset[str]) -> float:
        return math.fsum(self._weights[word] for word in words)  # fsum: equal whatever the order of the set


def _words(question: str) -> frozenset[str]:
    return frozenset(normalize_answer(question).split())
