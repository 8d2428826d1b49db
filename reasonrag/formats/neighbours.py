"""Which way of answering suits a question: the one that suited the labelled questions most like it.

SKR decides so whether to search (arXiv:2310.05002, its k nearest neighbours). Adaptive-RAG asks a trained T5 for one of
three ways (arXiv:2403.14403); the labels that it learns are as here: the simplest way that gave the right answer.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import read_yaml
from reasonrag.core.text import normalize_answer
from reasonrag.formats.base import fingerprint
from reasonrag.retrieval.encoders import open_text_encoder
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.storage.parquet import read_batches
from reasonrag.storage.tables import trajectory_schema

_OF_SETTING = re.compile(r"(?:(.+)_)?t[\d.e-]+_s\d+")  # where several formats were evaluated, it begins with one


class Neighbours:
    """Labelled questions, of which the nearest ones label another question."""

    def __init__(self, labels: Mapping[str, str], ways: Sequence[str], *, k: int = 5, encoder: str = "lexical") -> None:
        """Store the labels by question.

        Args:
            labels: at least one.
            ways: what may be a label; of equally good ones the first counts.
            k: how many neighbours vote.
            encoder: `lexical` compares words, each weighted by how few of the questions have it; else a
                sentence-transformers model, by Hub id or folder.
        """
        self.labels = labels
        self.k = k
        self.fingerprint = fingerprint(json.dumps(labels, sort_keys=True), str(k), encoder)
        self._questions = list(labels)
        total = Counter(labels.values())
        self._totals = {way: total[way] for way in ways if total[way]}
        self._chosen: dict[str, str] = {}
        self._encoder = None if encoder == "lexical" else open_text_encoder(EncoderConfig(name=encoder))
        if self._encoder is not None:
            self._vectors = self._encoder.encode_queries(self._questions)
        self._words = [frozenset(normalize_answer(question).split()) for question in self._questions]
        having = Counter(word for words in self._words for word in words)
        self._weights = {word: math.log(1 + len(labels) / count) ** 2 for word, count in having.items()}
        self._lengths = [math.sqrt(self._weight(words)) or 1.0 for words in self._words]

    @classmethod
    def read(cls, folder: str, ways: Sequence[str], *, k: int, encoder: str) -> Neighbours:
        """Read the labels from an evaluation of training questions in each of the formats `ways`, simplest first.

        A question is labelled with the first of them that answered it exactly (EM 1), and left out if none did.

        Raises:
            ConfigError: the folder lacks one of them, or has several policies, or none was answered exactly.
        """
        found: dict[str, dict[str, bool]] = {}
        policies: set[Path] = set()
        for file in sorted(named_path(folder).glob("*/trajectories/*.parquet")):
            policy = file.parent.parent
            swept = _OF_SETTING.match(file.name)
            way = (swept and swept[1]) or read_yaml(policy / "config.yaml")["format"]["name"]
            if way in ways:
                policies.add(policy)
                right = found.setdefault(way, {})
                for batch in read_batches(file, trajectory_schema(), columns=("question", "em")):
                    for row in batch.to_pylist():
                        right[row["question"]] = right.get(row["question"], False) or row["em"] == 1
        if len(policies) > 1:
            raise ConfigError(f"{folder}: several policies were evaluated there; what suits one does not label another")
        if missing := [way for way in ways if way not in found]:
            raise ConfigError(
                f"{folder}: nothing was evaluated there in format {' or '.join(missing)}; run eval on training "
                f"questions with --format {','.join(ways)}, and give its --out as --labels"
            )
        labels: dict[str, str] = {}
        for question in found[ways[0]]:
            known = [found[way].get(question) for way in ways]  # None where an attempt failed
            if True in known and None not in known[: known.index(True)]:
                labels[question] = ways[known.index(True)]
        if not labels:
            raise ConfigError(f"{folder}: none of {len(found[ways[0]])} questions was answered in any format")
        return cls(labels, ways, k=k, encoder=encoder)

    def nearest(self, question: str) -> list[str]:
        """Return the `k` labelled questions most like another one, best first; never itself."""
        if self._encoder is None:
            asked = frozenset(normalize_answer(question).split())
            pairs = zip(self._words, self._lengths, strict=True)
            scores = [self._weight(asked & words) / length for words, length in pairs]  # the cosine, but for a factor
        else:
            scores = (self._vectors @ self._encoder.encode_queries([question])[0]).tolist()
        others = [index for index, known in enumerate(self._questions) if known != question]
        return [self._questions[index] for index in sorted(others, key=lambda index: -scores[index])[: self.k]]

    def label(self, question: str) -> str:
        """Return the label that is frequent among the neighbours, measured by how frequent it is among all.

        Of two labels that is SKR's rule: l / (k - l) >= m / n.
        """
        if question not in self._chosen:
            votes = Counter(self.labels[neighbour] for neighbour in self.nearest(question))
            self._chosen[question] = max(self._totals, key=lambda way: votes[way] / self._totals[way])
        return self._chosen[question]

    def _weight(self, words: frozenset[str]) -> float:
        return math.fsum(self._weights[word] for word in words)  # in any order of the set the same
