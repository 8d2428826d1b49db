"""Preference data of any origin to checked rows: a run, a folder, a file or a Hub data set, in any row layout.

Layouts: our own tables of pairs, TRL's lists of messages and plain texts, and the published RAG-ProGuide. Rows that
cannot be used are named, never skipped in silence.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import Config, load_config
from reasonrag.core.documents import named_path
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.policy_card import PolicyCard
from reasonrag.core.settings import POLICY_CARD
from reasonrag.core.text import quoted, valid_unicode
from reasonrag.core.types import Message, Prompt, Span, as_finite
from reasonrag.dpo.token_rows import ChatSides, CheckedRow, Ids, Messages, StepSides, StepText, TextSides
from reasonrag.storage.parquet import column_names, read_batches
from reasonrag.storage.records import RowProblems, read_rows, text_id
from reasonrag.storage.runs import read_run

if TYPE_CHECKING:
    from datasets import DatasetDict

HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.-]+))?")
BY_PROMPT = "prompt "  # the group of a row without a question id begins with this
_HUB_TIMEOUT_S = 10.0
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_ENDS = ("stop", "turn", "length")

_PAIR_COLUMNS = ("prompt", "chosen", "rejected")
_TRAJECTORY_COLUMNS = ("chosen_steps", "rejected_steps")
_OPTIONAL_COLUMNS = (
    *("chosen_end", "rejected_end", "margin", "depth", "dataset", "question_id", "tools", "chat_template_kwargs"),
    *("chosen_type", "rejected_type", "chosen_token_ids", "rejected_token_ids", "chosen_reward", "rejected_reward"),
    *("turn", "chosen_turns", "rejected_turns"),
    *("instruction", "input"),  # of the published RAG-ProGuide
)
_OUR_COLUMNS = {"question_id", "dataset", "depth", "margin"}
_ADVICE = (
    "Needed are prompt, chosen and rejected (lists of messages, or texts), or chosen_steps and rejected_steps; "
    "repair or remove these rows."
)

NumberedRow = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Preferences:
    """Checked rows by split, and how the policy was prompted, if the run is known.

    Attributes:
        train: rows to train on.
        test: rows of held-out questions.
        card: of the policy.
        noun: what a row is: pairs, or steps without a rejected side.
        trajectories: counts of the trajectories that the steps are of, for `training.json`.
    """

    train: list[CheckedRow]
    test: list[CheckedRow]
    card: PolicyCard | None = None
    noun: str = "pairs"
    trajectories: Mapping[str, Any] | None = None


class Unusable(Exception):
    """A row cannot be used; the message says why, without the row's number, so that equal problems can be counted."""


def read_preferences(data: str) -> Preferences:
    """Read a path, or a Hub data set given as `OWNER/NAME[@REVISION][:CONFIGURATION]`.

    Raises:
        DataError, RunError: nothing readable is there; one line says what was found and what to do.
    """
    path = named_path(data)
    if path.is_dir():
        if path.name == "pairs" and (path.parent / "run.json").is_file():
            path = path.parent
        is_run = (path / "run.json").exists() or (path / "journal.sqlite").exists()
        return _read_run(path) if is_run else _read_folder(path)
    if path.is_file() or data.lower().endswith(_SUFFIXES):
        return Preferences(list(pairs_in(path)), [])
    return _read_hub(data)


def _read_run(path: Path) -> Preferences:
    config, summary = read_run(path)
    preferences = Preferences(*_read_splits(path / "pairs"), _card(config, summary))
    for split, rows in (("train", preferences.train), ("test", preferences.test)):
        counted = (summary.get("pairs") or {}).get(split)
        if counted != len(rows):
            raise DataError(
                f"{path}: {len(rows)} {split} pairs found and {counted} in run.json; "
                f"write them again with `reasonrag pairs {path}`"
            )
    if not preferences.train:
        raise DataError(
            f"{path}: no pairs to train on; build trees of more questions, or lower pairs.min_margin with "
            "`reasonrag pairs`"
        )
    return preferences


def _read_folder(path: Path) -> Preferences:
    config = path / "config.yaml"
    folder = next((p for p in (path, path / "data") if any(p.glob("*.parquet"))), None)
    if folder is None:
        raise DataError(f"{path}: no run and no Parquet file in this folder; give one that has either")
    card = _card(load_config(file=config), {}) if config.is_file() else None
    preferences = Preferences(*_read_splits(folder), card)
    if not preferences.train:
        raise DataError(f"{path}: only held-out rows in it; there has to be a train-*.parquet")
    return preferences


def _read_splits(folder: Path) -> tuple[list[CheckedRow], list[CheckedRow]]:
    """Read Parquet files by name: a file whose name does not begin with that of a held-out split is for training."""
    check_shards(folder)
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.parquet")):
        files.setdefault(split_of(file.name), []).append(file)
    held_out = next((split for split in _HELD_OUT if split in files), "")
    train, test = ([row for file in files.get(split, []) for row in pairs_in(file)] for split in ("train", held_out))
    return train, test


def split_of(name: str) -> str:
    """Return the name of a held-out split if that of a file begins with it, else "train".

    >>> split_of("validation-00000-of-00001.parquet"), split_of("hotpot.parquet")
    ('validation', 'train')
    """
    word = re.match("[a-z]*", name.lower())
    return word[0] if word and word[0] in _HELD_OUT else "train"


def check_shards(folder: Path) -> None:
    """Raise DataError if a folder holds some files of `STEM-00000-of-000NN.parquet`, ..., and not all of them."""
    shards: Counter[tuple[str, int]] = Counter()
    for file in folder.glob("*.parquet"):
        if match := re.match(r"(.+)-\d{5}-of-(\d{5})\b", file.name):
            shards[match[1], int(match[2])] += 1
    for (stem, count), present in shards.items():
        if present != count:
            raise DataError(
                f"{folder}: {present} of {count} files of {stem}-*.parquet are there; copy the whole folder"
            )


def pairs_in(path: Path) -> Iterator[CheckedRow]:
    """Yield the pairs of a file one by one.

    Raises:
        DataError: the file cannot be read or holds no pairs; or, at its end, some rows cannot be used, which it names.
    """
    problems = RowProblems(str(path))
    numbered = _read_parquet(path) if path.name.lower().endswith(".parquet") else read_rows(path, problems)
    row = None
    for row in checked_rows(path.name, numbered, problems):
        yield row
    if row is None:
        raise DataError(f"{path}: no pairs in it")


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    """Read the columns that are needed; page checksums are verified if the file has any."""
    if not path.is_file():
        raise DataError(f"{path}: file not found")
    names = column_names(path)
    if not any(set(layout) <= set(names) for layout in (_PAIR_COLUMNS, _TRAJECTORY_COLUMNS)):
        raise DataError(f"{path}: no pairs, its columns are {', '.join(map(quoted, names[:12]))}. {_ADVICE}")
    ends = {"chosen_steps"} if "chosen_steps" in names else {"chosen_end", "rejected_end"}
    if "config_hash" in names and (missing := (_OUR_COLUMNS | ends) - set(names)):
        raise DataError(
            f"{path}: pairs of another version of reasonrag, without {min(missing)}; "
            "write them again with `reasonrag pairs`"
        )
    known = (*_PAIR_COLUMNS, *_TRAJECTORY_COLUMNS, *_OPTIONAL_COLUMNS)
    batches = read_batches(path, None, columns=[name for name in names if name in known])
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _read_hub(data: str) -> Preferences:
    """Read a data set with a `train` split; its test or validation split is held out. Its code is never run."""
    named = HUB_NAME.fullmatch(data)
    if not named:
        raise DataError(f"data {quoted(data)}: no such file or folder; give a run's folder, a file, or a Hub id")
    try:
        splits, card = _fetch(named["name"], named["revision"], named["config"])
    except ConfigError:
        raise
    # Offline mode, sockets, HTTP statuses and damaged caches raise types of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data {quoted(data)} is no file or folder, and cannot be fetched from the Hub ({type(error).__name__}); "
            "check the name, or download it and give the Parquet or JSONL file"
        ) from error
    if "train" not in splits:
        raise DataError(
            f"data set {data!r} has no split train, but {', '.join(map(quoted, splits))}; "
            "save the one you want as Parquet and give that file"
        )

    def read_split(split: str) -> list[CheckedRow]:
        return list(checked_rows(split, enumerate(splits[split], 1), RowProblems(f"{data}, split {split}")))

    held_out = next((split for split in _HELD_OUT if split in splits), None)
    train = read_split("train")
    if not train:
        raise DataError(f"data set {data!r}: no pairs in its split train")
    return Preferences(train, read_split(held_out) if held_out else [], card)


def _fetch(name: str, revision: str | None, configuration: str | None) -> tuple[DatasetDict, PolicyCard | None]:
    """Return splits and policy card, both of one commit; offline, of the commit that was fetched before."""
    import datasets
    import huggingface_hub

    offline = huggingface_hub.is_offline_mode()
    if not offline:  # otherwise `load_dataset` retries an unreachable Hub for half a minute, and prints about it
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
    patterns = ["README.md", POLICY_CARD, "prompts/*"]
    folder = huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns)
    card = PolicyCard.read(Path(folder))
    if offline:  # loading by name would take any cached revision and configuration
        return datasets.load_dataset(folder, configuration), card
    return datasets.load_dataset(name, configuration, revision=Path(folder).name), card


def _card(config: Config, summary: dict[str, Any]) -> PolicyCard:
    return PolicyCard.of(config.model_dump(mode="json"), (summary.get("content") or {}).get("prompts"))


def checked_rows(name: str, numbered: Iterable[NumberedRow], problems: RowProblems) -> Iterator[CheckedRow]:
    """Check raw rows with their 1-based numbers; `name`, of a file or split, is for messages about single rows.

    Raises:
        DataError: at the end, if some rows cannot be used; it names them and says why.
    """
    for number, raw in numbered:
        try:
            yield read_row(f"{name} row {number}", raw)
        except Unusable as problem:
            problems.add(str(problem), number)
    problems.check(_ADVICE)


def read_row(place: str, raw: Mapping[str, Any]) -> CheckedRow:
    """Read one raw row in any known layout; unknown columns are ignored. `place` names the row in messages.

    Raises:
        Unusable: a column is missing, or holds something else than it should.
    """
    sides = _sides(raw)
    margin, depth, dataset = raw.get("margin"), raw.get("depth"), raw.get("dataset")
    if margin is not None and as_finite(margin) is None:
        raise Unusable("margin is not a finite number")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise Unusable("depth is not a count of steps")
    if raw.get("question_id") is None:
        prompt = sides.chosen[0].prompt if isinstance(sides, StepSides) else sides.prompt
        question = BY_PROMPT + hashlib.sha256(json.dumps(prompt, default=as_fields).encode()).hexdigest()[:16]
    else:
        question = text_id(raw["question_id"]) or ""
        if not question:
            raise Unusable("question_id is empty, or neither a text nor a whole number")
    _check_preference(raw, sides, margin)
    group = (valid_unicode(dataset) if isinstance(dataset, str) else "", question)
    first, second = (
        value if isinstance(value := raw.get(f"{side}_type"), str) else "" for side in ("chosen", "rejected")
    )
    return CheckedRow(place, sides, None if margin is None else float(margin), depth or 0, group, (first, second))


def _check_preference(raw: Mapping[str, Any], sides: StepSides | ChatSides | TextSides, margin: object) -> None:
    if isinstance(sides, StepSides):
        same = [(step.text, step.end) for step in sides.chosen] == [(step.text, step.end) for step in sides.rejected]
    else:
        same = sides.chosen == sides.rejected
    if same:
        raise Unusable("chosen and rejected are equal")
    rewards = [raw.get("chosen_reward"), raw.get("rejected_reward")]
    if None not in rewards:
        better, worse = map(as_finite, rewards)
        if better is None or worse is None or better <= worse:
            raise Unusable("chosen_reward is not a finite number above rejected_reward")
        if isinstance(margin, int | float) and not math.isclose(margin, better - worse, abs_tol=1e-9):
            raise Unusable("margin is not chosen_reward less rejected_reward")


def _sides(raw: Mapping[str, Any]) -> StepSides | ChatSides | TextSides:
    is_trajectory = any(raw.get(name) is not None for name in _TRAJECTORY_COLUMNS)
    for name in _TRAJECTORY_COLUMNS if is_trajectory else _PAIR_COLUMNS:
        if raw.get(name) is None:
            raise Unusable(f"{name} missing")
    if is_trajectory:
        return StepSides(_steps(raw, "chosen"), _steps(raw, "rejected"))
    values = {name: raw[name] for name in _PAIR_COLUMNS}
    ends = {name: raw.get(f"{name}_end") for name in ("chosen", "rejected")}
    if all(isinstance(value, str) for value in values.values()):
        if any(ends.values()):
            raise Unusable("chosen_end and rejected_end go with lists of messages, not with texts")
        for name, value in values.items():
            if not value.strip():
                raise Unusable(f"{name} is empty")
        return _proguide_sides(raw, values) or TextSides(**values)
    if not all(isinstance(value, list) for value in values.values()):
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    chats = {name: messages(name, value) for name, value in values.items()}
    if any(value is not None for value in ends.values()):
        prompt = _open_turn(chats["prompt"], raw.get("turn"))
        return StepSides(*((_step(raw, prompt, name, chats[name]),) for name in ends))
    for name in ("chosen", "rejected"):
        if not any(message["content"].strip() for message in chats[name]):
            raise Unusable(f"{name} is empty")
    return ChatSides(**chats, template=_template_arguments(raw))


def _proguide_sides(raw: Mapping[str, Any], values: Mapping[str, str]) -> ChatSides | None:
    """Read a row of the published RAG-ProGuide, whose `prompt` is one text of the system and the user message."""
    system, user = raw.get("instruction"), raw.get("input")
    if not isinstance(system, str) or not isinstance(user, str):
        return None
    if values["prompt"] != f"System: {system}\nUser: {user}":
        return None
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    sides = {name: [{"role": "assistant", "content": values[name]}] for name in ("chosen", "rejected")}
    return ChatSides(prompt, **sides, template={"tools": None})


def messages(name: str, value: list[Any]) -> Messages:
    """Return `value` if it is a list of messages; `name` is its column, for the error.

    Raises:
        Unusable: it is empty, or an item has no role and content of text.
    """
    if not value:
        raise Unusable(f"{name} is empty")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise Unusable(f"{name} holds something else than messages with a role and a content of text")
    return value


def _prompt(messages: Messages, prefix: str = "", turn: object = None) -> Prompt:
    chat = tuple(Message(message["role"], message["content"]) for message in messages)
    spans = [{"text": prefix}] if turn is None and prefix else turn or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise Unusable("an open turn is not a list of spans")
    if "".join(str(span.get("text")) for span in spans) != prefix:
        raise Unusable("the spans of an open turn differ from its text")
    return Prompt(chat, tuple(_span(span["text"], span.get("token_ids")) for span in spans))


def _span(text: str, token_ids: object) -> Span:
    ids = _ids("token_ids of an open turn", token_ids)
    return Span(text, ids, by_policy=ids is not None)


def _open_turn(messages: Messages, turn: object) -> Prompt:
    """A prompt whose last message is the assistant's leaves that turn open; TRL continues it too."""
    *before, last = messages
    if last["role"] != "assistant":
        return _prompt(messages)
    if not before:
        raise Unusable("prompt is an open turn and nothing else")
    return _prompt(before, last["content"], turn)


def _step(raw: Mapping[str, Any], prompt: Prompt, side: str, messages: Messages) -> StepText:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise Unusable(f"{side} is not one message of the assistant, as its end says")
    end, ids = _end(f"{side}_end", raw.get(f"{side}_end")), _ids(f"{side}_token_ids", raw.get(f"{side}_token_ids"))
    return StepText(prompt, messages[0]["content"], end, ids)


def _steps(raw: Mapping[str, Any], side: str) -> tuple[StepText, ...]:
    name, value = f"{side}_steps", raw[f"{side}_steps"]
    if not isinstance(value, list) or not value:
        raise Unusable(f"{name} is empty, or not a list of steps")
    token_ids, turns = (_of_each(raw, f"{side}_{column}", len(value)) for column in ("token_ids", "turns"))
    steps = []
    for step, ids, turn in zip(value, token_ids, turns, strict=True):
        if not isinstance(step, dict) or not isinstance(step.get("text"), str):
            raise Unusable(f"{name} holds something else than steps with a prompt, a text and an end")
        prompt, prefix = step.get("prompt"), step.get("prefix") or ""
        if not isinstance(prompt, list) or not isinstance(prefix, str):
            raise Unusable(f"{name} has a step whose prompt is not a list of messages")
        asked = _prompt(messages(f"a prompt of {name}", prompt), prefix, turn)
        end = _end(f"an end of {name}", step.get("end"))
        steps.append(StepText(asked, step["text"], end, _ids(f"{side}_token_ids", ids)))
    return tuple(steps)


def _of_each(raw: Mapping[str, Any], name: str, steps: int) -> list[Any]:
    """Return an optional column's value for each step."""
    value = raw.get(name)
    if value is None:
        return [None] * steps
    if not isinstance(value, list) or len(value) != steps:
        raise Unusable(f"{name} is not a list with one entry for each step")
    return value


def _ids(name: str, value: object) -> Ids | None:
    if value is None:
        return None
    is_ints = isinstance(value, list) and {int}.issuperset(map(type, value))
    if isinstance(value, list) and is_ints and (not value or 0 <= min(value) <= max(value) < 2**31):
        return tuple(value)
    raise Unusable(f"{name} is not a list of token ids")


def _end(name: str, value: object) -> str:
    if value not in _ENDS:
        raise Unusable(f"{name} is not one of {', '.join(_ENDS)}")
    return str(value)


def _template_arguments(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what TRL passes to the chat template: the columns `tools` (a list, or JSON) and `chat_template_kwargs`."""
    tools, further = raw.get("tools"), raw.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise Unusable("tools is not JSON") from None
    if not isinstance(further, dict):
        raise Unusable("chat_template_kwargs is not a mapping")
    return {"tools": tools, **further}


def as_fields(value: Any) -> Any:
    """Return a value that JSON can hold: the fields of a slotted dataclass, the text of anything else.

    Token ids that a step does not have are left out, so that rows without ids have the checksum that they always had.
    """
    if not is_dataclass(value):
        return str(value)
    values = [getattr(value, field.name) for field in fields(value)]
    return values[:-1] if isinstance(value, StepText) and value.token_ids is None else values
