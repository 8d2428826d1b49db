from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.retrieval.index.embeddings import Embeddings, build_embeddings
from reasonrag.retrieval.index.folder import IndexFolder, Silent
from reasonrag.retrieval.index.vectors import (
    ExactSearch,
    VectorSettings,
    adopt_vectors,
    build_vectors,
    choose,
    open_vectors,
    recall_at_10,
)
from tests import warmed
from tests.retrieval.index.dense_toys import Notes, WordsEncoder, digest, passages, sentences

faiss = pytest.importorskip("faiss")

GIB = 1 << 30
TEXTS = sentences(1200)
QUERIES = WordsEncoder().encode_queries(sentences(40, seed=1, words=3))
SETTINGS = {
    "hnsw": VectorSettings("hnsw", "HNSW8"),
    "ivf-sq8": VectorSettings("ivf-sq8", "IVF16,SQ8", training_rows=700, block_rows=300, refine=2),
    "ivf-pq": VectorSettings("ivf-pq", "IVF16,PQ4x8", training_rows=1200, block_rows=300, refine=10),
}


def embedded(path, *, texts=TEXTS, encoder=None):
    index = passages(path, texts)
    with index.locked():
        build_embeddings(index, encoder or WordsEncoder(), progress=Silent(), shard_rows=256)
    return index


def build(index, settings, *, queries=QUERIES, progress=None):
    with index.locked():
        return build_vectors(index, settings, queries=queries, progress=progress or Silent())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Embeddings that tests take a copy of."""
    return embedded(tmp_path_factory.mktemp("whole")).path


@pytest.fixture
def index(whole, tmp_path):
    return IndexFolder(shutil.copytree(whole, tmp_path / "index"))


@pytest.fixture(scope="module")
def built(whole, tmp_path_factory):
    """Indexes of all kinds that tests take a copy of."""
    folders = {}
    for kind, settings in SETTINGS.items():
        folders[kind] = shutil.copytree(whole, tmp_path_factory.mktemp(kind) / "index")
        build(IndexFolder(folders[kind]), settings)
    return folders


@pytest.fixture
def copy_of(built, tmp_path):
    return lambda kind: IndexFolder(shutil.copytree(built[kind], tmp_path / "index"))


def exact_by_hand(embeddings, queries, top_k):
    vectors = np.concatenate([block for _, block in embeddings.blocks()])
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = np.stack([np.lexsort((np.arange(len(row)), -np.round(row, 7)))[:top_k] for row in scores])
    return np.take_along_axis(scores, rows, 1), rows


def test_exact_search_finds_what_comparing_by_hand_finds(index):
    embeddings = Embeddings(index)
    scores, rows = open_vectors(index).search(QUERIES, 10)
    wanted, wanted_rows = exact_by_hand(embeddings, QUERIES, 10)
    assert np.array_equal(rows, wanted_rows)
    assert np.allclose(scores, wanted, atol=1e-6)


def test_of_equal_passages_the_first_come_first_however_many_there_are(tmp_path):
    texts = [*TEXTS[:100], *["the same"] * 40, *TEXTS[100:600], *["the same"] * 300]
    search = open_vectors(embedded(tmp_path, texts=texts))
    scores, rows = search.search(WordsEncoder().encode_queries(["the same"]), 50)
    assert rows[0].tolist() == [*range(100, 140), *range(640, 650)]
    assert np.unique(scores).size == 1


@pytest.mark.parametrize("kind", ["flat", *SETTINGS])
def test_fewer_passages_than_asked_for_are_marked(tmp_path, kind):
    index = embedded(tmp_path, texts=TEXTS[:300])
    settings = {"flat": VectorSettings("flat"), **SETTINGS}[kind]
    build(index, VectorSettings(**{f: getattr(settings, f) for f in settings.__slots__} | {"training_rows": 300}))
    search = open_vectors(index)
    scores, rows = search.search(QUERIES[:3], 310)
    assert scores.shape == rows.shape == (3, 310)
    assert (rows[:, -10:] == -1).all() and np.isneginf(scores[rows == -1]).all()
    assert search.search(QUERIES[:0], 5)[1].shape == (0, 5)


@pytest.mark.parametrize("kind", SETTINGS)
def test_approximate_search_reaches_the_recall_that_it_was_tuned_for(index, kind):
    notes = Notes()
    manifest = build(index, SETTINGS[kind], progress=notes)
    search = open_vectors(index)
    assert search.effort == manifest.counts["effort"]
    found = recall_at_10(search.search(QUERIES, 10), ExactSearch(Embeddings(index)).search(QUERIES, 10))
    assert found >= 0.95
    assert manifest.counts["recall_permille"] == round(1000 * found)
    assert f"give {found:.3f} of exact search's ten best" in notes.notes[-1]
    if search.effort > 1:
        search.effort -= 1
        assert recall_at_10(search.search(QUERIES, 10), ExactSearch(Embeddings(index)).search(QUERIES, 10)) < 0.95


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_same_embeddings_give_the_same_bytes_with_any_number_of_threads(copy_of, kind):
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
from reasonrag.retrieval.index.folder import IndexFolder
from tests.retrieval.index.test_vectors import SETTINGS, build
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
def test_a_build_killed_at_every_few_files_that_it_writes_gives_the_same_bytes(index, tmp_path, kind, kill_at):
    other = shutil.copytree(index.path, tmp_path / "other")

    def run(path, kill_at):
        return warmed.run(warmed.source, KILLED, str(path), kind, str(kill_at), environment=os.environ).returncode

    build(IndexFolder(other), SETTINGS[kind])
    kills = 0
    while (done := run(index.path, kill_at)) == -signal.SIGKILL:
        kills += 1
        assert kills < 20
    assert done == 0 and kills >= 2
    assert digest(index.part("vectors")) == digest(other / "vectors")


def test_other_embeddings_below_the_vectors_are_refused(copy_of):
    index = copy_of("ivf-sq8")
    with index.locked():
        build_embeddings(index, WordsEncoder(salt="x"), progress=Silent())
    with pytest.raises(DataError, match="vectors was built over other embeddings"):
        open_vectors(index)


def test_flat_needs_no_vectors_and_takes_older_ones_away(copy_of):
    index = copy_of("hnsw")
    assert build(index, choose(1200, 16, GIB)) is None
    assert index.manifest("vectors") is None
    assert isinstance(open_vectors(index), ExactSearch)


@pytest.mark.parametrize(
    ("rows", "dims", "gib", "kind"),
    [
        (1000, 384, 1, "flat"),
        (200_000, 384, 4, "hnsw"),
        (21_000_000, 768, 256, "hnsw"),
        (21_000_000, 768, 24, "ivf-sq8"),
        (21_000_000, 768, 8, "ivf-pq"),
    ],
)
def test_the_kind_follows_from_size_and_memory(rows, dims, gib, kind):
    assert choose(rows, dims, gib * GIB).kind == kind


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"hnsw over 21000000 passages of 768 dimensions needs [\d,]+ MiB, more than"):
        choose(21_000_000, 768, 8 * GIB, kind="hnsw")
    assert choose(21_000_000, 768, GIB, kind="flat").kind == "flat"
    with pytest.raises(ConfigError, match="ivf-pq learns its codes from 9984 passages or more, not 500"):
        choose(500, 384, GIB, kind="ivf-pq")


def write(path, index):
    faiss.write_index(index, str(path))
    return path


def adoptable(kind, vectors):
    if kind == "flat":
        index = faiss.IndexFlatIP(16)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(16, 8, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.index_factory(16, "IVF8,SQ8", faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
    index.add(vectors)
    return index


@pytest.fixture
def bare(tmp_path):
    """Passages, and the vectors that somebody else has of them."""
    return passages(tmp_path / "bare", TEXTS), WordsEncoder().encode_passages(TEXTS)


def adopt(index, path, encoder=None):
    with index.locked():
        return adopt_vectors(index, path, encoder or WordsEncoder(), progress=Silent())


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_an_index_of_somebody_else_is_searched_without_encoding_the_corpus(bare, tmp_path, kind):
    index, vectors = bare
    path = write(tmp_path / "theirs.index", adoptable(kind, vectors))
    encoder = WordsEncoder()
    manifest = adopt(index, path, encoder)
    assert encoder.encoded <= 32 + 256
    assert (index.part("vectors") / "index.faiss").samefile(path)
    _, exact_rows = exact_by_hand(Embeddings(embedded(tmp_path / "x")), QUERIES, 10)
    _, rows = open_vectors(index).search(QUERIES, 10)
    same = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows, exact_rows, strict=True)])
    assert same > (0.85 if kind != "flat" else 0.99)
    assert ("effort" in manifest.counts) == (kind != "flat")
    assert str(tmp_path) not in (index.part("vectors") / "manifest.json").read_text()


@pytest.mark.parametrize("kind", ["flat", "ivf"])
@pytest.mark.parametrize("harm", ["encoder", "order"])
def test_vectors_of_another_encoder_or_order_are_refused_with_the_cosine(bare, tmp_path, kind, harm):
    index, vectors = bare
    wrong = vectors[::-1] if harm == "order" else WordsEncoder(salt="other").encode_passages(TEXTS)
    path = write(tmp_path / "theirs.index", adoptable(kind, np.ascontiguousarray(wrong)))
    with pytest.raises(DataError, match=r"another encoder or another order of passages: .* is -?0\.\d{3}, not above"):
        adopt(index, path)
    assert index.manifest("vectors") is None


def test_what_is_no_index_of_these_passages_is_refused(bare, tmp_path):
    index, vectors = bare
    few = write(tmp_path / "few", adoptable("flat", vectors[:7]))
    with pytest.raises(DataError, match="holds 7 vectors of 16 dimensions, and the corpus 1200 passages"):
        adopt(index, few)
    with pytest.raises(DataError, match=r"holds 1200 vectors of 16 dimensions, .*; words-24 makes 24 dimensions"):
        adopt(index, write(tmp_path / "dims", adoptable("flat", vectors)), WordsEncoder(24))
    l2 = faiss.IndexFlatL2(16)
    l2.add(vectors)
    with pytest.raises(DataError, match="compares by distance, not by inner product"):
        adopt(index, write(tmp_path / "l2", l2))
    (tmp_path / "text").write_bytes(b"no index at all")
    with pytest.raises(DataError, match="cannot be read as a FAISS index"):
        adopt(index, tmp_path / "text")
    with pytest.raises(DataError, match="No such file"):
        adopt(index, tmp_path / "nowhere")


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this faiss searches on GPUs")
def test_gpus_without_a_faiss_for_them_are_one_clear_line(index):
    with pytest.raises(ConfigError, match="no GPU; pip install"):
        open_vectors(index, gpu=True)


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(faiss, "StandardGpuResources"), reason="this faiss has no GPU support")
@pytest.mark.parametrize("kind", ["flat", "ivf-sq8", "ivf-pq"])
def test_gpus_find_what_the_cpu_finds(index, kind):
    build(index, {"flat": VectorSettings("flat"), **SETTINGS}[kind])
    found, wanted = (open_vectors(index, gpu=gpu).search(QUERIES, 10) for gpu in (True, False))
    assert recall_at_10(found, wanted) > 0.98
