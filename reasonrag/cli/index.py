"""`index`: build what is searched, serve it, examine it, measure what it finds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reasonrag import flags
from reasonrag.cli.root import cli
from reasonrag.core.settings import gather, parse_assignment, validate
from reasonrag.flags import Numbers
from reasonrag.retrieval.index.settings import IndexConfig


@cli.group()
def index() -> None:
    """Search indexes: BM25 and dense, from a corpus on disk or on the Hub.

    \b
      reasonrag index build --corpus corpus.jsonl.gz --kind bm25 --out indexes/mine
      reasonrag index serve indexes/mine
      reasonrag build-tree --dataset questions.jsonl --index indexes/mine --policy extractive --out runs/try
    """


@index.command()
@flags.INDEX
@click.option("--config", "file", type=click.Path(path_type=Path), help="YAML; flags override it.")
@click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any other setting (repeatable).")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The index folder; the same command resumes."
)
@click.option("--replace", is_flag=True, help="Take away passages of another corpus that lie there.")
def build(file: Path | None, assignments: tuple[str, ...], out: Path, replace: bool, **given: Any) -> None:
    """Build an index, or add a kind to one. Streams, within --max-memory; a killed build goes on where it was.

    \b
    Words, of your own corpus (id and contents, or id, title and text):
      reasonrag index build --corpus corpus.jsonl.gz --kind bm25 --out indexes/mine
    Vectors too, over the same passages:
      reasonrag index build --kind dense --encoder intfloat/e5-base-v2 --out indexes/mine
    Wikipedia 2018 as Search-R1 and ReasonRAG use it, in at most 32 GB:
      reasonrag index build --corpus wiki18 --kind bm25 --max-memory 32G --out indexes/wiki18
    A FAISS index that exists, such as Search-R1's, without encoding anything:
      reasonrag index build --corpus wiki18 --kind dense --encoder intfloat/e5-base-v2 --adopt e5_Flat.index \\
          --out indexes/wiki18
    A folder of texts, cut into passages of 100 words:
      reasonrag index build --corpus texts/ --chunk-words 100 --kind bm25 --out indexes/texts
    """
    from reasonrag.commands.index import build as command

    named = dict(parse_assignment(text) for text in assignments)
    config = validate(IndexConfig, gather({}, file=file, overrides=named | flags.overrides(given)))
    command(out, config, replace=replace)


@index.command()
@flags.OPEN_INDEX
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address needs --allow-remote.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--allow-remote", is_flag=True, help="Serve other machines; a token is needed then.")
@click.option("--token-env", default="REASONRAG_TOKEN", show_default=True, help="The variable that holds the token.")
@click.option("--topk", default=3, show_default=True, type=int, help="Of requests that name none.")
@click.argument("folder", type=click.Path(path_type=Path))
def serve(folder: Path, host: str, port: int, allow_remote: bool, token_env: str, topk: int, **given: Any) -> None:
    """Serve an index to others: Search-R1's POST /retrieve, /health, /metrics.

    \b
      reasonrag index serve indexes/mine --port 8000
      curl -s http://127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
          -d '{"queries": ["who directed Jaws?"], "topk": 3, "return_scores": true}'
    Both kinds at once, reordered by a cross-encoder:
      reasonrag index serve indexes/mine --kind hybrid --reranker BAAI/bge-reranker-base

    SIGTERM and Ctrl-C end it when all requests in flight are answered.
    """
    from reasonrag.commands.index import serve as command

    sys.exit(command(folder, given, host=host, port=port, allow_remote=allow_remote, token_env=token_env, top_k=topk))


@index.command()
@flags.OPEN_INDEX
@click.option("--sample", default=200, show_default=True, type=click.IntRange(1), help="Passages searched for.")
@click.option("--seed", default=0, show_default=True, help="Of the sample.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("folder", type=click.Path(path_type=Path))
def doctor(folder: Path, sample: int, seed: int, as_json: bool, **given: Any) -> None:
    """Read every byte of an index, then search in it: size, memory, speed, and whether it finds what it holds.

    \b
      reasonrag index doctor indexes/mine
    """
    from reasonrag.commands.index import doctor as command

    command(folder, given, sample=sample, seed=seed, as_json=as_json)


@index.command()
@flags.OPEN_INDEX
@click.option(
    "--questions", required=True, help="FlashRAG's file, or a known name; metadata.gold_ids says what is gold."
)
@click.option("--split", help="Split of a named data set.")
@click.option("--limit", type=click.IntRange(1), help="A seeded sample of this many questions.")
@click.option("--k", "cuts", type=Numbers(int), default="5,10", show_default=True, help="One or several cuts.")
@click.argument("folder", metavar="DIR|URL")
def recall(
    folder: str, questions: str, split: str | None, limit: int | None, cuts: tuple[int, ...], **given: Any
) -> None:
    """How often any, and all, of the gold passages of a question are among the first k: JSON, with intervals.

    \b
      reasonrag index recall indexes/mine --questions dev.jsonl --k 5,10
      reasonrag index recall http://127.0.0.1:8000 --questions dev.jsonl
    """
    from reasonrag.commands.index import recall as command

    command(folder, given, questions=questions, split=split, limit=limit, cuts=cuts)
