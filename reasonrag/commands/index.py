"""The body of `index`: build, serve, doctor, recall."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reasonrag.commands.progress import StageLines
from reasonrag.commands.shell import error_console, log_plainly, table_console
from reasonrag.core.config import RetrievalConfig
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import validate
from reasonrag.core.text import one_line, printable
from reasonrag.evaluation.bootstrap import intervals
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.index.build import build_index
from reasonrag.retrieval.index.folder import IndexFolder
from reasonrag.retrieval.index.settings import IndexConfig, show_size
from reasonrag.retrieval.measure import examine, gold_recall, with_gold_ids
from reasonrag.retrieval.open import kinds, open_index
from reasonrag.retrieval.remote import RemoteRetriever
from reasonrag.storage.questions import load_questions, sample_questions

_MOST_PASSAGES = 1000


def build(out: Path, config: IndexConfig, *, replace: bool) -> None:
    """Build, and print what is there now."""
    log_plainly()
    with StageLines(error_console()) as progress:
        manifests = build_index(out, config, replace=replace, progress=progress)
    table = Table("part", "size", "files", "counts")
    for part, manifest in manifests.items():
        counts = ", ".join(f"{name} {count:,}" for name, count in manifest.counts.items())
        table.add_row(part, show_size(manifest.size), str(len(manifest.files)), counts)
    table_console().print(table)
    print(f"index: {printable(str(out))}")


def serve(folder: Path, given: Mapping[str, Any], **asked: Any) -> int:
    """Serve until a signal comes; returns the exit code."""
    from reasonrag.retrieval.server import ServeSettings
    from reasonrag.retrieval.server import serve as serve_until_stopped

    log_plainly()
    settings = validate(ServeSettings, asked)
    index = IndexFolder(folder)
    passages = index.need("passages").counts["passages"]
    kind = given.get("kind") or kinds(index)[0]
    return serve_until_stopped(_open(str(folder), given), settings, about=f"{passages:,} passages, {kind}")


def doctor(folder: Path, given: Mapping[str, Any], *, sample: int, seed: int, as_json: bool) -> None:
    """Examine, and print a table or JSON."""
    log_plainly()
    with StageLines(error_console()) as progress:
        config, trusted = _settings(folder, given)
        report = examine(config, trust_remote_code=trusted, sample=sample, seed=seed, progress=progress)
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        _print_report(report, table_console())


def recall(
    place: str, given: Mapping[str, Any], *, questions: str, split: str | None, limit: int | None, cuts: tuple[int, ...]
) -> None:
    """Print any-gold@k and all-gold@k as JSON, each with a 95 % interval over questions."""
    log_plainly()
    if not cuts or min(cuts) < 1 or max(cuts) > _MOST_PASSAGES:
        raise ConfigError(f"--k takes numbers from 1 to {_MOST_PASSAGES}, for example 5,10")
    loaded = load_questions(questions, split=split)
    needed = with_gold_ids(loaded)
    found = asyncio.run(_recall(_open(place, given), sample_questions(needed, limit), cuts))
    columns = {
        f"{name}@{k}": [float(getattr(at[k], name)) for at in found] for name in ("any_gold", "all_gold") for k in cuts
    }
    figures = {
        name: {"mean": interval.mean, "low": interval.low, "high": interval.high}
        for name, interval in intervals(columns, seed=0).items()
        if interval is not None
    }
    print(json.dumps({"questions": len(found), "without_gold_ids": len(loaded) - len(needed), **figures}, indent=2))


async def _recall(retriever: Retriever, questions: Any, cuts: tuple[int, ...]) -> Any:
    try:
        return await gold_recall(retriever, questions, cuts)
    finally:
        await retriever.aclose()


def _open(place: str, given: Mapping[str, Any]) -> Retriever:
    if re.match("https?://", place, re.IGNORECASE):
        if asked := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(asked)}: how it searches is the server's to say; leave that out")
        return RemoteRetriever(place)
    config, trusted = _settings(Path(place), given)
    return open_index(config, trust_remote_code=trusted)


def _settings(folder: Path, given: Mapping[str, Any]) -> tuple[RetrievalConfig, bool]:
    """Return how to open the index, and whether code that comes with a model may run."""
    settings = {name: value for name, value in given.items() if value is not None}
    trusted = settings.pop("trust_remote_code", False)
    return validate(RetrievalConfig, {**settings, "index": str(folder)}), trusted


def _print_report(report: Mapping[str, Any], console: Console) -> None:
    parts = Table("part", "size", "files", "read in", "counts", "settings")
    for name, part in report["parts"].items():
        counts = ", ".join(f"{key} {value:,}" for key, value in part["counts"].items())
        settings = ", ".join(f"{key}={value}" for key, value in part["settings"].items())
        row = (name, show_size(part["bytes"]), str(part["files"]), f"{part['seconds']:.1f} s", counts, settings)
        parts.add_row(*(printable(one_line(cell)) for cell in row))
    figures = Table(show_header=False)
    for name, value in _figures(report):
        figures.add_row(name, value)
    console.print(parts)
    console.print(figures)


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    held = report["resident_bytes"]
    figures = [
        ("opened in", f"{report['open_s']:.2f} s"),
        ("memory", "not said by this system" if held is None else show_size(held)),
        (
            f"finds itself, of {report['sample']}",
            f"{report['found_at_1']:.3f} first, {report['found_at_10']:.3f} in 10",
        ),
    ]
    figures += [(f"queries/s, {how}", f"{rate:,.0f}") for how, rate in report["queries_per_s"].items()]
    if "recall_at_10" in report:
        figures.append(("recall@10 against exact search", f"{report['recall_at_10']:.3f}"))
    return figures
