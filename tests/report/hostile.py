"""A run folder with one tree of any size, written with the product's own tables, whose texts attack their reader."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from reasonrag.core.config import load_config
from reasonrag.core.settings import dump
from reasonrag.dpo.pairs import PairRules, derive_pairs, derive_trajectory_pairs
from reasonrag.storage.files import write_text
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema

SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&lt;"
TERMINAL = "\x1b[31mred\x1b]8;;http://evil.example/\x07link\x1b]8;;\x07"
BIDI = "abc\u202egnp.exe\u2066\u200b\u2028"
HOSTILE = f"{SCRIPT}{TERMINAL}{BIDI}{{{{ 7*7 }}}}"

Row = dict[str, Any]


def rows(nodes: int, *, question_id: str = "q0", dataset: str = "d", text: str = HOSTILE) -> list[Row]:
    """Rows of `tables.tree_schema` of a tree with two children a node: every kind of step, some without a reward."""
    depths = [0]
    made: list[Row] = []
    for node in range(nodes):
        parent = (node - 1) // 2
        if node:
            depths.append(depths[parent] + 1)
        leaf = 2 * node + 1 >= nodes
        action = (
            "" if not node else "malformed" if node % 7 == 3 else "answer" if leaf else ("query", "evidence")[node % 2]
        )
        made.append(
            {
                "dataset": dataset,
                "question_id": question_id,
                "question": f"Who? {text}",
                "golden_answers": [text, "b"],
                "node_id": node,
                "parent_id": parent if node else -1,
                "depth": depths[node],
                "origin": "expansion" if node else "root",
                "stage": "terminal" if leaf else "reasoning",
                "action": action,
                "content": f"{text} content {node}" if node else "",
                "stop_reason": "answered" if leaf and action == "answer" else None,
                "prompt": [{"role": "system", "content": text}, {"role": "user", "content": text}] if node else [],
                "prefix": text,
                "stop": ["</answer>"],
                "text": f"<think>{text} text {node}</think>" if node else "",
                "finish_reason": "stop",
                "prompt_tokens": 10,
                "completion_tokens": node,
                "passages": [{"id": text, "contents": f"Title\n{text}", "score": 1.5}] if action == "query" else [],
                "visits": nodes - node,
                "valued": nodes - node,
                "value": 0.5,
                "spre": None if action == "malformed" else 1 / (node + 1),
                "f1": 1 / (1 + node % 3) if leaf and action == "answer" else None,
                "em": 1.0 if leaf and action == "answer" else None,
            }
        )
    return made


def write_run(
    folder: Path, trees: Sequence[list[Row]], *, text: str = HOSTILE, level: Literal["step", "trajectory"] = "step"
) -> Path:
    """A finished run of these trees and the pairs of their siblings, or of whole trajectories."""
    for name in ("trees", "pairs"):
        (folder / name).mkdir(parents=True)
    nodes = [row for tree in trees for row in tree]
    derive = (
        functools.partial(derive_pairs, rules=PairRules(rule="siblings"))
        if level == "step"
        else derive_trajectory_pairs
    )
    schema = pair_schema() if level == "step" else trajectory_pair_schema()
    pairs = list(derive(nodes, policy=text, config_hash="0"))
    write_parquet(folder / "trees" / "nodes-00000-of-00001.parquet", nodes, tree_schema())
    if pairs:
        write_parquet(folder / "pairs" / "train-00000-of-00001.parquet", pairs, schema)
    write_text(folder / "config.yaml", dump(load_config(overrides={"questions.dataset": text})))
    write_text(folder / "run.json", json_of(trees, pairs, text, level))
    return folder


def json_of(trees: Sequence[list[Row]], pairs: Sequence[Row], text: str, level: str) -> str:
    """`run.json`, as far as pages read it."""
    summary = {
        "questions": {"total": len(trees) + 1, "finished": len(trees), "failed": {text: 1}},
        "trees": {"nodes": sum(map(len, trees)), "malformed": {text: 2}, "by_action": {}, "by_stop_reason": {}}
        | {"by_dataset": {text: len(trees)}, "unreadable": {text: text}, "distributions": {text: None}},
        "pairs": {"total": len(pairs), "train": len(pairs), "test": 0, "level": level}
        | {"by_dataset": {text: len(trees)}, "by_type": {f"{text} > {text}": len(pairs)} if level == "step" else {}},
        "calls": {"policy": {"calls": 12345, "prompt_tokens": 10, "completion_tokens": 5, "cost": None}},
        "policy": text,
        "judge": None,
        "content": {"corpus": text},
        "versions": {"reasonrag": text},
    }
    return json.dumps(summary)
