"""Export a run's pairs for LLaMA-Factory: ShareGPT preference files and the `dataset_info.json` that describes them.

The layout is documented in `data/README.md` of hiyouga/LLaMA-Factory, "Sharegpt Format", "Preference Dataset". Its
loader only warns about rows whose turns are not user, assistant, ..., user, and skips them, so such rows are refused
here. It ends every completion with an end-of-turn token, even if a stop string or the length limit ended it; if that
matters, train with `reasonrag dpo train`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reasonrag.dpo.preferences import Unusable
from reasonrag.publish.exchange.base import output, read_pairs, write_json_lines
from reasonrag.storage.files import write_json
from reasonrag.storage.parquet import Row
from reasonrag.storage.records import RowProblems

INFO = "dataset_info.json"

_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_COLUMNS = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"}


def export(run: Path, out: Path) -> dict[str, int]:
    """Write one file per split, and `dataset_info.json` with the data sets `reasonrag_train` and `reasonrag_test`.

    Use it with `dataset_dir: OUT`, `dataset: reasonrag_train`, `eval_dataset: reasonrag_test`.

    Returns:
        Rows by split.

    Raises:
        RunError: see `base.read_pairs` and `base.output`.
        DataError: see `base.read_pairs`; or the layout cannot hold the prompts.
    """
    pairs = read_pairs(run)
    with output(out, "llamafactory-export.json", "train.jsonl", "test.jsonl", INFO) as counts:
        described = {}
        for split, rows in pairs.items():
            file = f"{split}.jsonl"
            counts[split] = write_json_lines(out / file, _sharegpt_rows(rows, f"{run}, {split} pairs"))
            described[f"reasonrag_{split}"] = description(file)
        write_json(out / INFO, described)
    return counts


def description(file_name: str) -> dict[str, Any]:
    """Return the entry of `dataset_info.json` for a file of preferences, with the default tags written out."""
    return {
        "file_name": file_name,
        "formatting": "sharegpt",
        "ranking": True,
        "columns": _COLUMNS,
        "tags": _TAGS,
    }


def sharegpt(pair: Row) -> Row:
    """Return a row of `tables.pair_schema` in ShareGPT's layout; `system` is "" if the prompt has none.

    Raises:
        Unusable: the turns do not alternate, or a completion is not one message of the assistant.
    """
    prompt = list(pair["prompt"])
    system = prompt.pop(0)["content"] if prompt and prompt[0]["role"] == "system" else ""
    roles = [message["role"] for message in prompt]
    if len(roles) % 2 == 0 or roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise Unusable("after a system message, turns do not go user, assistant, ..., user")
    for side in ("chosen", "rejected"):
        if [message["role"] for message in pair[side]] != ["assistant"]:
            raise Unusable(f"{side} is not one message of the assistant")
    return {
        # Not None: a column of nulls in the first rows would get the type null.
        "system": system,
        "conversations": [_tagged(message) for message in prompt],
        "chosen": _tagged(pair["chosen"][0]),
        "rejected": _tagged(pair["rejected"][0]),
    }


def _sharegpt_rows(rows: Iterable[Row], source: str) -> Iterator[Row]:
    problems = RowProblems(source)
    for number, row in enumerate(rows, 1):
        try:
            yield sharegpt(row)
        except Unusable as reason:
            problems.add(str(reason), number)
    problems.check("LLaMA-Factory cannot read these; export with jsonl instead.")


def _tagged(message: Row) -> Row:
    return {"from": _TAGS[f"{message['role']}_tag"], "value": message["content"]}
