"""`index`: build an index, serve it, measure its recall."""

from __future__ import annotations

import json
import re
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import (
    PATH,
    Group,
    Several,
    configuration,
    given_settings,
    out,
    rare,
    settings,
    sources,
    together,
)
from reasonrag.core.errors import ConfigError
from reasonrag.core.text import printable

if TYPE_CHECKING:
    from reasonrag.retrieval.base import Retriever

_MOST_PASSAGES = 1000


# How an index is searched: the fields of `RetrievalConfig`, by their own names.
_open_options = together(
    settings("Config", "retrieval.kind", "retrieval.encoder", "retrieval.device", "retrieval.gpu", show_keys=False),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with a model."),
)
_RARE = ("passages.strict", "passages.max_words", "bm25", "encoder.dtype", "encoder.batch_size", "encoder.device")


@click.group(cls=Group)
def index() -> None:
    """Search indexes: BM25 and dense, from a corpus on disk or on the Hub.

    \b
      reasonrag index build --corpus corpus.jsonl.gz --out indexes/mine
      reasonrag index serve indexes/mine
      reasonrag build-tree --dataset questions.jsonl --index indexes/mine --policy extractive --out runs/try
    """


@index.command()
@settings("IndexConfig", "corpus", "kind", "max_memory", "encoder.name", "vectors.kind", "passages.chunk_words")
@rare(settings("IndexConfig", *_RARE))
@configuration("IndexConfig")
@out("The folder of the index; the same command resumes the build.")
def build(out: Path, **given: Any) -> None:
    """Build an index, or add a kind to one, within --max-memory. The same command resumes a build that was killed.

    \b
    BM25 over your own corpus (id and contents, or id, title and text):
      reasonrag index build --corpus corpus.jsonl.gz --out indexes/mine
    Vectors too, over the same passages:
      reasonrag index build --kind dense --encoder intfloat/e5-base-v2 --out indexes/mine
    Wikipedia 2018 as Search-R1 and ReasonRAG use it, in at most 32 GB:
      reasonrag index build --corpus wiki18 --max-memory 32G --out indexes/wiki18
    A folder of texts, cut into passages of 100 words:
      reasonrag index build --corpus texts/ --chunk-words 100 --out indexes/texts
    """
    from reasonrag.commands.console import StageLines, error_console, log_plainly, table_console
    from reasonrag.core.settings import gather, validate
    from reasonrag.core.table import Table
    from reasonrag.retrieval.build import build_index
    from reasonrag.retrieval.index import IndexConfig, show_size

    config = validate(IndexConfig, gather({}, **sources(given)))
    log_plainly()
    with StageLines(error_console()) as progress:
        manifests = build_index(out, config, progress=progress)
    rows = []
    for part, manifest in manifests.items():
        counts = [f"{name} {count:,}" for name, count in manifest.counts.items()]
        rows.append((part, show_size(manifest.size), len(manifest.files), ", ".join(counts)))
    table_console().print(Table("", ("part", "size", "files", "counts"), rows).terminal())
    print(f"index: {printable(str(out))}")


@index.command()
@_open_options
@settings("ServeSettings", "port", "top_k")
@click.argument("folder", type=PATH)
def serve(folder: Path, **given: Any) -> None:
    """Serve an index over HTTP. It answers Search-R1's POST /retrieve, /health and /metrics.

    \b
      reasonrag index serve indexes/mine --port 8000
      curl -s http://127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
          -d '{"queries": ["who directed Jaws?"], "topk": 3, "return_scores": true}'
    Both kinds at once:
      reasonrag index serve indexes/mine --retriever hybrid

    SIGTERM and Ctrl-C end the server once all requests in flight are answered.
    """
    from reasonrag.commands.console import log_plainly
    from reasonrag.core.settings import validate
    from reasonrag.retrieval.index import IndexFolder
    from reasonrag.retrieval.open import kinds
    from reasonrag.retrieval.server import ServeSettings
    from reasonrag.retrieval.server import serve as serve_until_stopped

    log_plainly()
    serving = validate(ServeSettings, given_settings({name: given.pop(name) for name in ("port", "top_k")}))
    parts = IndexFolder(folder)
    passages = parts.need("passages").counts["passages"]
    # The first line of the log names the index before it is opened, which may take minutes.
    kind = given.get("kind") or kinds(parts)[0]
    retriever = _open_index(folder, **given)
    sys.exit(serve_until_stopped(retriever, serving, about=f"{passages:,} passages, {kind}"))


@index.command()
@_open_options
@settings("Config", "questions.dataset", "questions.split", "questions.limit", show_keys=False)
@click.option(
    "--k",
    "cutoffs",
    type=Several(int, "integer"),
    metavar="NUMBERS",
    default="5,10",
    show_default=True,
    help="How many passages of a search count; one or several values of k.",
)
@click.argument("address", metavar="DIR|URL")
def recall(address: str, cutoffs: tuple[int, ...], limit: int | None, **given: Any) -> None:
    """Measure how often a search finds gold passages.

    any-gold@k: any of them is among the first k; all-gold@k: all are. Prints JSON with a 95 % interval
    over questions. The `metadata.gold_ids` of each question name the gold passages.

    \b
      reasonrag index recall indexes/mine --dataset dev.jsonl --k 5,10
      reasonrag index recall http://127.0.0.1:8000 --dataset dev.jsonl
    """
    import structlog

    from reasonrag.commands.console import log_plainly
    from reasonrag.core import event_loop
    from reasonrag.core.bootstrap import intervals
    from reasonrag.core.config import load_config
    from reasonrag.pipeline.parts import open_questions
    from reasonrag.retrieval.measure import gold_recall, with_gold_ids
    from reasonrag.retrieval.remote import RemoteRetriever
    from reasonrag.storage.questions import sample_questions

    log_plainly()
    if min(cutoffs) < 1 or max(cutoffs) > _MOST_PASSAGES:
        raise ConfigError(f"--k takes numbers from 1 to {_MOST_PASSAGES}, for example 5,10")
    sample = {f"questions.{name}": given.pop(name) for name in ("dataset", "split")}
    loaded = open_questions(load_config(overrides=sample))
    questions = with_gold_ids(loaded)
    retriever: Retriever
    if re.match("https?://", address, re.IGNORECASE):
        if given.pop("trust_remote_code") or given_settings(given):
            raise ConfigError("a server decides itself how it searches; omit the options of the index")
        retriever = RemoteRetriever(address)
    else:
        retriever = _open_index(Path(address), **given)
    measured = sample_questions(questions, limit)

    # The event loop serves remote retrievers, and the retriever is closed on the same one.
    async def measure() -> dict[str, list[float]]:
        async with aclosing(retriever):
            return await gold_recall(retriever, measured, cutoffs)

    metrics: dict[str, Any] = {"questions": len(measured), "without_gold_ids": len(loaded) - len(questions)}
    columns = event_loop.run(measure())
    if not any(columns[f"any_gold@{max(cutoffs)}"]):
        structlog.get_logger().warning("no gold passage was found; are metadata.gold_ids ids of this index?")
    for name, interval in intervals(columns, seed=0).items():
        if interval is not None:
            metrics[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    print(json.dumps(metrics, indent=2))


def _open_index(folder: Path, *, trust_remote_code: bool, **given: Any) -> Retriever:
    """Open an index as the options of `_open_options` say."""
    from reasonrag.core.config import RetrievalConfig
    from reasonrag.core.settings import validate
    from reasonrag.retrieval.open import open_index

    config = validate(RetrievalConfig, {**given_settings(given), "index": str(folder)})
    return open_index(config, trust_remote_code=trust_remote_code)
