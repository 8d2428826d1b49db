"""Texts to vectors: by their words, or by a sentence-transformers model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from reasonrag.errors import ConfigError
from reasonrag.text import normalize_answer, one_line


class LexicalEncoder:
    """Counts of normalised words: no model, the same on every machine.

    Vectors have one dimension for each word of the texts that are encoded together, so only those can be compared.
    """

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """`[n][words]` counts. A text of nothing but articles and punctuation is one word: itself.

        >>> asyncio.run(LexicalEncoder().encode(["The Jaws director", "Jaws, Jaws", "?"]))
        [[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
        """
        counts = [Counter(normalize_answer(text).split() or [text.strip().lower()]) for text in texts]
        places = {word: place for place, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
        vectors = [[0.0] * len(places) for _ in counts]
        for vector, count in zip(vectors, counts, strict=True):
            for word, times in count.items():  # few of thousands: the zeros are one number, not one each
                vector[places[word]] = float(times)
        return vectors


class SentenceEncoder:
    """A sentence-transformers model. One thread encodes, one call after another, each in batches."""

    def __init__(self, name: str, *, batch_size: int = 64) -> None:
        """Load the model.

        Args:
            name: Hub id or folder.
            batch_size: texts that the model reads at once.

        Raises:
            ConfigError: sentence-transformers is not installed, or there is no such model.
        """
        if find_spec("sentence_transformers") is None:
            raise ConfigError(
                f"encoder {name!r} needs sentence-transformers, which is not installed; "
                "pip install 'reasonrag[dense]', or take the encoder lexical"
            )
        try:
            self._model: Any = import_module("sentence_transformers").SentenceTransformer(name)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"encoder {name!r} cannot be loaded ({one_line(str(error))[:200]})") from error
        self._batch_size = batch_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")

    async def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """`[n][d]`, as the model gives them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, list(texts))

    def _encode(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        found = self._model.encode(texts, batch_size=self._batch_size, show_progress_bar=False)
        return [[float(value) for value in vector] for vector in found]


def open_encoder(spec: str) -> LexicalEncoder | SentenceEncoder:
    """`lexical`, or the sentence-transformers model of that name or folder.

    Raises:
        ConfigError: it cannot be opened.
    """
    return LexicalEncoder() if spec == "lexical" else SentenceEncoder(spec)
