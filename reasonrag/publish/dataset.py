"""A run's folder to what goes up of it: pairs by source, trees, settings and counts; never its journal.

FOLDER/
├── README.md                       the card
├── run.json, config.yaml           the run's own, without places on a machine
├── reasonrag.yaml, prompts/        how the policy was asked, for those who train on its steps
├── pairs/SOURCE/{train,test}-*.parquet
└── trees/nodes-*.parquet
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.policy_card import POLICY_CARD, PolicyCard
from reasonrag.pipeline.parts import open_format
from reasonrag.publish.cards import mapping
from reasonrag.publish.staging import place, place_json, place_yaml
from reasonrag.storage.parquet import Row, ShardWriter, read_batches, shard_paths
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import Described, pair_schema, trajectory_pair_schema, tree_schema

if TYPE_CHECKING:
    import pyarrow as pa

ALL, TREES = "all", "trees"
OWNED = ("pairs/*", "trees/*", "prompts/*", "run.json", "config.yaml", POLICY_CARD)
SPLITS = ("train", "test")

_SHARD_ROWS = 50_000
_TABLES = {"step": pair_schema, "trajectory": trajectory_pair_schema}


class Group(NamedTuple):
    """What pairs are counted by; the types are None of whole trajectories."""

    source: str
    split: str
    depth: int
    chosen: str | None
    rejected: str | None


Counts = Counter[Group]


@dataclass(frozen=True, slots=True)
class Part:
    """Some shards of one split.

    Attributes:
        config: names the part of the data that a person loads.
        source: the questions' data set; None for trees, which are of all of them.
        split: train, test, or nodes.
        pattern: of its files, in the folder.
        rows: in all of them.
        memory_bytes: of these, in Arrow.
        file_bytes: on disk.
    """

    config: str
    source: str | None
    split: str
    pattern: str
    rows: int
    memory_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """What was put into the folder, and what was counted in it.

    Attributes:
        config: the run's configuration.
        summary: what its `run.json` holds.
        parts: pairs by source and split, then trees.
        counts: of pairs.
        example: a pair, as a row of its table.
        asked: whether `reasonrag.yaml` is in it.
    """

    config: Config
    summary: dict[str, Any]
    parts: list[Part]
    counts: Counts
    example: Row
    asked: bool

    @property
    def level(self) -> str:
        """Of the pairs: step or trajectory."""
        return str(self.summary["pairs"]["level"])

    @property
    def pairs(self) -> list[Part]:
        """The parts that hold pairs."""
        return [part for part in self.parts if part.source is not None]

    @property
    def table(self) -> Described:
        """That the pairs are in."""
        return _TABLES[self.level]


def stage_run(run: Path, folder: Path, *, trees: bool) -> Staged:
    """Put what goes up of a finished run into a folder; every page checksum has been verified then.

    Raises:
        RunError: there is no finished run, or its tables are not those that `run.json` counts.
        DataError: the tables are damaged, or hold no pairs.
    """
    config, summary = read_run(run)
    schema = _table(run, summary)()
    shards = {split: shard_paths(run / "pairs", split) for split in SPLITS if any((run / "pairs").glob(f"{split}-*"))}
    sources = sorted({name for paths in shards.values() for path in paths for name in _sources(path, schema)})
    if not sources:
        raise DataError(
            f"{run}: no pairs to publish; build trees of more questions, or lower pairs.min_margin with "
            "`reasonrag pairs`"
        )
    names = config_names(sources)
    counts: Counts = Counter()
    parts = []
    for split, paths in shards.items():
        for source, files in _by_source(paths, sources, schema, folder / "pairs", names, split):
            parts.append(_part(names[source], source, split, files, schema, folder, counts))
    _check_counts(run, summary, "pairs", sum(part.rows for part in parts))
    if trees:
        files = _link(shard_paths(run / "trees", "nodes"), folder / "trees")
        parts.append(_part(TREES, None, "nodes", files, tree_schema(), folder, Counter()))
        _check_counts(run, summary, "trees", parts[-1].rows)
    place_json(summary, folder / "run.json")
    place_yaml(config.model_dump(mode="json"), folder / "config.yaml")
    asked = _asked(config, summary)
    if asked is not None:
        asked.write(folder)
    return Staged(config, summary, sorted(parts, key=_order), counts, _first_row(folder, schema), asked is not None)


def _asked(config: Config, summary: dict[str, Any]) -> PolicyCard | None:
    """How the policy was asked; None where its own prompts are gone since, or others now."""
    card = PolicyCard.of(config.model_dump(mode="json"))
    if card.prompts is None:
        return card
    if config.format.name.startswith("python:"):  # its code is not run to look at them
        return None
    try:
        same = open_format(config).fingerprint == mapping(summary, "content").get("prompts")
    except ConfigError:
        return None
    return card if same else None


def config_names(sources: Sequence[str]) -> dict[str, str]:
    """A name for each source that is a folder's and a configuration's anywhere; none is taken twice.

    >>> config_names(["../x y", "all", "hotpotqa"])
    {'../x y': 'x-y', 'all': 'all-2', 'hotpotqa': 'hotpotqa'}
    """
    taken = {ALL, TREES, "default"}
    names = {}
    for source in sources:
        plain = re.sub(r"[^A-Za-z0-9_.]+", "-", source)[:64].strip("-.") or "source"
        free = (plain if n == 1 else f"{plain}-{n}" for n in range(1, len(sources) + len(taken) + 2))
        names[source] = next(name for name in free if name.lower() not in taken)
        taken.add(names[source].lower())
    return names


def _table(run: Path, summary: Any) -> Described:
    counted = summary.get("pairs") if isinstance(summary, dict) else None
    level = counted.get("level") if isinstance(counted, dict) else None
    if level not in _TABLES:
        raise RunError(f"{run}: run.json does not say what its pairs are; write them anew with `reasonrag pairs {run}`")
    return _TABLES[level]


def _sources(path: Path, schema: pa.Schema) -> Iterator[str]:
    for batch in read_batches(path, schema, columns=["dataset"]):
        yield from (name or "" for name in batch.column("dataset").unique().to_pylist())


def _by_source(
    paths: Sequence[Path], sources: Sequence[str], schema: pa.Schema, folder: Path, names: dict[str, str], split: str
) -> Iterator[tuple[str, list[Path]]]:
    """Each source with its files: the run's very own where there is one source, else written anew."""
    if len(sources) == 1:
        yield sources[0], _link(paths, folder / names[sources[0]])
        return
    writers = {name: ShardWriter(folder / names[name], split, schema, shard_rows=_SHARD_ROWS) for name in sources}
    for path in paths:
        for batch in read_batches(path, schema):
            for row in batch.to_pylist():
                writers[row["dataset"] or ""].add(row)
    for name, writer in writers.items():
        if files := writer.close():
            yield name, files


def _link(paths: Iterable[Path], folder: Path) -> list[Path]:
    placed = [(path, folder / path.name) for path in paths]
    for source, target in placed:
        place(source, target)
    return [target for _, target in placed]


def _part(
    config: str, source: str | None, split: str, files: list[Path], schema: pa.Schema, folder: Path, counts: Counts
) -> Part:
    """Read the staged files whole, which verifies them, and count."""
    grouped = [name for name in ("depth", "chosen_type", "rejected_type") if name in schema.names]
    rows = memory = 0
    for path in files:
        for batch in read_batches(path, schema):
            rows += batch.num_rows
            memory += batch.nbytes
            if source is not None:
                for key, count in _grouped(batch, grouped):
                    counts[Group(source, split, key["depth"], key.get("chosen_type"), key.get("rejected_type"))] += (
                        count
                    )
    stem = files[0].name.partition("-")[0]
    pattern = f"{files[0].parent.relative_to(folder).as_posix()}/{stem}-*"
    return Part(config, source, split, pattern, rows, memory, sum(path.stat().st_size for path in files))


def _grouped(batch: pa.RecordBatch, names: list[str]) -> Iterator[tuple[Row, int]]:
    import pyarrow as pa

    table = pa.Table.from_batches([batch.select(names)])
    for row in table.group_by(names, use_threads=False).aggregate([([], "count_all")]).to_pylist():
        yield row, row.pop("count_all")


def _check_counts(run: Path, summary: dict[str, Any], table: str, found: int) -> None:
    """The card tells what `run.json` counts, so that has to be of these tables."""
    counted = summary.get(table)
    said = counted.get("total" if table == "pairs" else "nodes") if isinstance(counted, dict) else None
    if said != found:
        again = f"`reasonrag pairs {run}`" if table == "pairs" else "the same build-tree command"
        raise RunError(f"{run}: {found} rows of {table} found and {said} in run.json; write them again with {again}")


def _first_row(folder: Path, schema: pa.Schema) -> Row:
    """The first pair there is, one to train on if possible."""
    path = min((folder / "pairs").rglob("*.parquet"), key=lambda path: (not path.name.startswith("train"), path))
    row: Row = next(read_batches(path, schema)).slice(0, 1).to_pylist()[0]
    return row


def _order(part: Part) -> tuple[bool, str, bool]:
    return part.source is None, part.config, part.split != "train"


def is_gone(pattern: str, files: Iterable[str]) -> bool:
    """Whether a configuration's pattern is of files that were ours and are not published any more.

    >>> is_gone("pairs/old/train-*", ["pairs/new/train-0.parquet"]), is_gone("mine/*", [])
    (True, False)
    """
    return any(fnmatchcase(pattern, ours) for ours in OWNED) and not any(fnmatchcase(file, pattern) for file in files)
