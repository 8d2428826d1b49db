"""What a policy is trained on: a run, a folder or a file of pairs, or a Hub data set, as token ids by split.

Rows are checked before a model is loaded. A split by question in the source is kept, and none is made up: without one
every pair is for training.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from reasonrag.config import load_config, policy_card
from reasonrag.errors import ConfigError, DataError
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.questions import RowProblems, quoted, read_rows, text_id
from reasonrag.runs import read_run
from reasonrag.text import one_line, valid_unicode
from reasonrag.training.lengths import LengthReport, fit
from reasonrag.training.settings import TrainSettings
from reasonrag.training.tokens import ChatSides, Messages, Pair, Row, Segment, StepSides, StepText, TextSides, encode
from reasonrag.types import Message, Prompt

__all__ = ["Examples", "Pair", "Segment", "open_examples", "sft_segments"]

_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_LAYOUTS = (("prompt", "chosen", "rejected"), ("chosen_steps", "rejected_steps"))
_FURTHER = ["chosen_end", "rejected_end", "margin", "depth", "dataset", "question_id", "tools", "chat_template_kwargs"]
_OWN = {"question_id", "dataset", "depth", "margin"}
_NEEDED = (
    "Needed are prompt, chosen and rejected (lists of messages, or texts), or chosen_steps and rejected_steps; "
    "repair or remove these rows."
)
_BY_PROMPT = "prompt "  # begins the group of a row that names no question
_ENDS = ("stop", "turn", "length")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_TIMEOUT_S = 10.0

Raw = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Examples:
    """Pairs that fit, and where they came from.

    Attributes:
        train: to learn from.
        test: held-out questions; empty where the source holds none out.
        content: 16 hex digits that change with any row of the source, a sample or not.
        card: of a known run, how its policy was asked (`config.policy_card`).
        source: as it was given.
        report: of lengths, and of what was left out.
    """

    train: list[Pair]
    test: list[Pair]
    content: str
    card: str | None
    source: str
    report: LengthReport


@dataclass(frozen=True, slots=True)
class _Source:
    train: list[Row]
    test: list[Row]
    card: str | None = None


def open_examples(settings: TrainSettings, chat: ChatTemplate, *, context: int | None) -> Examples:
    """Read, check and tokenise `settings.data`; leave out, whole, what is too long.

    The data is a run's folder, a folder that `reasonrag pairs --out` wrote, any folder of Parquet, a Parquet or
    JSONL(.gz) file, or a Hub data set. `settings.limit` samples questions of the training split by `settings.seed`.

    Args:
        settings: of the training.
        chat: tokenizer and chat template of the policy.
        context: of the policy, in tokens; None where it is unknown.

    Raises:
        ConfigError: no data was named, or the tokenizer cannot end a turn.
        DataError: nothing readable there, rows that cannot be used (they are named), a question in both splits, too
            many pairs that are too long.
        RunError: a run that is not finished.
    """
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a run's folder, a Parquet or JSONL file, or a Hub id")
    source = _read(settings.data)
    shared_prompts = _check_splits(settings.data, source)
    train = _sample(source.train, settings.limit, settings.seed)
    pairs, shifted = encode([*train, *source.test], chat, turn_end=settings.turn_end)
    kept, report = fit(
        {"train": pairs[: len(train)], "test": pairs[len(train) :]},
        source=settings.data,
        max_length=settings.max_length,
        context=context,
        max_dropped=settings.max_dropped,
        shifted=shifted,
        shared_prompts=shared_prompts,
    )
    return Examples(kept["train"], kept["test"], _fingerprint(source), source.card, settings.data, report)


def sft_segments(pairs: Iterable[Pair]) -> list[Segment]:
    """Every chosen step once, in the order in which they first come."""
    return list(dict.fromkeys(segment for pair in pairs for segment in pair.chosen))


def _read(data: str) -> _Source:
    path = Path(data).expanduser()
    if path.is_dir():
        if path.name == "pairs" and (path.parent / "run.json").is_file():
            path = path.parent
        is_run = (path / "run.json").exists() or (path / "journal.sqlite").exists()
        return _run(path) if is_run else _folder(path)
    if path.is_file() or data.lower().endswith(_SUFFIXES):
        return _Source(_rows(path), [])
    return _hub(data)


def _run(path: Path) -> _Source:
    """Pairs of a run, as many as its `run.json` counts."""
    config, summary = read_run(path)
    source = _Source(*_by_split(path / "pairs"), policy_card(config))
    for split, rows in (("train", source.train), ("test", source.test)):
        counted = (summary.get("pairs") or {}).get(split)
        if counted != len(rows):
            raise DataError(
                f"{path}: {len(rows)} {split} pairs found and {counted} in run.json; "
                f"write them again with `reasonrag pairs {path}`"
            )
    if not source.train:
        raise DataError(
            f"{path}: no pairs to train on; build trees of more questions, or lower pairs.min_margin with "
            "`reasonrag pairs`"
        )
    return source


def _folder(path: Path) -> _Source:
    """Parquet by the names of its files: what does not begin with a held-out split's name is for training."""
    config = path / "config.yaml"
    place = next((p for p in (path, path / "data") if any(p.glob("*.parquet"))), None)
    if place is None:
        raise DataError(f"{path}: no run and no Parquet file in this folder; give one that has either")
    source = _Source(*_by_split(place), policy_card(load_config(file=config)) if config.is_file() else None)
    if not source.train:
        raise DataError(f"{path}: only held-out rows in it; there has to be a train-*.parquet")
    return source


def _by_split(folder: Path) -> tuple[list[Row], list[Row]]:
    files: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.parquet")):
        word = re.match("[a-z]*", file.name.lower())
        name = word[0] if word and word[0] in _HELD_OUT else "train"
        files.setdefault(name, []).append(file)
    _check_shards(folder, [file.name for group in files.values() for file in group])
    test = files.get(next((name for name in _HELD_OUT if name in files), ""), [])
    train = files.get("train", [])
    return [row for f in train for row in _rows(f)], [row for f in test for row in _rows(f)]


def _check_shards(folder: Path, names: Sequence[str]) -> None:
    found: dict[tuple[str, int], int] = {}
    for name in names:
        if shard := re.match(r"(.+)-\d{5}-of-(\d{5})\b", name):
            key = (shard[1], int(shard[2]))
            found[key] = found.get(key, 0) + 1
    for (stem, count), there in found.items():
        if there != count:
            raise DataError(f"{folder}: {there} of {count} files of {stem}-*.parquet are there; copy the whole folder")


def _rows(path: Path) -> list[Row]:
    problems = RowProblems(str(path))
    raw = _parquet(path) if path.name.lower().endswith(".parquet") else read_rows(path, problems)
    rows = _checked(path.name, raw, problems)
    if not rows:
        raise DataError(f"{path}: no pairs in it")
    return rows


def _parquet(path: Path) -> Iterator[Raw]:
    """Rows of a Parquet file, with the columns that are needed; their page checksums are verified if it has any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"{path}: file not found")
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        if not any(set(layout) <= set(names) for layout in _LAYOUTS):
            raise DataError(f"{path}: no pairs, its columns are {', '.join(map(quoted, names[:12]))}. {_NEEDED}")
        ends = {"chosen_steps"} if "chosen_steps" in names else {"chosen_end", "rejected_end"}
        if "config_hash" in names and (missing := (_OWN | ends) - set(names)):
            raise DataError(
                f"{path}: pairs of another version of reasonrag, without {min(missing)}; "
                "write them again with `reasonrag pairs`"
            )
        wanted = [name for name in names if name in (*_LAYOUTS[0], *_LAYOUTS[1], *_FURTHER)]
        yield from enumerate(file.read(columns=wanted).to_pylist(), 1)
    except (OSError, ValueError, pa.ArrowException) as error:  # a damaged name is no UTF-8
        raise DataError(
            f"{path}: cannot be read ({one_line(str(error))[:200]}); it is damaged or not Parquet"
        ) from error


def _hub(name: str) -> _Source:
    """A data set with a `train` split; its test or validation split is held out. No code of it is ever run."""
    if not _HUB_ID.fullmatch(name):
        raise DataError(f"data {quoted(name)}: no such file or folder; give a run's folder, a file, or a Hub id")
    import datasets
    import huggingface_hub

    try:
        if not huggingface_hub.is_offline_mode():
            # `load_dataset` tries a dead Hub for half a minute, and talks about it.
            huggingface_hub.HfApi().dataset_info(name, timeout=_HUB_TIMEOUT_S)
        found = datasets.load_dataset(name)
    # Offline mode, sockets, HTTP statuses and damaged caches each raise a type of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data {quoted(name)} is no file or folder, and cannot be fetched from the Hub ({type(error).__name__}); "
            "check the name, or download it and give the Parquet or JSONL file"
        ) from error
    if "train" not in found:
        raise DataError(
            f"data set {name!r} has no split train, but {', '.join(map(quoted, found))}; "
            "save the one you want as Parquet and give that file"
        )
    test = next((split for split in _HELD_OUT if split in found), None)
    rows = [
        _checked(split, enumerate(found[split], 1), RowProblems(f"{name}, split {split}")) if split else []
        for split in ("train", test)
    ]
    if not rows[0]:
        raise DataError(f"data set {name!r}: no pairs in its split train")
    return _Source(rows[0], rows[1])


def _check_splits(name: str, source: _Source) -> int:
    """Refuse a question in both splits; returns how many prompts of rows without a question's id are in both."""
    common = {row.group for row in source.train} & {row.group for row in source.test}
    leaked = sorted(group for group in common if not group[1].startswith(_BY_PROMPT))
    if leaked:
        dataset, question = leaked[0]
        raise DataError(
            f"{name}: question {quoted(question)}{f' of {quoted(dataset)}' if dataset else ''} stands in both splits"
            f"{f', and {len(leaked) - 1} more do' if leaked[1:] else ''}, so the held-out figures would mean nothing; "
            "split by question, as build-tree does"
        )
    return len(common)


def _sample(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    """Rows of a random sample of at most `limit` questions, in their order."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if limit is None or limit >= len(groups):
        return rows
    taken = set(random.Random(seed).sample(groups, limit))
    return [row for row in rows if row.group in taken]


def _fingerprint(source: _Source) -> str:
    digest = hashlib.sha256()
    for split, rows in (("train", source.train), ("test", source.test)):
        for row in rows:
            known_by = [split, row.sides, row.margin, row.depth, row.group]
            digest.update(json.dumps(known_by, default=_fields).encode() + b"\n")
    return digest.hexdigest()[:16]


def _fields(value: Any) -> Any:
    """A value that JSON does not know: a slotted dataclass, or what a foreign table may hold for a template."""
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else str(value)


class _Unusable(Exception):
    """A row; the message says what kind of problem it has."""


def _checked(name: str, raw: Iterable[Raw], problems: RowProblems) -> list[Row]:
    rows = []
    for number, row in raw:
        try:
            rows.append(_row(f"{name} row {number}", row))
        except _Unusable as problem:
            problems.add(str(problem), number)
    problems.check(_NEEDED)
    return rows


def _row(place: str, raw: Mapping[str, Any]) -> Row:
    sides = _sides(raw)
    margin, depth, dataset = raw.get("margin"), raw.get("depth"), raw.get("dataset")
    if margin is not None and not (isinstance(margin, int | float) and math.isfinite(margin)):
        raise _Unusable("margin is no finite number")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise _Unusable("depth is no count of steps")
    if raw.get("question_id") is None:
        prompt = sides.chosen[0].prompt if isinstance(sides, StepSides) else sides.prompt
        question = _BY_PROMPT + hashlib.sha256(json.dumps(prompt, default=_fields).encode()).hexdigest()[:16]
    else:
        question = text_id(raw["question_id"]) or ""
        if not question:
            raise _Unusable("question_id is empty, or neither a text nor a whole number")
    group = (valid_unicode(dataset) if isinstance(dataset, str) else "", question)
    return Row(place, sides, None if margin is None else float(margin), depth or 0, group)


def _sides(raw: Mapping[str, Any]) -> StepSides | ChatSides | TextSides:
    trajectory = any(raw.get(name) is not None for name in _LAYOUTS[1])
    for name in _LAYOUTS[trajectory]:
        if raw.get(name) is None:
            raise _Unusable(f"{name} missing")
    if trajectory:
        return StepSides(_steps(raw, "chosen_steps"), _steps(raw, "rejected_steps"))
    values = {name: raw[name] for name in _LAYOUTS[0]}
    ends = {name: raw.get(f"{name}_end") for name in ("chosen", "rejected")}
    if all(isinstance(value, str) for value in values.values()):
        if any(ends.values()):
            raise _Unusable("chosen_end and rejected_end go with lists of messages, not with texts")
        for name, value in values.items():
            if not value.strip():
                raise _Unusable(f"{name} is empty")
        return TextSides(**values)
    if not all(isinstance(value, list) for value in values.values()):
        raise _Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    chats = {name: _messages(name, value) for name, value in values.items()}
    if any(value is not None for value in ends.values()):
        prompt = _prompt(chats["prompt"])
        return StepSides(*((_step(prompt, name, chats[name], end),) for name, end in ends.items()))
    for name in ("chosen", "rejected"):
        if not any(message["content"].strip() for message in chats[name]):
            raise _Unusable(f"{name} is empty")
    return ChatSides(**chats, template=_template(raw))


def _messages(name: str, value: list[Any]) -> Messages:
    if not value:
        raise _Unusable(f"{name} is empty")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise _Unusable(f"{name} holds something else than messages with a role and a content of text")
    return value


def _prompt(messages: Messages, prefix: str = "") -> Prompt:
    return Prompt(tuple(Message(message["role"], message["content"]) for message in messages), prefix)


def _step(prompt: Prompt, name: str, messages: Messages, end: object) -> StepText:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise _Unusable(f"{name} is not one message of the assistant, as its end says")
    return StepText(prompt, messages[0]["content"], _end(f"{name}_end", end))


def _steps(raw: Mapping[str, Any], name: str) -> tuple[StepText, ...]:
    value = raw[name]
    if not isinstance(value, list) or not value:
        raise _Unusable(f"{name} is empty, or no list of steps")
    steps = []
    for step in value:
        if not isinstance(step, dict) or not isinstance(step.get("text"), str):
            raise _Unusable(f"{name} holds something else than steps with a prompt, a text and an end")
        prompt, prefix = step.get("prompt"), step.get("prefix") or ""
        if not isinstance(prompt, list) or not isinstance(prefix, str):
            raise _Unusable(f"{name} has a step whose prompt is no list of messages")
        asked = _prompt(_messages(f"a prompt of {name}", prompt), prefix)
        steps.append(StepText(asked, step["text"], _end(f"an end of {name}", step.get("end"))))
    return tuple(steps)


def _end(name: str, value: object) -> str:
    if value not in _ENDS:
        raise _Unusable(f"{name} is none of {', '.join(_ENDS)}")
    return str(value)


def _template(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL passes to the chat template: the columns `tools` (a list, or JSON) and `chat_template_kwargs`."""
    tools, further = raw.get("tools"), raw.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise _Unusable("tools is not JSON") from None
    if not isinstance(further, dict):
        raise _Unusable("chat_template_kwargs is no mapping")
    return {"tools": tools, **further}
