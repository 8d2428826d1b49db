"""The vectors of all passages: encoded once, indexed in every way, and found again."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.dense import (
    Embeddings,
    VectorSearch,
    VectorSettings,
    build_embeddings,
    build_vectors,
    choose,
    encoder_of,
    open_vectors,
    recall_at_10,
)
from reasonrag.retrieval.index import IndexFolder, Silent
from tests import warmed
from tests.retrieval.forked import forked
from tests.retrieval.toys import Notes, WordsEncoder, digest, passages, sentences

faiss = pytest.importorskip("faiss")

GIB = 1 << 30
FEW = sentences(50)
TEXTS = sentences(1200)
QUERIES = WordsEncoder().encode_queries(sentences(40, seed=1, words=3))
SETTINGS = {
    "ivf-sq8": VectorSettings("ivf-sq8", "IVF16,SQ8", training_rows=700, block_rows=300, refine=2),
    "ivf-pq": VectorSettings("ivf-pq", "IVF16,PQ8x4", training_rows=1200, block_rows=300, refine=10),
}


def embedded(path, encoder=None, *, texts=FEW, shard_rows=16):
    index = passages(path, texts)
    with index.locked():
        build_embeddings(index, encoder or WordsEncoder(), progress=Silent(), shard_rows=shard_rows)
    return index


def build(index, settings, *, progress=None):
    with index.locked():
        return build_vectors(index, settings, queries=QUERIES, progress=progress or Silent())


# --- Encoding ---


def test_every_passage_has_its_vector_in_its_row_across_shards(tmp_path):
    embeddings = Embeddings(embedded(tmp_path))
    assert (embeddings.rows, embeddings.dims) == (50, 16)
    expected = WordsEncoder().encode_passages(FEW)
    assert np.array_equal(np.concatenate([block for _, block in embeddings.blocks()]), expected)
    assert [start for start, _ in embeddings.blocks()] == [0, 16, 32, 48]
    rows = np.array([49, 0, 17, 17, 31])
    assert np.array_equal(embeddings.take(rows), expected[rows])


def test_the_same_plan_encodes_nothing_again_and_another_encoder_everything(tmp_path):
    embedded(tmp_path)
    same, other = WordsEncoder(), WordsEncoder(salt="x")
    index = embedded(tmp_path, same)
    assert same.encoded == 0 and encoder_of(index) == (same.identity, "/models/words-16")
    manifest = (index.part("embeddings") / "manifest.json").read_text()
    assert "/models" not in manifest and str(tmp_path) not in manifest  # a part is the same on every machine
    (tmp_path / ".encoder.json").write_text("{")
    assert encoder_of(index) == (same.identity, "")
    embedded(tmp_path, other)
    assert other.encoded == 50


def test_a_vector_with_nan_is_refused_with_its_row_and_what_was_done_before_is_kept(tmp_path):
    texts = [*FEW[:40], "one bad row", *FEW[40:]]
    with pytest.raises(DataError, match=r"encoder words-16 gives no vector for passage '40' in row 40 \(NaN"):
        embedded(tmp_path, WordsEncoder(broken="bad"), texts=texts)
    healed = WordsEncoder()
    embedded(tmp_path, healed, texts=texts)
    assert healed.encoded == 51 - 32


def test_too_little_memory_on_the_device_is_one_line(tmp_path):
    class Full(WordsEncoder):
        def encode_passages(self, texts):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(ConfigError, match="too little memory for encoder words-16; run the same build again"):
        embedded(tmp_path, Full())


class Deadly(WordsEncoder):
    """Kills its process after some texts."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def encode_passages(self, texts):
        if self.encoded >= self.texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_passages(texts)


@pytest.mark.parametrize("flips", [0, 1])
def test_a_build_that_is_killed_again_and_again_gives_the_same_bytes(flips, tmp_path):
    killed = tmp_path / "killed"
    for after in (16, 16, 0):
        assert forked(embedded, killed, Deadly(after)) == -signal.SIGKILL
    shards = sorted(killed.glob(".building-embeddings/*.npy"))
    assert len(shards) == 2
    for shard in shards[:flips]:
        data = bytearray(shard.read_bytes())
        data[-3] ^= 16
        shard.write_bytes(data)
    rest = WordsEncoder()
    index, whole = embedded(killed, rest), embedded(tmp_path / "whole")
    assert rest.encoded == 50 - 32 + 16 * flips
    assert digest(index.part("embeddings")) == digest(whole.part("embeddings"))


# --- Searching ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Embeddings that tests take a copy of."""
    return embedded(tmp_path_factory.mktemp("whole"), texts=TEXTS, shard_rows=256).path


@pytest.fixture
def index(whole, tmp_path):
    return IndexFolder(shutil.copytree(whole, tmp_path / "index"))


@pytest.fixture(scope="module")
def built(whole, tmp_path_factory):
    """Indexes of all kinds that tests take a copy of, with the notes of their builds."""
    folders = {}
    for kind, settings in SETTINGS.items():
        folder = shutil.copytree(whole, tmp_path_factory.mktemp(kind) / "index")
        build(IndexFolder(folder), settings, progress=(notes := Notes()))
        folders[kind] = folder, notes.notes
    return folders


@pytest.fixture
def copy_of(built, tmp_path):
    return lambda kind: IndexFolder(shutil.copytree(built[kind][0], tmp_path / "index"))


def test_exact_search_finds_what_comparing_by_hand_finds(index):
    vectors = np.concatenate([block for _, block in Embeddings(index).blocks()])
    products = QUERIES.astype(np.float64) @ vectors.astype(np.float64).T
    expected = np.stack([np.lexsort((np.arange(len(row)), -np.round(row, 7)))[:10] for row in products])
    scores, rows = open_vectors(index).search(QUERIES, 10)
    assert np.array_equal(rows, expected)
    assert np.allclose(scores, np.take_along_axis(products, expected, 1), atol=1e-6)


def test_of_equal_passages_the_first_come_first_however_many_there_are(tmp_path):
    texts = [*TEXTS[:100], *["the same"] * 40, *TEXTS[100:600], *["the same"] * 300]
    search = open_vectors(embedded(tmp_path, texts=texts, shard_rows=256))
    scores, rows = search.search(WordsEncoder().encode_queries(["the same"]), 50)
    assert rows[0].tolist() == [*range(100, 140), *range(640, 650)]
    assert np.unique(scores).size == 1


@pytest.mark.parametrize("kind", ["flat", "ivf-sq8"])
def test_fewer_passages_than_asked_for_are_marked(tmp_path, kind):
    index = embedded(tmp_path, texts=TEXTS[:300], shard_rows=256)
    settings = {"flat": VectorSettings("flat"), **SETTINGS}[kind]
    build(index, VectorSettings(**{f: getattr(settings, f) for f in settings.__slots__} | {"training_rows": 300}))
    search = open_vectors(index)
    scores, rows = search.search(QUERIES[:3], 310)
    assert scores.shape == rows.shape == (3, 310)
    assert (rows[:, -10:] == -1).all() and np.isneginf(scores[rows == -1]).all()
    assert search.search(QUERIES[:0], 5)[1].shape == (0, 5)


@pytest.mark.parametrize("kind", SETTINGS)
def test_approximate_search_reaches_the_recall_that_it_was_tuned_for(built, kind):
    path, notes = built[kind]
    index = IndexFolder(path)
    counts, search = index.need("vectors").counts, open_vectors(index)
    exact = VectorSearch(Embeddings(index)).search(QUERIES, 10)
    assert search.effort == counts["effort"]
    recall = recall_at_10(search.search(QUERIES, 10), exact)
    assert recall >= 0.95
    assert counts["recall_permille"] == round(1000 * recall)
    assert f"give {recall:.3f} of exact search's ten best" in notes[-1]
    if search.effort > 1:
        search.set_effort(search.effort - 1)
        assert recall_at_10(search.search(QUERIES, 10), exact) < 0.95


def test_the_same_embeddings_give_the_same_bytes_with_any_number_of_threads(copy_of):
    kind = "ivf-sq8"
    index = copy_of(kind)
    first = digest(index.part("vectors"))
    index.remove("vectors")
    threads = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(4)
        build(index, SETTINGS[kind])
    finally:
        faiss.omp_set_num_threads(threads)
    assert digest(index.part("vectors")) == first


KILLED = """
import os, signal, sys
from pathlib import Path
from reasonrag.retrieval.index import IndexFolder
from tests.retrieval.test_vectors import SETTINGS, build
files = []
def trace(event, args):
    if event == "os.rename" and ".building-vectors" in str(args[0]):
        files.append(args[0])
        if len(files) == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(trace)
build(IndexFolder(Path(sys.argv[1])), SETTINGS[sys.argv[2]])
"""


@pytest.mark.parametrize(("kind", "kill_at"), [("ivf-sq8", 3)])
def test_a_build_killed_at_every_few_files_that_it_writes_gives_the_same_bytes(index, built, kind, kill_at):
    def run() -> int:
        arguments = (str(index.path), kind, str(kill_at))
        return warmed.run(warmed.source, KILLED, *arguments, environment=os.environ).returncode

    kills = 0
    while (done := run()) == -signal.SIGKILL:
        kills += 1
        assert kills < 20
    assert done == 0 and kills >= 2
    assert digest(index.part("vectors")) == digest(built[kind][0] / "vectors")


def test_flat_needs_no_vectors_and_takes_older_ones_away(copy_of):
    index = copy_of("ivf-sq8")
    assert build(index, choose(1200, 16, GIB)) is None
    assert index.manifest("vectors") is None and open_vectors(index).effort == 0


@pytest.mark.parametrize(
    ("rows", "dims", "gib", "kind"),
    [
        (1000, 384, 1, "flat"),
        (200_000, 384, 4, "ivf-sq8"),
        (21_000_000, 768, 24, "ivf-sq8"),
        (21_000_000, 768, 8, "ivf-pq"),
    ],
)
def test_the_kind_follows_from_size_and_memory(rows, dims, gib, kind):
    assert choose(rows, dims, gib * GIB).kind == kind


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(
        ConfigError, match=r"ivf-sq8 over 21000000 passages of 768 dimensions needs [\d,]+ MiB, more than"
    ):
        choose(21_000_000, 768, 8 * GIB, kind="ivf-sq8")
    assert choose(21_000_000, 768, GIB, kind="flat").kind == "flat"
    with pytest.raises(ConfigError, match="ivf-pq learns its codes from 9984 passages or more, not 500"):
        choose(500, 384, GIB, kind="ivf-pq")


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this faiss searches on GPUs")
def test_gpus_without_a_faiss_for_them_are_one_clear_line(index):
    with pytest.raises(ConfigError, match="no GPU; pip install"):
        open_vectors(index, gpu=True)


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(faiss, "StandardGpuResources"), reason="this faiss has no GPU support")
@pytest.mark.parametrize("kind", ["flat", "ivf-sq8", "ivf-pq"])
def test_gpus_find_what_the_cpu_finds(index, kind):
    build(index, {"flat": VectorSettings("flat"), **SETTINGS}[kind])
    results, expected = (open_vectors(index, gpu=gpu).search(QUERIES, 10) for gpu in (True, False))
    assert recall_at_10(results, expected) > 0.98
