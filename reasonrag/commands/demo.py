"""`demo`: the invented world as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import out, settings


@click.group()
def demo() -> None:
    """The demo world: an invented encyclopedia and its questions.

    \b
      reasonrag demo world --out world
    """


@demo.command("world")
@out("A folder for questions and corpus.")
@settings("Config", "questions.world_seed", show_keys=False)
def demo_world(out: Path, world_seed: int | None) -> None:
    """Write the world as FlashRAG files. They hold train, dev and test questions, and the corpus.

    A third of the training questions of `train-famous` need no search.

    \b
      reasonrag demo world --out world
    """
    from reasonrag.demo.world import DEMO_SPLITS, demo_corpus, demo_questions
    from reasonrag.storage.files import write_text
    from reasonrag.storage.folder import Folder

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_text(out / f"{name}.jsonl", "".join(lines))

    world_seed = world_seed or 0
    Folder(out, "demo world", "corpus.jsonl").claim()
    for split in DEMO_SPLITS:
        rows = [
            {"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers), "metadata": q.metadata}
            for q in demo_questions(split, seed=world_seed)
        ]
        write(split, rows)
    write("corpus", [{"id": p.id, "contents": p.contents} for p in demo_corpus(world_seed)])
    print(f"world: {out}")
