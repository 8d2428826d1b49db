from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.types import Shard
from reasonrag.retrieval.index.embeddings import Embeddings, build_embeddings, encode_part, encoder_of
from reasonrag.retrieval.index.folder import Silent
from tests.retrieval.forked import forked
from tests.retrieval.index.dense_toys import Notes, WordsEncoder, digest, passages, sentences

TEXTS = sentences(50)


def build(path, encoder=None, *, texts=TEXTS, shard_rows=16, progress=None):
    index = passages(path, texts)
    with index.locked():
        build_embeddings(index, encoder or WordsEncoder(), progress=progress or Silent(), shard_rows=shard_rows)
    return index


def test_every_passage_has_its_vector_in_its_row_across_shards(tmp_path):
    index = build(tmp_path)
    found = Embeddings(index)
    assert (found.rows, found.dims) == (50, 16)
    wanted = WordsEncoder().encode_passages(TEXTS)
    assert np.array_equal(np.concatenate([block for _, block in found.blocks()]), wanted)
    assert [start for start, _ in found.blocks()] == [0, 16, 32, 48]
    rows = np.array([49, 0, 17, 17, 31])
    assert np.array_equal(found.take(rows), wanted[rows])


def test_parts_that_several_processes_encode_give_the_same_bytes(tmp_path):
    build(tmp_path / "whole")
    index, encoders = passages(tmp_path / "parts", TEXTS), [WordsEncoder() for _ in range(3)]
    last = [
        encode_part(index, encoder, Shard(number, 3), progress=Silent(), shard_rows=16)
        for number, encoder in reversed(list(enumerate(encoders)))
    ]
    assert last == [False, False, True]
    assert [encoder.encoded for encoder in encoders] == [32, 16, 2]  # of four shards
    build(tmp_path / "parts", nothing := WordsEncoder())
    assert nothing.encoded == 0
    assert digest(tmp_path / "parts/embeddings") == digest(tmp_path / "whole/embeddings")
    assert encode_part(index, nothing, Shard(0, 3), progress=Silent(), shard_rows=16) and nothing.encoded == 0


def test_passages_that_the_model_does_not_read_to_the_end_are_counted_and_told(tmp_path):
    notes = Notes()
    index = build(tmp_path, texts=["a b", "a b c d e f g h i", *["c"] * 20, "z " * 40], progress=notes)
    assert index.need("embeddings").counts == {"passages": 23, "dims": 16, "cut": 2}
    assert len(notes.notes) == 1 and notes.notes[0].startswith("2 of 23 passages are longer than words-16 reads")
    assert notes.stages == [("encoding passages", 23, "passages", 0)] and notes.done == 23


def test_the_same_plan_encodes_nothing_again_and_another_encoder_everything(tmp_path):
    build(tmp_path)
    same, other = WordsEncoder(), WordsEncoder(salt="x")
    build(tmp_path, same)
    assert same.encoded == 0
    build(tmp_path, other)
    assert other.encoded == 50
    assert encoder_of(build(tmp_path, other)) == (other.identity, other.location)


def test_a_vector_with_nan_is_refused_with_its_row_and_what_was_done_before_is_kept(tmp_path):
    texts = [*TEXTS[:40], "one bad row", *TEXTS[40:]]
    with pytest.raises(DataError, match=r"encoder words-16 gives no vector for passage '40' in row 40 \(NaN"):
        build(tmp_path, WordsEncoder(broken="bad"), texts=texts)
    healed = WordsEncoder()
    index = build(tmp_path, healed, texts=texts)
    assert healed.encoded == 51 - 32
    assert all(np.isfinite(block).all() for _, block in Embeddings(index).blocks())


def test_too_little_memory_on_the_device_is_one_line(tmp_path):
    class Full(WordsEncoder):
        def encode_passages(self, texts):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(ConfigError, match="too little memory for encoder words-16; run the same build again"):
        build(tmp_path, Full())


class Deadly(WordsEncoder):
    """Kills its process after some texts."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def encode_passages(self, texts):
        if self.encoded >= self.texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_passages(texts)


def test_a_build_that_is_killed_again_and_again_gives_the_same_bytes(tmp_path):
    killed = tmp_path / "killed"
    for after in (16, 16, 0):
        assert forked(build, killed, Deadly(after)) == -signal.SIGKILL
    assert len(list(killed.glob(".building-embeddings/*.npy"))) == 2
    rest = WordsEncoder()
    index, whole = build(killed, rest), build(tmp_path / "whole")
    assert rest.encoded == 50 - 32
    assert digest(index.part("embeddings")) == digest(whole.part("embeddings"))


def test_a_part_says_nothing_about_this_machine(tmp_path):
    index = build(tmp_path)
    text = (index.part("embeddings") / "manifest.json").read_text()
    assert "/models" not in text and str(tmp_path) not in text
    assert json.loads((tmp_path / ".encoder.json").read_text())["location"] == "/models/words-16"
    (tmp_path / ".encoder.json").write_text("{")
    assert encoder_of(index) == (WordsEncoder().identity, "")
