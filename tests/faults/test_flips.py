"""Bits that a disk or a copy flips in tables and indexes: noticed by `verify` and `publish`, or without effect."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from reasonrag.core.errors import InputError
from reasonrag.publish.publish import PublishOptions, stage
from reasonrag.publish.verify import verify
from reasonrag.retrieval.dense import VectorSettings, build_embeddings, build_vectors, open_vectors
from reasonrag.retrieval.index import IndexFolder, Silent
from tests.faults.matrix import Figure, Rounds
from tests.llm.tiny import save_tiny_model
from tests.publish.toys import write_run
from tests.retrieval.toys import WordsEncoder, passages, sentences
from tests.training.toys import dpo_settings, train, write_pairs


def each_flip(files: Sequence[Path], count: int, *, seed: int = 0) -> Iterator[Path]:
    """Flip a random bit of one of these files after another, each as often; yield it meanwhile, then undo it."""
    generator = random.Random(seed)
    for number in range(count):
        file = files[number % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        yield file
        file.write_bytes(whole)


def tally(files: Sequence[Path], count: int, found: Callable[[], object], unharmed: Callable[[Path], bool]) -> str:
    """Return "detected D, harmless H of N"; assert that none was neither.

    Args:
        files: to flip bits in, N in all.
        count: N.
        found: returns something true if the damage is noticed.
        unharmed: whether what is read is what was written, although nothing was noticed.
    """
    assert not found()  # before any damage
    detected = harmless = 0
    silent: list[str] = []
    for file in each_flip(files, count):
        if found():
            detected += 1
        elif unharmed(file):
            harmless += 1
        else:
            silent.append(file.name)
    assert not silent
    return f"detected {detected} and harmless {harmless} of {count} flips"


DETECTED = "noticed, or equal when read"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("flips") / "run", nodes=60)


def rows_of(file: Path) -> Any:
    return pq.read_table(file).to_pylist()


@pytest.mark.fault("flips", "a random bit of the trees, of the pairs", DETECTED)
@pytest.mark.parametrize("table", ["trees", "pairs"])
def test_a_flipped_bit_of_a_table_is_noticed_by_verify(run: Path, table: str, rounds: Rounds, figure: Figure) -> None:
    files = sorted((run / table).glob("*.parquet"))
    whole = {file: rows_of(file) for file in files}
    said = tally(files, rounds(40, 300), lambda: verify(run).problems, lambda file: rows_of(file) == whole[file])
    figure(f"{table}: {said}")


@pytest.mark.fault("9", "a flipped bit in a Parquet file: publish", "refused, or equal when read; nothing else goes up")
def test_a_flipped_bit_of_a_table_is_not_published(run: Path, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    files = sorted(run.glob("*/*.parquet"))
    whole = {file: rows_of(file) for file in files}
    staging = tmp_path / "staging"

    def refused() -> bool:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            stage(run, staging, PublishOptions(repo_id="me/steps"))
        except InputError:
            return True
        return False

    figure(tally(files, rounds(12, 300), refused, lambda file: rows_of(file) == whole[file]))


@pytest.mark.fault("flips", "a random bit of any file of an index", DETECTED.replace("read", "searched"))
def test_a_flipped_bit_of_an_index_is_noticed(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    index = passages(tmp_path / "index", sentences(400))
    with index.locked():
        build_embeddings(index, WordsEncoder(), progress=Silent(), shard_rows=128)
        settings, queries = VectorSettings("ivf-sq8", "IVF8,SQ8", training_rows=400), sentences(20, seed=1)
        vectors = WordsEncoder().encode_queries(queries)
        build_vectors(index, settings, queries=vectors, progress=Silent())
    before = open_vectors(index).search(vectors, 10)

    def equal(file: Path) -> bool:
        after = open_vectors(IndexFolder(index.path)).search(vectors, 10)
        return all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))

    files = [file for file in sorted(index.path.rglob("*")) if file.is_file() and file.stat().st_size]
    figure(f"{len(files)} files: {tally(files, rounds(40, 300), lambda: verify(index.path).problems, equal)}")


@pytest.mark.slow
@pytest.mark.fault(
    "flips",
    "a bit of any file that a training run goes on from: token rows, weights, optimizer, markers",
    "`verify` says so; the same command gives the model of a run without damage",
    before="another row loads without a word: another model, exit code 0, `verify`: ok",
)
def test_a_flipped_bit_never_changes_a_training_run_that_goes_on(
    tmp_path: Path, rounds: Rounds, figure: Figure
) -> None:
    settings = dpo_settings(write_pairs(tmp_path / "pairs"), save_tiny_model(tmp_path / "model"), save_steps=2)
    whole = train(settings, tmp_path / "whole")["files"]

    def stop(line: str) -> None:
        if line.startswith("step 5"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(settings, tmp_path / "begun", log=stop)
    begun = tmp_path / "begun" / "checkpoints"
    assert not verify(begun.parent).problems
    files = [*begun.glob("rows-*/*/*"), *begun.glob("checkpoint-4/*"), *begun.glob("*/complete.json")]
    files = [file for file in files if not file.name.startswith("cache-")]  # TRL's columns: computed again
    random.Random(1).shuffle(files)
    seen = equal = 0
    for number, file in enumerate(each_flip(files, tries := rounds(2, 60), seed=2)):
        seen += bool(verify(begun.parent).problems)
        out = shutil.copytree(begun.parent, tmp_path / str(number))
        equal += train(settings, out)["files"] == whole
        assert file.exists()
    figure(f"{tries} flips in {len(files)} files: {seen} seen by verify, {equal} models equal")
    assert seen == equal == tries
