"""Stage a run's folder for the Hub: pairs by source, trees, settings and counts; never its journal.

FOLDER/
├── README.md                       the card
├── run.json, config.yaml           the run's own, without paths and addresses of this machine
├── reasonrag.yaml, prompts/        how the policy was prompted, for those who train on its steps
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
from reasonrag.core.policy_card import PolicyCard
from reasonrag.core.settings import POLICY_CARD
from reasonrag.dpo.contradictions import Contradictions
from reasonrag.formats import open_format
from reasonrag.publish.hub_card import mapping
from reasonrag.publish.staged_files import place_json, settings_text
from reasonrag.publish.verify import verify
from reasonrag.storage.files import naming, place, write_text
from reasonrag.storage.parquet import Row, ShardWriter, read_batches, shard_paths
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import Described, pair_schema, trajectory_pair_schema, tree_schema

if TYPE_CHECKING:
    import pyarrow as pa

ALL, TREES = "all", "trees"  # names of configurations
OWNED = ("pairs/*", "trees/*", "prompts/*", "run.json", "config.yaml", POLICY_CARD)
SPLITS = ("train", "test")

_SHARD_ROWS = 50_000
_TABLES = {"step": pair_schema, "trajectory": trajectory_pair_schema}


class Group(NamedTuple):
    """The key by which pairs are counted; pairs of whole trajectories have no types."""

    source: str
    split: str
    depth: int
    chosen: str | None
    rejected: str | None


Counts = Counter[Group]


@dataclass(frozen=True, slots=True)
class Part:
    """Some shards of one split."""

    config: str  # the name under which `load_dataset` loads this part of the data
    source: str | None  # the questions' data set; None for trees, which hold all of them
    split: str  # train, test, or nodes
    pattern: str  # of its files, in the folder
    rows: int
    memory_bytes: int  # of the rows, in Arrow
    file_bytes: int


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A staged run and the counts of its rows."""

    config: Config
    summary: dict[str, Any]  # the content of its `run.json`
    parts: list[Part]  # pairs by source and split, then trees
    counts: Counts  # of pairs
    example: Row  # the first pair, a training pair if there is one
    has_policy_card: bool
    table: Described  # of the pairs
    contradictions: Contradictions  # among the pairs

    @property
    def compared(self) -> str:
        """What a pair compares, in words."""
        return "steps" if self.table is pair_schema else "whole trajectories"

    @property
    def pairs(self) -> list[Part]:
        return [part for part in self.parts if part.source is not None]

    @property
    def pair_count(self) -> int:
        return sum(part.rows for part in self.pairs)

    @property
    def sources(self) -> list[str]:
        """The data sets of the questions that have pairs."""
        return list(dict.fromkeys(part.source for part in self.pairs if part.source is not None))


def stage_run(run: Path, folder: Path, *, trees: bool) -> StagedRun:
    """Copy what is published of a finished run into a folder, and verify the copy.

    Raises:
        RunError: there is no finished run.
        DataError: the tables are damaged, hold no pairs, or do not match the counts in `run.json`.
    """
    config, summary = read_run(run)
    level = mapping(summary, "pairs").get("level")
    if level not in _TABLES:
        raise RunError(
            f"{run}: run.json does not name the level of its pairs; write them again with `reasonrag pairs {run}`"
        )
    table = _TABLES[level]
    schema = table()
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
    if trees:
        files = [place(path, folder / "trees" / path.name) for path in shard_paths(run / "trees", "nodes")]
        parts.append(_part(TREES, None, "nodes", files, tree_schema(), folder, counts))
    place_json(summary, folder / "run.json")
    write_text(folder / "config.yaml", settings_text(config.model_dump(mode="json")))
    policy_card = _policy_card(config, summary)
    if policy_card is not None:
        with naming(folder / POLICY_CARD):
            policy_card.write(folder)
    verified = verify(folder)
    verified.refuse_grave()
    parts.sort(key=lambda part: (part.source is None, part.config, part.split != "train"))
    first = min((folder / "pairs").rglob("*.parquet"), key=lambda path: (not path.name.startswith("train"), path))
    example: Row = next(read_batches(first, schema)).slice(0, 1).to_pylist()[0]
    return StagedRun(config, summary, parts, counts, example, policy_card is not None, table, verified.pairs)


def _policy_card(config: Config, summary: dict[str, Any]) -> PolicyCard | None:
    """Return how the policy was prompted; None if its own prompts were changed or deleted since."""
    fingerprint = mapping(summary, "content").get("prompts")
    card = PolicyCard.of(config.model_dump(mode="json"), fingerprint)
    if card.prompts is None:
        return card
    if config.format.name.startswith("python:"):  # publishing runs no code of others just to look at its prompts
        return None
    try:
        unchanged = open_format(config).fingerprint == fingerprint
    except ConfigError:
        return None
    return card if unchanged else None


def config_names(sources: Sequence[str]) -> dict[str, str]:
    """Give each source a name that is valid as a folder and as a configuration; no two names are equal.

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


def _sources(path: Path, schema: pa.Schema) -> Iterator[str]:
    for batch in read_batches(path, schema, columns=["dataset"]):
        yield from (name or "" for name in batch.column("dataset").unique().to_pylist())


def _by_source(
    paths: Sequence[Path], sources: Sequence[str], schema: pa.Schema, folder: Path, names: dict[str, str], split: str
) -> Iterator[tuple[str, list[Path]]]:
    """Yield each source with its files: the run's own files if there is one source, else new files.

    Files of an older version, without columns that the card names, are written anew, too.
    """
    import pyarrow.parquet as pq

    if len(sources) == 1 and all(pq.read_schema(path).names == schema.names for path in paths):
        yield sources[0], [place(path, folder / names[sources[0]] / path.name) for path in paths]
        return
    writers = {name: ShardWriter(folder / names[name], split, schema, shard_rows=_SHARD_ROWS) for name in sources}
    for path in paths:
        for batch in read_batches(path, schema):
            for row in batch.to_pylist():
                writers[row["dataset"] or ""].add(row)
    for name, writer in writers.items():
        if files := writer.close():
            yield name, files


def _part(
    config: str, source: str | None, split: str, files: list[Path], schema: pa.Schema, folder: Path, counts: Counts
) -> Part:
    """Count the rows of staged files, and pairs by kind."""
    kinds = [name for name in ("depth", "chosen_type", "rejected_type") if name in schema.names]
    rows = memory = 0
    for path in files:
        for batch in read_batches(path, schema):
            rows += batch.num_rows
            memory += batch.nbytes
            if source is None:
                continue
            for pair in batch.select(kinds).to_pylist():
                types = pair.get("chosen_type"), pair.get("rejected_type")
                counts[Group(source, split, pair["depth"], *types)] += 1
    stem = files[0].name.partition("-")[0]
    pattern = f"{files[0].parent.relative_to(folder).as_posix()}/{stem}-*"
    return Part(config, source, split, pattern, rows, memory, sum(path.stat().st_size for path in files))


def is_gone(pattern: str, files: Iterable[str]) -> bool:
    """Return whether a configuration's pattern names files of ours that are no longer published.

    >>> is_gone("pairs/old/train-*", ["pairs/new/train-0.parquet"]), is_gone("mine/*", [])
    (True, False)
    """
    return any(fnmatchcase(pattern, ours) for ours in OWNED) and not any(fnmatchcase(file, pattern) for file in files)
