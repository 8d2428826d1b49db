"""Export a finished run: pairs for TRL and LLaMA-Factory, questions for online RL.

TRL: pairs of a growing turn as texts. Given as messages, TRL's `add_generation_prompt`
closes the open turn and begins another one. TRL ends every text with the tokenizer's
EOS token, even if a stop string or the length limit ended it.

LLaMA-Factory: the layout is documented in `data/README.md` of hiyouga/LLaMA-Factory, "Sharegpt Format",
"Preference Dataset". Its loader only warns about rows with other turns than user, assistant, ..., user,
and skips them, so such rows are refused here. It ends every completion with an end-of-turn token; if that
matters, train with `reasonrag dpo train`.

verl and Search-R1: the fields are those of Search-R1's `scripts/data_process`:
`data_source` (selects the reward), `prompt`, `ability`, `reward_model` with the
golden answers as its target, and `extra_info`. Trainers group the samples of a
question by `extra_info.index`, so it is unique across data sets and splits.
SkyRL reads the same answers as `reward_spec`, and `env_class`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import quotable, valid_unicode
from reasonrag.core.types import Message, Question
from reasonrag.dpo.pairs import in_test_split, repeated_questions
from reasonrag.dpo.preferences import StepSides, Unusable, read_row
from reasonrag.formats.base import PromptSet
from reasonrag.formats.stream import SearchR1Format
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.model_folder import adapter_base
from reasonrag.report.trees import read_trees
from reasonrag.storage.files import reading, write_json, writing
from reasonrag.storage.folder import Folder, read_run
from reasonrag.storage.inputs import RowProblems
from reasonrag.storage.parquet import Row, read_shards, shard_paths, write_parquet
from reasonrag.storage.questions import KNOWN
from reasonrag.storage.tables import Described, message, pair_schema, tree_schema
from reasonrag.training.model import acting_policy, model_path, tokenizer_path

_AGAIN = "write them again with `reasonrag pairs"
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

_QUESTION_COLUMNS = ("dataset", "question_id", "question", "golden_answers", "parent_id")
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
    ("env_class", "string", "search"),
    ("reward_spec", Described("", ("method", "string", "rule"), ("ground_truth", _ground_truth, "")), "golden answers"),
)


@contextlib.contextmanager
def output(out: Path, marker: str, *names: str) -> Iterator[dict[str, int]]:
    """Open a folder that only this process writes to; the yielded counts are written to `marker` at the end.

    Files of an earlier run under `names` are removed first: half
    of an old set with half of a new one would look complete.

    Args:
        out: a new folder, or one with `marker`, which is written
            first. RunError if it holds other files or is in use.
        marker: name of the file that names the folder's exporter.
        names: patterns of all other files that will be written.
    """
    # A killed process may have left the temporary file of the marker in a folder that is still free.
    with Folder(out, marker, marker, ignore=[path.name for path in out.glob(f".{marker}.*")]).locked():
        write_json(out / marker, {})
        for pattern in (f".{marker}.*", *names, *(f".{name}*" for name in names)):
            for old in out.glob(pattern):
                old.unlink()
        counts: dict[str, int] = {}
        yield counts
        write_json(out / marker, counts)


# Pairs


def export_pairs(run: Path, out: Path, *, tool: str = "jsonl", convert: Callable[[Row], Row] = dict) -> dict[str, int]:
    """Write `train.jsonl` and, if questions are held out, `test.jsonl`; return the rows by split.

    LLaMA-Factory also gets `dataset_info.json` with the data sets `reasonrag_train` and `reasonrag_test`.
    Use it with `dataset_dir: OUT`, `dataset: reasonrag_train`, `eval_dataset: reasonrag_test`.

    Args:
        run: folder of a finished run.
        out: a new folder.
        tool: names the marker file.
        convert: returns a row of the tool, or raises `Unusable`.

    Raises:
        RunError: the run is not finished, or the folder cannot be written.
        DataError: the run has no pairs, or pairs of whole
            trajectories; or `convert` raised `Unusable` for some.
    """
    config, summary = read_run(run)
    if config.pairs.level == "trajectory":
        raise DataError(
            f"{run}: its pairs are whole trajectories, of several prompts each, and one pair of messages cannot hold "
            f"them; derive pairs of steps with `reasonrag pairs {run}`"
        )
    splits = [split for split in ("train", "test") if (summary.get("pairs") or {}).get(split)]
    if not splits:
        raise DataError(
            f"{run}: no pairs to export; build trees of more questions, or lower pairs.min_margin or min_confidence"
        )

    with reading(run), output(out, f"{tool}-export.json", "train.jsonl", "test.jsonl", _INFO) as counts:
        for split in splits:
            problems = RowProblems(f"{run}, {split} pairs")
            with writing(out / f"{split}.jsonl") as file:
                for number, row in enumerate(read_shards(run / "pairs", split, pair_schema()), 1):
                    try:
                        file.write(valid_unicode(json.dumps(convert(row), ensure_ascii=False)).encode() + b"\n")
                    except Unusable as reason:
                        problems.add(str(reason), number)
                problems.check(f"{tool} cannot read these; export with --to trl or --to jsonl instead.")
                if number != (expected := summary["pairs"][split]):
                    raise DataError(f"{run}: {number} {split} pairs found and {expected} in run.json; {_AGAIN} {run}`")
            counts[split] = number
        if tool == "llamafactory":
            write_json(out / _INFO, {f"reasonrag_{split}": description(f"{split}.jsonl") for split in splits})
    return counts


def export_trl(run: Path, out: Path, *, tokenizer: str | None = None) -> dict[str, int]:
    """Write a run's pairs as texts for `trl dpo`, rendered with a chat template; return the rows by split.

    A step that ended its turn ends with the policy's own end-of-turn token. `tokenizer` is the folder or
    Hub name of a model with the policy's chat template; None: the policy of the run.
    """
    config, _ = read_run(run)
    if (model := tokenizer or acting_policy(config.policy)[0]) is None:
        raise ConfigError(
            f"{run} does not name a model with a chat template for its prompts; add --tokenizer with a folder or a "
            "Hub id"
        )
    path = model_path(model)
    path = tokenizer_path(path, adapter_base(Path(path)) or path)
    chat = ChatTemplate.load(path, template=config.policy.chat_template)
    return export_pairs(run, out, tool="trl", convert=partial(_as_texts, chat))


def _as_texts(chat: ChatTemplate, row: Row) -> Row:
    # The ends of the steps decide where the end-of-turn token is written.
    sides = read_row(str(row["pair_id"]), row).sides
    assert isinstance(sides, StepSides)  # pairs of a run name the ends of their steps
    text, start = chat.text(sides.chosen[0].prompt), chat.tokenizer.bos_token_id
    # Some tokenizers add the start token by themselves; two of them would change the prompt.
    adds_start = start is not None and chat.tokenizer("")["input_ids"][:1] == [start]
    texts = {"prompt": text.removeprefix(chat.tokenizer.bos_token) if adds_start else text}
    for name, (step,) in (("chosen", sides.chosen), ("rejected", sides.rejected)):
        end_token = str(chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn)) if step.end == "turn" else ""
        texts[name] = step.text + end_token
    return texts | {name: row.get(name) for name in _PROVENANCE}


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


def export_questions(run: Path, out: Path, *, tool: str = "verl", prompts: str | None = None) -> dict[str, int]:
    """Write the questions of a run's trees, with the same held-out questions as its pairs; return them by split.

    verl scores known data sets itself, under names such as `searchR1_hotpotqa`; others need
    `contrib/verl_reward.py`. Search-R1 knows the same seven, all by exact match: others are named `nq`.
    Its prompt is one message of the user, the instruction of the prompt set and then `Question: ...`.
    Published checkpoints were trained with sentences that are not shipped; a prompt set with these in
    `search_r1/instruction.txt` gives the very same message.

    Args:
        run: folder of a finished run.
        out: a new folder.
        tool: verl or search-r1.
        prompts: the prompt set with the instruction of Search-R1's format.
    """
    config, _ = read_run(run)
    format = SearchR1Format(PromptSet.find(prompts or "default"))
    instruction = format.texts["instruction"]
    if tool == "search-r1" and not re.search("(?s)<answer>.*?</answer>", instruction):
        raise ConfigError(
            "the instruction shows no <answer> ... </answer>: Search-R1 scores the second one of prompt and response, "
            "so every response would score 0; add an example answer to it"
        )
    questions: dict[str, list[Question]] = {"train": [], "test": []}
    repeated = repeated_questions(shard_paths(run / "trees", "nodes"))
    for node in read_shards(run / "trees", "nodes", tree_schema(), columns=_QUESTION_COLUMNS):
        if node["parent_id"] < 0:
            # The same rule that split the pairs, so that no question of the test pairs is trained on.
            held_out = in_test_split((node["dataset"], node["question_id"]), config.pairs.test_share, repeated)
            question = Question(node["question_id"], node["question"], tuple(node["golden_answers"]), node["dataset"])
            questions["test" if held_out else "train"].append(question)
    if lacking := sum(not question.golden_answers for of_split in questions.values() for question in of_split):
        raise DataError(
            f"{run}: {lacking} questions have no golden answers, and {tool} would reward every answer to them with 0; "
            "train on them here, with rl train and the outcome of the run"
        )
    numbers = count()
    with output(out, f"{tool}-export.json", "train.parquet", "test.parquet") as counts:
        for split in filter(questions.get, questions):
            rows = []
            for question in questions[split]:
                known = question.dataset in KNOWN
                if tool == "verl":
                    source = f"searchR1_{question.dataset}" if known else question.dataset
                    prompt = format.prompt(question, ()).messages
                else:
                    source, text = question.dataset if known else "nq", quotable(question.question)
                    ending = "" if text.endswith("?") else "?"
                    prompt = (Message("user", f"{instruction} Question: {text}{ending}\n"),)
                rows.append(verl_row(question, source, prompt, split, next(numbers)))
            counts[split] = len(rows)
            write_parquet(out / f"{split}.parquet", rows, verl_schema())
    return counts


def verl_row(question: Question, source: str, prompt: Sequence[Message], split: str, index: int) -> Row:
    """Return a row of `verl_schema`."""
    answers = {"target": list(question.golden_answers)}
    return {
        "data_source": source,
        "prompt": [{"role": message.role, "content": message.content} for message in prompt],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": answers},
        "env_class": "search",
        "reward_spec": {"method": "rule", "ground_truth": answers},
        "extra_info": {
            "split": split,
            "index": index,
            "dataset": question.dataset,
            "question_id": question.id,
            "question": question.question,
        },
    }


def export_graphml(run: Path, out: Path) -> dict[str, int]:
    """Write each tree as a GraphML file named by its place in the run and its id; return the number of files.

    Edges go from parent to child, nodes are numbered as in the tables, and a node's attributes are its
    columns that GraphML can hold: missing values and lists are left out.
    """
    import networkx as nx

    with output(out, "graphml-export.json", "*.graphml") as counts:
        counts["graphs"] = 0
        for tree in read_trees(run):
            graph, best_path = nx.DiGraph(), set(tree.best_path)
            for row in tree.nodes:
                columns = {name: _xml(value) for name, value in row.items() if isinstance(value, str | int | float)}
                graph.add_node(row["node_id"], **columns, best=row["node_id"] in best_path)
            graph.add_edges_from((row["parent_id"], row["node_id"]) for row in tree.nodes[1:])
            plain = re.sub(r"[^A-Za-z0-9_]+", "_", tree.root["question_id"]).strip("_")[:60]  # ids may hold anything
            with writing(out / f"{counts['graphs']:05d}-{plain}.graphml") as file:
                # Not `write_graphml`, which writes other bytes where lxml is installed.
                nx.write_graphml_xml(graph, file)
            counts["graphs"] += 1
    return counts


def _xml(value: Any) -> Any:
    # XML 1.0, production 2; a carriage return is allowed, but every reader makes a line feed of it.
    forbidden = "[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
    return re.sub(forbidden, "\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


# Called with the run and the folder; exporters that render
# prompts take `tokenizer`, those of questions `prompts`.
EXPORTERS: dict[str, Callable[..., dict[str, int]]] = {
    "trl": export_trl,
    "llamafactory": partial(export_pairs, tool="llamafactory", convert=sharegpt),
    "verl": export_questions,
    "search-r1": partial(export_questions, tool="search-r1"),
    "jsonl": export_pairs,
    "graphml": export_graphml,
}
