"""Export a finished run: its pairs as JSON Lines or for LLaMA-Factory, its questions for verl and Search-R1.

LLaMA-Factory: the layout is documented in `data/README.md` of hiyouga/LLaMA-Factory, "Sharegpt Format", "Preference
Dataset". Its loader only warns about rows whose turns are not user, assistant, ..., user, and skips them, so such rows
are refused here. It ends every completion with an end-of-turn token, even if a stop string or the length limit ended
it; if that matters, train with `reasonrag dpo train`.

verl: the fields are those of Search-R1's `scripts/data_process`: `data_source` (selects the reward), `prompt`,
`ability`, `reward_model` with the golden answers as its target, and `extra_info`. Trainers group the samples of a
question by `extra_info.index`, so it is unique across data sets and splits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import in_test_split
from reasonrag.dpo.preferences import Unusable
from reasonrag.formats.search_r1 import SearchR1Format
from reasonrag.storage.files import claim_folder, lock, write_json, writing
from reasonrag.storage.parquet import Row, read_shards, write_parquet
from reasonrag.storage.records import RowProblems
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import Described, message, pair_schema, tree_schema

_INFO = "dataset_info.json"
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_COLUMNS = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"}

_ground_truth = Described("What a rule compares an answer with.", ("target", ["string"], "golden answers"))
verl_schema = Described(
    "One question.",
    ("data_source", "string", "data set"),
    ("prompt", [message], "the question in Search-R1's format"),
    ("ability", "string", "fact-reasoning"),
    ("reward_model", Described("", ("style", "string", "rule"), ("ground_truth", _ground_truth, "")), "golden answers"),
    ("extra_info", Described("", ("split", "string", "train | test"), ("index", "int64", "unique")), "identity"),
)


def read_pairs(run: Path) -> dict[str, Iterator[Row]]:
    """Return a run's rows of `tables.pair_schema` by split, without splits that are empty.

    Raises:
        RunError: the run is not finished.
        DataError: the run has no pairs, or pairs of whole trajectories.
    """
    config, summary = read_run(run)
    if config.pairs.level == "trajectory":
        raise DataError(
            f"{run}: its pairs are whole trajectories, of several prompts each, and one pair of messages cannot hold "
            f"them; derive pairs of steps with `reasonrag pairs {run}`"
        )
    counted = summary.get("pairs") or {}
    pairs_by_split = {}
    for split in ("train", "test"):
        if counted.get(split):
            pairs_by_split[split] = read_shards(run / "pairs", split, pair_schema())
    if not pairs_by_split:
        raise DataError(f"{run}: no pairs to export; build trees of more questions, or lower pairs.min_margin")
    return pairs_by_split


@contextlib.contextmanager
def output(out: Path, marker: str, *names: str) -> Iterator[dict[str, int]]:
    """Open a folder that only this process writes to; the yielded counts are written to `marker` at the end.

    Files of an earlier run under `names` are removed first: half of an old set beside half of a new one would look
    complete.

    Args:
        out: a new folder, or one with `marker`, which is written first.
        marker: name of the file that says which exporter owns the folder.
        names: patterns of all other files that will be written.

    Raises:
        RunError: the folder holds other files, is in use, or cannot be written.
    """
    begun = [path.name for path in out.glob(f".{marker}.*")]
    claim_folder(out, marker, already_ours=(out / marker).exists(), ignore=begun)
    with lock(out / ".lock"):
        write_json(out / marker, {})
        for pattern in (f".{marker}.*", *names, *(f".{name}*" for name in names)):
            for old in out.glob(pattern):
                old.unlink()
        counts: dict[str, int] = {}
        yield counts
        write_json(out / marker, counts)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line, atomically; return how many. Without rows no file is written.

    Values that JSON cannot hold, such as dates of a foreign table, are written as text.
    """
    remaining = iter(rows)
    first = next(remaining, None)
    if first is None:
        return 0
    count = 0
    with writing(path) as file:
        for row in chain([first], remaining):
            count += 1
            line = json.dumps(row, ensure_ascii=False, default=str)
            file.write(valid_unicode(line).encode() + b"\n")
    return count


def export_json_lines(run: Path, out: Path) -> dict[str, int]:
    """Write a run's pairs as `train.jsonl` and, if questions are held out, `test.jsonl`, columns as in the tables.

    Returns:
        Rows by split.

    Raises:
        RunError, DataError: see `read_pairs` and `output`.
    """
    pairs = read_pairs(run)
    with output(out, "jsonl-export.json", "train.jsonl", "test.jsonl") as counts:
        for split, rows in pairs.items():
            counts[split] = write_json_lines(out / f"{split}.jsonl", rows)
    return counts


def export_llamafactory(run: Path, out: Path) -> dict[str, int]:
    """Write one file per split, and `dataset_info.json` with the data sets `reasonrag_train` and `reasonrag_test`.

    Use it with `dataset_dir: OUT`, `dataset: reasonrag_train`, `eval_dataset: reasonrag_test`.

    Returns:
        Rows by split.

    Raises:
        RunError: see `read_pairs` and `output`.
        DataError: see `read_pairs`; or the layout cannot hold the prompts.
    """
    pairs = read_pairs(run)
    with output(out, "llamafactory-export.json", "train.jsonl", "test.jsonl", _INFO) as counts:
        described = {}
        for split, rows in pairs.items():
            file = f"{split}.jsonl"
            counts[split] = write_json_lines(out / file, _sharegpt_rows(rows, f"{run}, {split} pairs"))
            described[f"reasonrag_{split}"] = description(file)
        write_json(out / _INFO, described)
    return counts


def description(file_name: str) -> dict[str, Any]:
    """Return the entry of `dataset_info.json` for a file of preferences, with the default tags written out."""
    layout = {"formatting": "sharegpt", "ranking": True, "columns": _COLUMNS, "tags": _TAGS}
    return {"file_name": file_name, **layout}


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


def export_verl(run: Path, out: Path) -> dict[str, int]:
    """Write the questions of a run's trees, with the same held-out questions as its pairs.

    Returns:
        Questions by split.

    Raises:
        RunError: the run is not finished; see also `output`.
        DataError: the run has no trees.
    """
    config, _ = read_run(run)
    splits: dict[str, list[Question]] = {"train": [], "test": []}
    columns = ("dataset", "question_id", "question", "golden_answers", "parent_id")
    for node in read_shards(run / "trees", "nodes", tree_schema(), columns=columns):
        if node["parent_id"] < 0:
            held_out = in_test_split(node["dataset"], node["question_id"], config.pairs.test_share)
            golden_answers = tuple(node["golden_answers"])
            question = Question(node["question_id"], node["question"], golden_answers, dataset=node["dataset"])
            splits["test" if held_out else "train"].append(question)
    if not any(splits.values()):
        raise DataError(f"{run}: no question has a tree; run build-tree again")
    return export_questions(splits, out)


def export_questions(splits: Mapping[str, Iterable[Question]], out: Path) -> dict[str, int]:
    """Write questions of one or several data sets, asked in Search-R1's format, to `out/SPLIT.parquet`.

    Returns:
        Questions by split; a split without any has no file.

    Raises:
        RunError: see `output`.
    """
    format = SearchR1Format()
    index = 0
    with output(out, "verl-export.json", "train.parquet", "test.parquet") as counts:
        for split, questions in splits.items():
            rows = [_verl_row(question, format, split, number) for number, question in enumerate(questions, index)]
            index += len(rows)
            if rows:
                counts[split] = len(rows)
                write_parquet(out / f"{split}.parquet", rows, verl_schema())
    return counts


def _verl_row(question: Question, format: SearchR1Format, split: str, index: int) -> Row:
    messages = format.prompt(question, ()).messages
    return {
        "data_source": question.dataset,
        "prompt": [{"role": message.role, "content": message.content} for message in messages],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
        "extra_info": {"split": split, "index": index},
    }
