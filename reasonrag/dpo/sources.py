"""Where preference data comes from: a run, a folder or a file of pairs, or a Hub data set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.policy_card import POLICY_CARD, PolicyCard
from reasonrag.core.text import one_line, quoted
from reasonrag.dpo.row_layouts import FURTHER, LAYOUTS, NEEDED, OWN, Raw, checked_rows
from reasonrag.dpo.token_rows import Row
from reasonrag.storage.records import RowProblems, read_rows
from reasonrag.storage.runs import read_run

if TYPE_CHECKING:
    from datasets import DatasetDict

_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.-]+))?")
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """Checked rows by split, and how the policy was asked where the run is known."""

    train: list[Row]
    test: list[Row]
    card: PolicyCard | None = None


def read_source(data: str) -> Source:
    """What stands at a path or on the Hub, as `OWNER/NAME[@REVISION][:CONFIGURATION]`.

    Raises:
        DataError, RunError: nothing readable; one line says what was found and what to do.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        if path.name == "pairs" and (path.parent / "run.json").is_file():
            path = path.parent
        is_run = (path / "run.json").exists() or (path / "journal.sqlite").exists()
        return _run(path) if is_run else _folder(path)
    if path.is_file() or data.lower().endswith(_SUFFIXES):
        return Source(_rows(path), [])
    return _hub(data)


def _run(path: Path) -> Source:
    """Pairs of a run, as many as its `run.json` counts."""
    config, summary = read_run(path)
    source = Source(*_by_split(path / "pairs"), _card(config))
    for split, rows in (("train", source.train), ("test", source.test)):
        counted = (summary.get("pairs") or {}).get(split)
        if counted != len(rows):
            raise DataError(
                f"{path}: {len(rows)} {split} pairs found and {counted} in run.json; "
                f"write them again with `reasonrag pairs {path}`"
            )
    if not source.train:
        raise DataError(
            f"{path}: no pairs to train on; build trees of more questions, or lower pairs.min_margin with "
            "`reasonrag pairs`"
        )
    return source


def _folder(path: Path) -> Source:
    """Parquet by the names of its files: what does not begin with a held-out split's name is for training."""
    config = path / "config.yaml"
    place = next((p for p in (path, path / "data") if any(p.glob("*.parquet"))), None)
    if place is None:
        raise DataError(f"{path}: no run and no Parquet file in this folder; give one that has either")
    source = Source(*_by_split(place), _card(load_config(file=config)) if config.is_file() else None)
    if not source.train:
        raise DataError(f"{path}: only held-out rows in it; there has to be a train-*.parquet")
    return source


def _by_split(folder: Path) -> tuple[list[Row], list[Row]]:
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.parquet")):
        word = re.match("[a-z]*", file.name.lower())
        name = word[0] if word and word[0] in _HELD_OUT else "train"
        files.setdefault(name, []).append(file)
    _check_shards(folder, [file.name for group in files.values() for file in group])
    test = files.get(next((name for name in _HELD_OUT if name in files), ""), [])
    train = files.get("train", [])
    return [row for f in train for row in _rows(f)], [row for f in test for row in _rows(f)]


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    found: dict[tuple[str, int], int] = {}
    for name in names:
        if shard := re.match(r"(.+)-\d{5}-of-(\d{5})\b", name):
            key = (shard[1], int(shard[2]))
            found[key] = found.get(key, 0) + 1
    for (stem, count), there in found.items():
        if there != count:
            raise DataError(f"{folder}: {there} of {count} files of {stem}-*.parquet are there; copy the whole folder")


def _rows(path: Path) -> list[Row]:
    problems = RowProblems(str(path))
    raw = _parquet(path) if path.name.lower().endswith(".parquet") else read_rows(path, problems)
    rows = checked_rows(path.name, raw, problems)
    if not rows:
        raise DataError(f"{path}: no pairs in it")
    return rows


def _parquet(path: Path) -> Iterator[Raw]:
    """Rows of a Parquet file, with the columns that are needed; their page checksums are verified if it has any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"{path}: file not found")
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        if not any(set(layout) <= set(names) for layout in LAYOUTS):
            raise DataError(f"{path}: no pairs, its columns are {', '.join(map(quoted, names[:12]))}. {NEEDED}")
        ends = {"chosen_steps"} if "chosen_steps" in names else {"chosen_end", "rejected_end"}
        if "config_hash" in names and (missing := (OWN | ends) - set(names)):
            raise DataError(
                f"{path}: pairs of another version of reasonrag, without {min(missing)}; "
                "write them again with `reasonrag pairs`"
            )
        wanted = [name for name in names if name in (*LAYOUTS[0], *LAYOUTS[1], *FURTHER)]
        yield from enumerate(file.read(columns=wanted).to_pylist(), 1)
    except (OSError, ValueError, pa.ArrowException) as error:  # a damaged name is no UTF-8
        raise DataError(
            f"{path}: cannot be read ({one_line(str(error))[:200]}); it is damaged or not Parquet"
        ) from error


def _hub(data: str) -> Source:
    """A data set with a `train` split; its test or validation split is held out. No code of it is ever run."""
    named = HUB_NAME.fullmatch(data)
    if not named:
        raise DataError(f"data {quoted(data)}: no such file or folder; give a run's folder, a file, or a Hub id")
    try:
        found, card = _fetched(named["name"], named["revision"], named["config"])
    except ConfigError:
        raise
    # Offline mode, sockets, HTTP statuses and damaged caches each raise a type of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data {quoted(data)} is no file or folder, and cannot be fetched from the Hub ({type(error).__name__}); "
            "check the name, or download it and give the Parquet or JSONL file"
        ) from error
    if "train" not in found:
        raise DataError(
            f"data set {data!r} has no split train, but {', '.join(map(quoted, found))}; "
            "save the one you want as Parquet and give that file"
        )
    test = next((split for split in _HELD_OUT if split in found), None)
    rows = [
        checked_rows(split, enumerate(found[split], 1), RowProblems(f"{data}, split {split}")) if split else []
        for split in ("train", test)
    ]
    if not rows[0]:
        raise DataError(f"data set {data!r}: no pairs in its split train")
    return Source(rows[0], rows[1], card)


def _fetched(name: str, revision: str | None, part: str | None) -> tuple[DatasetDict, PolicyCard | None]:
    """Splits by name and how the policy was asked, both of one commit; offline that which was fetched before."""
    import datasets
    import huggingface_hub

    offline = huggingface_hub.is_offline_mode()
    if not offline:  # else `load_dataset` tries a dead Hub for half a minute, and talks about it
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
    wanted = ["README.md", POLICY_CARD, "prompts/*"]
    folder = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted)
    card = PolicyCard.read(Path(folder))
    if offline:  # by its name it would be any revision and any configuration that was ever read
        return datasets.load_dataset(folder, part), card
    return datasets.load_dataset(name, part, revision=Path(folder).name), card


def _card(config: Config) -> PolicyCard:
    return PolicyCard.of(config.model_dump(mode="json"))
