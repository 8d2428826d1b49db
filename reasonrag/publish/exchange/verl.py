"""Export questions as the Parquet rows that verl and Search-R1 read for reinforcement learning.

The fields are those of Search-R1's `scripts/data_process`: `data_source` (selects the reward), `prompt`, `ability`,
`reward_model` with the golden answers as its target, and `extra_info`. Trainers group the samples of a question by
`extra_info.index`, so it is unique across data sets and splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from reasonrag.core.errors import DataError
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import in_test_split
from reasonrag.formats.search_r1 import SearchR1Format
from reasonrag.publish.exchange.base import output
from reasonrag.storage.parquet import Row, read_shards, write_parquet
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import tree_schema

if TYPE_CHECKING:
    import pyarrow as pa


@cache
def verl_schema() -> pa.Schema:
    """Return the schema, one row per question."""
    import pyarrow as pa

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    ground_truth = pa.struct([("target", pa.list_(pa.string()))])
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", ground_truth)])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ]
    )


def export(run: Path, out: Path) -> dict[str, int]:
    """Write the questions of a run's trees, with the same held-out questions as its pairs.

    Returns:
        Questions by split.

    Raises:
        RunError: the run is not finished; see also `base.output`.
        DataError: the run has no trees.
    """
    config, _ = read_run(run)
    splits: dict[str, list[Question]] = {"train": [], "test": []}
    for question in _questions(run):
        held_out = in_test_split(question.dataset, question.id, config.pairs.test_share)
        splits["test" if held_out else "train"].append(question)
    if not any(splits.values()):
        raise DataError(f"{run}: no question has a tree; run build-tree again")
    return export_questions(splits, out)


def export_questions(splits: Mapping[str, Iterable[Question]], out: Path) -> dict[str, int]:
    """Write questions of one or several data sets, asked in Search-R1's format, to `out/SPLIT.parquet`.

    Returns:
        Questions by split; a split without any has no file.

    Raises:
        RunError: see `base.output`.
    """
    format = SearchR1Format()
    index = 0
    with output(out, "verl-export.json", "train.parquet", "test.parquet") as counts:
        for split, questions in splits.items():
            rows = [_row(question, format, split, number) for number, question in enumerate(questions, index)]
            index += len(rows)
            if rows:
                counts[split] = len(rows)
                write_parquet(out / f"{split}.parquet", rows, verl_schema())
    return counts


def _questions(run: Path) -> Iterator[Question]:
    for node in read_shards(run / "trees", "nodes", tree_schema()):
        if node["parent_id"] < 0:
            golden_answers = tuple(node["golden_answers"])
            yield Question(node["question_id"], node["question"], golden_answers, dataset=node["dataset"])


def _row(question: Question, format: SearchR1Format, split: str, index: int) -> Row:
    messages = format.prompt(question, ()).messages
    return {
        "data_source": question.dataset,
        "prompt": [{"role": message.role, "content": message.content} for message in messages],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
        "extra_info": {"split": split, "index": index},
    }
