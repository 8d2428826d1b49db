"""Export a finished run: pairs for TRL and LLaMA-Factory, questions for online RL.

TRL: pairs of a growing turn as texts. Given as messages, TRL's `add_generation_prompt` closes the open turn and begins
another one. TRL ends every text with the tokenizer's EOS token, even if a stop string or the length limit ended it.

LLaMA-Factory: the layout is documented in `data/README.md` of hiyouga/LLaMA-Factory, "Sharegpt Format", "Preference
Dataset". Its loader only warns about rows with other turns than user, assistant, ..., user, and skips them, so such
rows are refused here. It ends every completion with an end-of-turn token; if that matters, train with
`reasonrag dpo train`.

verl and Search-R1: the fields are those of Search-R1's `scripts/data_process`: `data_source` (selects the reward),
`prompt`, `ability`, `reward_model` with the golden answers as its target, and `extra_info`. Trainers group the samples
of a question by `extra_info.index`, so it is unique across data sets and splits.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import quotable, valid_unicode
from reasonrag.core.types import Message, Prompt, Question
from reasonrag.dpo.pairs import in_test_split, repeated_questions
from reasonrag.dpo.preferences import StepSides, Unusable, read_row
from reasonrag.formats.base import PromptSet
from reasonrag.formats.stream import SearchR1Format
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import adapter_base
from reasonrag.storage.files import write_json, writing
from reasonrag.storage.folder import Folder, read_run
from reasonrag.storage.parquet import Row, read_shards, shard_paths, write_parquet
from reasonrag.storage.questions import KNOWN
from reasonrag.storage.records import RowProblems
from reasonrag.storage.tables import Described, message, pair_schema, tree_schema
from reasonrag.training.model import acting_policy, model_path, tokenizer_path

Log = Callable[[str], object]

_INFO = "dataset_info.json"
# LLaMA-Factory's names; the defaults are written out.
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_COLUMNS = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"}
# Columns of a pair that are exported with its texts.
_PROVENANCE = ("pair_id", "dataset", "question_id", "depth", "chosen_reward", "rejected_reward", "margin")

_ground_truth = Described("The texts that a rule compares an answer with.", ("target", ["string"], "golden answers"))
_identity = Described(
    "Which question a row is.",
    ("split", "string", "train | test"),
    ("index", "int64", "unique"),
    ("dataset", "string", "name of the data set or file"),
    ("question_id", "string", "the question's id there"),
    ("question", "string", "its text"),
)
verl_schema = Described(
    "One question.",
    ("data_source", "string", "name by which the trainer chooses its reward"),
    ("prompt", [message], "the question in Search-R1's format"),
    ("ability", "string", "fact-reasoning"),
    ("reward_model", Described("", ("style", "string", "rule"), ("ground_truth", _ground_truth, "")), "golden answers"),
    ("extra_info", _identity, "identity"),
)


@contextlib.contextmanager
def output(out: Path, marker: str, *names: str) -> Iterator[dict[str, int]]:
    """Open a folder that only this process writes to; the yielded counts are written to `marker` at the end.

    Files of an earlier run under `names` are removed first: half of an old set with half of a new one would look
    complete.

    Args:
        out: a new folder, or one with `marker`, which is written first. RunError if it holds other files or is in use.
        marker: name of the file that names the folder's exporter.
        names: patterns of all other files that will be written.
    """
    begun = [path.name for path in out.glob(f".{marker}.*")]
    with Folder(out, marker, marker, ignore=begun).locked():
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


# Pairs


@contextlib.contextmanager
def _exported_pairs(run: Path, out: Path, tool: str, convert: Callable[[Row], Row]) -> Iterator[dict[str, int]]:
    """Write `train.jsonl` and, if questions are held out, `test.jsonl`; yield the rows by split.

    Raises:
        RunError: the run is not finished, or the folder cannot be written.
        DataError: the run has no pairs, or pairs of whole trajectories; or `convert` raised `Unusable` for some.
    """
    config, summary = read_run(run)
    if config.pairs.level == "trajectory":
        raise DataError(
            f"{run}: its pairs are whole trajectories, of several prompts each, and one pair of messages cannot hold "
            f"them; derive pairs of steps with `reasonrag pairs {run}`"
        )
    splits = [split for split in ("train", "test") if (summary.get("pairs") or {}).get(split)]
    if not splits:
        raise DataError(f"{run}: no pairs to export; build trees of more questions, or lower pairs.min_margin")

    def converted(split: str) -> Iterator[Row]:
        problems = RowProblems(f"{run}, {split} pairs")
        for number, row in enumerate(read_shards(run / "pairs", split, pair_schema()), 1):
            try:
                yield convert(row)
            except Unusable as reason:
                problems.add(str(reason), number)
        problems.check(f"{tool} cannot read these; export with --to trl or --to jsonl instead.")

    with output(out, f"{tool}-export.json", "train.jsonl", "test.jsonl", _INFO) as counts:
        for split in splits:
            counts[split] = write_json_lines(out / f"{split}.jsonl", converted(split))
        yield counts


def export_json_lines(run: Path, out: Path) -> dict[str, int]:
    """Write a run's pairs with the columns of the tables; return the rows by split."""
    with _exported_pairs(run, out, "jsonl", dict) as counts:
        return counts


def export_trl(run: Path, out: Path, *, tokenizer: str | None = None) -> dict[str, int]:
    """Write a run's pairs as texts for `trl dpo`, rendered with a chat template; return the rows by split.

    A step that ended its turn ends with the policy's own end-of-turn token. `tokenizer` is the folder or Hub name of a
    model with the policy's chat template; None: the policy of the run.
    """
    with _exported_pairs(run, out, "trl", partial(_as_texts, _chat_template(run, tokenizer))) as counts:
        return counts


def _as_texts(chat: ChatTemplate, row: Row) -> Row:
    sides = read_row(str(row["pair_id"]), row).sides
    assert isinstance(sides, StepSides)  # pairs of a run name the ends of their steps
    texts = {"prompt": _prompt_text(sides.chosen[0].prompt, chat)}
    for name, (step,) in (("chosen", sides.chosen), ("rejected", sides.rejected)):
        end_token = str(chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn)) if step.end == "turn" else ""
        texts[name] = step.text + end_token
    return texts | {name: row.get(name) for name in _PROVENANCE}


def _prompt_text(prompt: Prompt, chat: ChatTemplate) -> str:
    """Return the text of a prompt, without the start token if the tokenizer writes one by itself."""
    text, start = chat.text(prompt), chat.tokenizer.bos_token_id
    adds_start = start is not None and chat.tokenizer("")["input_ids"][:1] == [start]
    return text.removeprefix(chat.tokenizer.bos_token) if adds_start else text


def _chat_template(run: Path, tokenizer: str | None) -> ChatTemplate:
    config, _ = read_run(run)
    model = tokenizer or acting_policy(config.policy)[0]
    if model is None:
        raise ConfigError(
            f"{run} does not name a model with a chat template for its prompts; add --tokenizer with a folder or a "
            "Hub id"
        )
    path = model_path(model)
    path = tokenizer_path(path, adapter_base(Path(path)) or path)
    return ChatTemplate.load(path, template=config.policy.chat_template)


def export_llamafactory(run: Path, out: Path) -> dict[str, int]:
    """Write one file per split, and `dataset_info.json` with the data sets `reasonrag_train` and `reasonrag_test`.

    Use it with `dataset_dir: OUT`, `dataset: reasonrag_train`, `eval_dataset: reasonrag_test`.
    """
    with _exported_pairs(run, out, "llamafactory", sharegpt) as counts:
        write_json(out / _INFO, {f"reasonrag_{split}": description(f"{split}.jsonl") for split in counts})
    return counts


def description(file_name: str) -> dict[str, Any]:
    """Return the entry of `dataset_info.json` for a file of preferences."""
    return {"file_name": file_name, "formatting": "sharegpt", "ranking": True, "columns": _COLUMNS, "tags": _TAGS}


def sharegpt(pair: Row) -> Row:
    """Return a row of `tables.pair_schema` in ShareGPT's layout, with its origin; raise Unusable if it does not fit."""
    prompt = list(pair["prompt"])
    # Not None: a column of nulls in the first rows would get the type null.
    system = prompt.pop(0)["content"] if prompt and prompt[0]["role"] == "system" else ""
    roles = [message["role"] for message in prompt]
    if len(roles) % 2 == 0 or roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise Unusable("after a system message, turns do not go user, assistant, ..., user")
    for side in ("chosen", "rejected"):
        if [message["role"] for message in pair[side]] != ["assistant"]:
            raise Unusable(f"{side} is not one message of the assistant")

    def tagged(message: Row) -> Row:
        return {"from": _TAGS[f"{message['role']}_tag"], "value": message["content"]}

    row = {"system": system, "conversations": list(map(tagged, prompt))}
    row |= {side: tagged(pair[side][0]) for side in ("chosen", "rejected")}
    return row | {name: pair.get(name) for name in _PROVENANCE}


# Questions


def export_verl(run: Path, out: Path, *, prompts: str | None = None, log: Log = print) -> dict[str, int]:
    """Write the questions of a run's trees, with the same held-out questions as its pairs; return them by split.

    verl scores known data sets itself, under names such as `searchR1_hotpotqa`; `log` receives the names of others,
    which need `contrib/verl_reward.py`. `prompts` is the prompt set with the instruction of Search-R1's format.
    """
    format = SearchR1Format(PromptSet.find(prompts or "default"))

    def as_asked(question: Question) -> tuple[str, Sequence[Message]]:
        name = f"searchR1_{question.dataset}" if question.dataset in KNOWN else question.dataset
        return name, format.prompt(question, ()).messages

    advice = "train with reward.custom_reward_function.path=contrib/verl_reward.py of reasonrag's repository"
    return _export_questions(run, out, "verl", as_asked, lambda names: log(f"verl has no scorer for {names}: {advice}"))


def export_search_r1(run: Path, out: Path, *, prompts: str | None = None, log: Log = print) -> dict[str, int]:
    """Write the questions of a run's trees as Search-R1's own scripts do: its names, and one message of the user.

    The message is the instruction of the prompt set, then `Question: ...`. Published checkpoints were trained with
    sentences that are not shipped; a prompt set with these in `search_r1/instruction.txt` gives the very same message.
    Search-R1 scores a data set by its name and knows seven, all by exact match: others are named `nq`.
    """
    instruction = SearchR1Format(PromptSet.find(prompts or "default")).texts["instruction"]
    if not re.search("(?s)<answer>.*?</answer>", instruction):
        raise ConfigError(
            "the instruction shows no <answer> ... </answer>: Search-R1 scores the second one of prompt and response, "
            "so every response would score 0; add an example answer to it"
        )

    def as_asked(question: Question) -> tuple[str, Sequence[Message]]:
        text = quotable(question.question)
        content = f"{instruction} Question: {text}{'' if text.endswith('?') else '?'}\n"
        return question.dataset if question.dataset in KNOWN else "nq", [Message("user", content)]

    advice = "they are named nq, and extra_info.dataset has their name"
    return _export_questions(
        run, out, "search-r1", as_asked, lambda names: log(f"Search-R1 has no scorer for {names}: {advice}")
    )


def _export_questions(
    run: Path,
    out: Path,
    tool: str,
    as_asked: Callable[[Question], tuple[str, Sequence[Message]]],
    on_unknown: Callable[[str], object],
) -> dict[str, int]:
    """Write the questions of a run's trees; `as_asked` returns the `data_source` and the prompt of one.

    `on_unknown` receives the names of data sets for which the tool has no scorer.
    """
    config, _ = read_run(run)
    columns = ("dataset", "question_id", "question", "golden_answers", "parent_id")
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    splits: dict[str, list[Question]] = {"train": [], "test": []}
    for node in read_shards(run / "trees", "nodes", tree_schema(), columns=columns):
        if node["parent_id"] < 0:
            key = (node["dataset"], node["question_id"])
            held_out = in_test_split(key, config.pairs.test_share, repeated)
            question = Question(node["question_id"], node["question"], tuple(node["golden_answers"]), node["dataset"])
            splits["test" if held_out else "train"].append(question)
    if not any(splits.values()):
        raise DataError(f"{run}: no question has a tree; run build-tree again")
    index = 0
    with output(out, f"{tool}-export.json", "train.parquet", "test.parquet") as counts:
        for split, questions in splits.items():
            rows = []
            for question in questions:
                rows.append(verl_row(question, *as_asked(question), split, index))
                index += 1
            if rows:
                counts[split] = len(rows)
                write_parquet(out / f"{split}.parquet", rows, verl_schema())
    datasets = {question.dataset for questions in splits.values() for question in questions}
    if unknown := sorted(datasets - KNOWN.keys()):
        on_unknown(", ".join(unknown))
    return counts


def verl_row(question: Question, source: str, prompt: Sequence[Message], split: str, index: int) -> Row:
    """Return a row of `verl_schema`."""
    return {
        "data_source": source,
        "prompt": [{"role": message.role, "content": message.content} for message in prompt],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
        "extra_info": {
            "split": split,
            "index": index,
            "dataset": question.dataset,
            "question_id": question.id,
            "question": question.question,
        },
    }


# Called with the run and the folder; exporters that render prompts take `tokenizer`, those of questions `prompts`.
EXPORTERS: dict[str, Callable[..., dict[str, int]]] = {
    "trl": export_trl,
    "llamafactory": export_llamafactory,
    "verl": export_verl,
    "search-r1": export_search_r1,
    "jsonl": export_json_lines,
}
