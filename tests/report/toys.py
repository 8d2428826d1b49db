"""Node rows, and runs that hold nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.storage.parquet import ShardWriter
from reasonrag.storage.tables import tree_schema

Row = dict[str, Any]

COLUMNS = tree_schema().names  # loads pyarrow here, not in the first, timed example of a property


def rows_of(parents: Sequence[int], question_id: str = "q1", dataset: str = "toy", **last: Any) -> list[Row]:
    """A question's rows with these parents, all of them searches; `last` is what is special about the last node."""
    rows: list[Row] = []
    for node, parent in enumerate(parents):
        rows.append(
            dict.fromkeys(COLUMNS)
            | {
                "dataset": dataset,
                "question_id": question_id,
                "question": "Who directed Jaws?",
                "golden_answers": ["Steven Spielberg", "Spielberg"],
                "node_id": node,
                "parent_id": parent,
                "depth": 0 if parent < 0 else rows[parent]["depth"] + 1,
                "origin": "expansion" if node else "root",
                "stage": "grounding" if node else "reasoning",
                "action": "query" if node else "",
                "content": f"query {node}" if node else "",
                "prompt": [],
                "prefix": "",
                "stop": [],
                "text": f"<query>query {node}</query>" if node else "",
                "passages": [{"id": f"p{node}", "contents": "Jaws\nJaws is a film.", "score": 1.0}],
                "visits": 1,
                "valued": 1,
                "value": 0.1,
            }
        )
    rows[-1] |= last
    return rows


def answer(content: str, *, spre: float) -> Row:
    """What is special about a node that answers."""
    return {"action": "answer", "stage": "terminal", "stop_reason": "answered", "content": content} | {
        "spre": spre,
        "f1": spre,
        "em": float(spre == 1),
    }


def write_run(folder: Path, *questions: list[Row], shard_rows: int = 1000) -> Path:
    """A run's folder with these trees."""
    writer = ShardWriter(folder / "trees", "nodes", tree_schema(), shard_rows=shard_rows, keep_empty=True)
    for rows in questions:
        for row in rows:
            writer.add(row)
    writer.close()
    return folder
