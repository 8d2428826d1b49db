"""Small passages parts, and an encoder that costs nothing, for tests of vectors."""

from __future__ import annotations

import functools
import hashlib
import json

import numpy as np

from reasonrag.retrieval.index import Draft, IndexFolder, Plan
from reasonrag.retrieval.passages import OFFSETS, PASSAGES


class WordsEncoder:
    """The sum of a random direction for each word: texts that share words lie close."""

    def __init__(self, dims: int = 16, *, salt: str = "", broken: str = "\0") -> None:
        self.dims = dims
        self.name = f"words-{dims}{salt}"
        self.location = f"/models/{self.name}"
        self.identity = {"name": self.name, "revision": "", "checksum": f"{dims}{salt}", "max_tokens": "8"}
        self.encoded = 0
        self._salt = salt
        self._broken = broken

    def encode_queries(self, texts):
        return self.encode_passages(texts)

    def encode_passages(self, texts):
        self.encoded += len(texts)
        rows = np.stack([sum(self._direction(word) for word in text.split()) for text in texts]).astype(np.float32)
        rows[[self._broken in text for text in texts]] = np.nan
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def _direction(self, word):
        return _direction(f"{self._salt}{word}", self.dims)


@functools.cache
def _direction(word, dims):
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
    return np.random.default_rng(seed).standard_normal(dims)


class Notes:
    """Keeps what a build tells."""

    def __init__(self) -> None:
        self.stages, self.notes, self.done = [], [], 0.0

    def start(self, what, *, total, unit, done=0.0):
        self.stages.append((what, total, unit, done))

    def advance(self, amount=1.0):
        self.done += amount

    def note(self, text):
        self.notes.append(text)


def passages(path, texts, *, name="toy") -> IndexFolder:
    """An index folder with these passages, called 0, 1, ..."""
    index = IndexFolder(path)
    with index.locked():
        lines = [json.dumps({"id": str(i), "contents": text}).encode() + b"\n" for i, text in enumerate(texts)]
        digest = hashlib.sha256(b"".join(lines)).hexdigest()
        draft = Draft(index, Plan("passages", {"corpus": name, "checksum": digest}))
        with draft.writing(PASSAGES) as file:
            file.write(b"".join(lines))
        with draft.writing(OFFSETS) as file:
            file.write(np.cumsum([0, *map(len, lines)], dtype=np.int64).tobytes())
        draft.finish({"passages": len(lines)})
    return index


def sentences(count, *, seed=0, words=6, vocabulary=400) -> list[str]:
    """Texts of common and rare words, so that some lie close."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.3, size=(count, words)), vocabulary)
    return [" ".join(f"w{rank}" for rank in row) for row in ranks]


def digest(folder) -> str:
    """SHA-256 over names and bytes of all files below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()
