"""Preference data of any origin to checked rows: a run, a folder, a file or a Hub data set, in any row layout.

Layouts: our own tables of pairs, TRL's lists of messages and plain texts with or without a prompt, and the published
RAG-ProGuide. Rows that cannot be used are named, never skipped silently. `Contradictions` and `PairRules` check that
no preference reverses another one and that no question is in two splits.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import POLICY_CARD, Config, PolicyCard, load_config
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import common_length, common_text, normalize_answer, quoted, valid_unicode
from reasonrag.core.types import Message, Prompt, Span, as_finite
from reasonrag.storage.files import short_hash
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import column_names, read_batches
from reasonrag.storage.records import RowProblems, read_rows, text_id

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
_PROGUIDE_COLUMNS = ("instruction", "input", "layer", "chosen_action_type", "rejected_action_type")
_OPTIONAL_COLUMNS = (
    *("chosen_end", "rejected_end", "margin", "depth", "dataset", "question_id", "tools", "chat_template_kwargs"),
    *("chosen_type", "rejected_type", "chosen_token_ids", "rejected_token_ids", "chosen_reward", "rejected_reward"),
    *("turn", "chosen_turns", "rejected_turns"),
)
_OUR_COLUMNS = {"question_id", "dataset", "depth", "margin"}
_PROGUIDE_ACTIONS = {
    "Query Generation": "query",
    "Evidence Extraction": "evidence",
    "Answer Generation": "answer",
    "Other": "malformed",
}
_ADVICE = (
    "Needed are prompt, chosen and rejected (lists of messages, or texts), or chosen_steps and rejected_steps; "
    "repair or remove these rows."
)
_WHOLE_WORDS = re.compile(r"(?s:.*\s)?")
_LAST_TAG = re.compile(r".*<(\w+)>([^<]*)</\1>\s*", re.DOTALL)
_NAMED_CONTRADICTIONS = 3

Ids = tuple[int, ...]
Messages = list[dict[str, Any]]
NumberedRow = tuple[int, Mapping[str, Any]]
TypedText = tuple[str, str]  # type of a step ("" if it is unknown), and its text


@dataclass(frozen=True, slots=True)
class StepText:
    """A step as it was written. `end`: stop (at a stop string), turn (the policy ended its turn), length (cut off).

    `token_ids` are the ids that the policy sampled, with an end token or what follows a stop string in its last token;
    None if they are unknown.
    """

    prompt: Prompt
    text: str
    end: str
    token_ids: Ids | None = None


@dataclass(frozen=True, slots=True)
class StepSides:
    """Two steps, or two trajectories, with known ends."""

    chosen: tuple[StepText, ...]
    rejected: tuple[StepText, ...]


@dataclass(frozen=True, slots=True)
class ChatSides:
    """Two whole turns as lists of messages, TRL's conversational layout.

    `template` goes to the chat template: TRL's columns `tools` and `chat_template_kwargs`.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextSides:
    """Two continuations of a text, TRL's standard layout."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Target:
    """The label of a step for a process reward model: a value in [0, 1], and its weight by certainty, in (0, 1].

    Steps of one question that were taken in the same state have the same `state`.
    """

    value: float
    weight: float
    state: int


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A checked row: `place` names it in messages, `types` are the actions of chosen and rejected, "" if unknown.

    `margin` is the difference of the rewards, None if unknown. `depth` counts the steps before the decision. `group` is
    data set and question; rows without a question id are grouped by their prompt.
    """

    place: str
    sides: StepSides | ChatSides | TextSides
    margin: float | None
    depth: int
    group: tuple[str, str]
    types: tuple[str, str] = ("", "")
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Preferences:
    """Checked rows by split, and how the policy was prompted, if the run is known.

    Attributes:
        train: rows to train on.
        test: rows of held-out questions.
        card: of the policy.
        noun: name of the rows in messages: pairs, or steps without a rejected side.
        trajectories: counts of the trajectories that the steps are of, for `training.json`.
    """

    train: list[CheckedRow]
    test: list[CheckedRow]
    card: PolicyCard | None = None
    noun: str = "pairs"
    trajectories: Mapping[str, Any] | None = None

    def checksum(self) -> str:
        """Return 16 hex digits that change with any row of either split."""
        digest = hashlib.sha256()
        for split, rows in (("train", self.train), ("test", self.test)):
            for row in rows:
                values: list[Any] = [split, row.sides, row.margin, row.depth, row.group]
                if row.target is not None:
                    values.append(row.target)
                digest.update(json.dumps(values, default=_as_fields).encode() + b"\n")
        return digest.hexdigest()[:16]


class Unusable(Exception):
    """A row cannot be used; the message gives the reason without the row's number, so equal problems can be counted."""


# Where data is


def read_preferences(data: str) -> Preferences:
    """Read a path, or a Hub data set given as `OWNER/NAME[@REVISION][:CONFIGURATION]`.

    Raises:
        DataError, RunError: nothing readable is there; one line names the problem and what to do.
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
        expected = (summary.get("pairs") or {}).get(split)
        if expected != len(rows):
            raise DataError(
                f"{path}: {len(rows)} {split} pairs found and {expected} in run.json; "
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


def _card(config: Config, summary: dict[str, Any]) -> PolicyCard:
    return PolicyCard.of(config.model_dump(mode="json"), (summary.get("content") or {}).get("prompts"))


def _read_splits(folder: Path) -> tuple[list[CheckedRow], list[CheckedRow]]:
    """Read Parquet files by name: a file is for training unless its name begins with that of a held-out split."""
    check_shards(folder)
    rows_by_split: dict[str, list[CheckedRow]] = {}
    for file in sorted(folder.glob("*.parquet")):
        rows_by_split.setdefault(split_of(file.name), []).extend(pairs_in(file))
    held_out = next((split for split in _HELD_OUT if split in rows_by_split), "")
    return rows_by_split.get("train", []), rows_by_split.get(held_out, [])


def split_of(name: str) -> str:
    """Return the held-out split that the name of a file begins with, else "train".

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
    if not {"chosen", "rejected"} <= set(names) and not set(_TRAJECTORY_COLUMNS) <= set(names):
        raise DataError(f"{path}: no pairs, its columns are {', '.join(map(quoted, names[:12]))}. {_ADVICE}")
    ends = {"chosen_steps"} if "chosen_steps" in names else {"chosen_end", "rejected_end"}
    if "config_hash" in names and (missing := (_OUR_COLUMNS | ends) - set(names)):
        raise DataError(
            f"{path}: pairs of another version of reasonrag, without {min(missing)}; "
            "write them again with `reasonrag pairs`"
        )
    known = {*_PAIR_COLUMNS, *_TRAJECTORY_COLUMNS, *_OPTIONAL_COLUMNS, *_PROGUIDE_COLUMNS}
    number = 0
    for batch in read_batches(path, None, columns=[name for name in names if name in known]):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _read_hub(data: str) -> Preferences:
    """Read a data set with a `train` split; its test or validation split is held out. Its code is never run."""
    address = HUB_NAME.fullmatch(data)
    if not address:
        raise DataError(f"data {quoted(data)}: no such file or folder; give a run's folder, a file, or a Hub id")
    try:
        splits, card = _fetch(address["name"], address["revision"], address["config"])
    except ConfigError:
        raise
    # Offline mode, sockets, HTTP statuses and damaged caches raise types of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data {quoted(data)} is no local file, and cannot be fetched from the Hub ({type(error).__name__}); "
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


# The layouts of a row


def checked_rows(name: str, numbered: Iterable[NumberedRow], problems: RowProblems) -> Iterator[CheckedRow]:
    """Check raw rows with their 1-based numbers; `name`, of a file or split, is for messages about single rows.

    Raises:
        DataError: at the end, if some rows cannot be used; it names them and gives the reasons.
    """
    for number, raw in numbered:
        try:
            yield read_row(f"{name} row {number}", raw)
        except Unusable as problem:
            problems.add(str(problem), number)
    problems.check(_ADVICE)


def read_row(place: str, raw: Mapping[str, Any]) -> CheckedRow:
    """Read one raw row in any known layout; unknown columns are ignored. `place` names the row in messages.

    >>> read_row("row 1", {"chosen": "Who made Jaws? Spielberg", "rejected": "Who made Jaws? Spiel"}).sides
    TextSides(prompt='Who made Jaws? ', chosen='Spielberg', rejected='Spiel')

    Raises:
        Unusable: a column is missing, or has a value of another kind.
    """
    raw = known_columns(raw)
    if any(raw.get(name) is not None for name in _TRAJECTORY_COLUMNS):
        sides: StepSides | ChatSides | TextSides = _trajectory_sides(raw)
    else:
        sides = _pair_sides(raw)
    margin, depth, dataset = raw.get("margin"), raw.get("depth"), raw.get("dataset")
    if margin is not None and as_finite(margin) is None:
        raise Unusable("margin is not a finite number")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise Unusable("depth is not a count of steps")
    _check_preference(raw, sides, margin)
    if raw.get("question_id") is None:
        prompt = sides.chosen[0].prompt if isinstance(sides, StepSides) else sides.prompt
        question = BY_PROMPT + hashlib.sha256(json.dumps(prompt, default=_as_fields).encode()).hexdigest()[:16]
    else:
        question = text_id(raw["question_id"]) or ""
        if not question:
            raise Unusable("question_id is empty, or neither a text nor a whole number")
    group = (valid_unicode(dataset) if isinstance(dataset, str) else "", question)
    types = raw.get("chosen_type"), raw.get("rejected_type")
    first, second = (value if isinstance(value, str) else "" for value in types)
    return CheckedRow(place, sides, None if margin is None else float(margin), depth or 0, group, (first, second))


def known_columns(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row as it is, but of the published RAG-ProGuide with our columns.

    There, `prompt` is one text of the system and the user message, and `layer` the depth.
    """
    system, user, layer = raw.get("instruction"), raw.get("input"), raw.get("layer")
    if not isinstance(system, str) or not isinstance(user, str):
        return raw
    if raw.get("prompt") != f"System: {system}\nUser: {user}":
        return raw
    columns: dict[str, Any] = {
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "depth": layer,
    }
    for side in ("chosen", "rejected"):
        text, action = raw.get(side), raw.get(f"{side}_action_type")
        if not isinstance(text, str):
            raise Unusable(f"{side} is not a text")
        columns[side] = [{"role": "assistant", "content": text}]
        columns[f"{side}_type"] = _PROGUIDE_ACTIONS.get(action) if isinstance(action, str) else None
    return columns


def _pair_sides(raw: Mapping[str, Any]) -> StepSides | ChatSides | TextSides:
    prompt, chosen, rejected = (raw.get(name) for name in _PAIR_COLUMNS)
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if value is None:
            raise Unusable(f"{name} missing")
    if prompt is None:
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
    columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    ends = [raw.get("chosen_end"), raw.get("rejected_end")]
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        if any(ends):
            raise Unusable("chosen_end and rejected_end go with lists of messages, not with texts")
        for name, text in columns.items():
            if not text.strip():
                raise Unusable(f"{name} is empty")
        return TextSides(prompt, chosen, rejected)
    if not all(isinstance(value, list) for value in columns.values()):
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    chats = {name: _messages(name, value) for name, value in columns.items()}
    if ends != [None, None]:
        # A prompt with the assistant's message last leaves that turn open; TRL continues it too.
        *before, last = chats["prompt"]
        if last["role"] != "assistant":
            read = _prompt(chats["prompt"])
        elif before:
            read = _prompt(before, last["content"], raw.get("turn"))
        else:
            raise Unusable("prompt is an open turn and nothing else")
        return StepSides((_step(raw, read, "chosen", chats),), (_step(raw, read, "rejected", chats),))
    for name in ("chosen", "rejected"):
        if not any(message["content"].strip() for message in chats[name]):
            raise Unusable(f"{name} is empty")
    return ChatSides(**chats, template=_template_arguments(raw))


def _split_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected of a row without a prompt: it is the common beginning of the two.

    Whole messages, or text up to the last white space, so that no word is cut.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        words = _WHOLE_WORDS.match(chosen[: common_length(chosen, rejected)])
        shared = len(words[0]) if words else 0
    elif isinstance(chosen, list) and isinstance(rejected, list):
        shared = common_length(chosen, rejected)
    else:
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    if not shared:
        raise Unusable("prompt missing, and chosen and rejected have no common beginning")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _messages(name: str, value: list[Any]) -> Messages:
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
    read = []
    for span in spans:
        ids = _ids("token_ids of an open turn", span.get("token_ids"))
        read.append(Span(span["text"], ids, by_policy=ids is not None))
    return Prompt(chat, tuple(read))


def _step(raw: Mapping[str, Any], prompt: Prompt, side: str, chats: Mapping[str, Messages]) -> StepText:
    messages = chats[side]
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise Unusable(f"{side} is not one message of the assistant, as its end requires")
    end, ids = _end(f"{side}_end", raw.get(f"{side}_end")), _ids(f"{side}_token_ids", raw.get(f"{side}_token_ids"))
    return StepText(prompt, messages[0]["content"], end, ids)


def _trajectory_sides(raw: Mapping[str, Any]) -> StepSides:
    for name in _TRAJECTORY_COLUMNS:
        if raw.get(name) is None:
            raise Unusable(f"{name} missing")
    return StepSides(_steps(raw, "chosen"), _steps(raw, "rejected"))


def _steps(raw: Mapping[str, Any], side: str) -> tuple[StepText, ...]:
    name, rows = f"{side}_steps", raw[f"{side}_steps"]
    if not isinstance(rows, list) or not rows:
        raise Unusable(f"{name} is empty, or not a list of steps")
    per_step = []
    for column in (f"{side}_token_ids", f"{side}_turns"):
        values = raw.get(column) if raw.get(column) is not None else [None] * len(rows)
        if not isinstance(values, list) or len(values) != len(rows):
            raise Unusable(f"{column} is not a list with one entry for each step")
        per_step.append(values)
    steps = []
    for row, ids, turn in zip(rows, *per_step, strict=True):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise Unusable(f"{name} holds something else than steps with a prompt, a text and an end")
        messages, prefix = row.get("prompt"), row.get("prefix") or ""
        if not isinstance(messages, list) or not isinstance(prefix, str):
            raise Unusable(f"{name} has a step with a prompt that is not a list of messages")
        prompt = _prompt(_messages(f"a prompt of {name}", messages), prefix, turn)
        end = _end(f"an end of {name}", row.get("end"))
        steps.append(StepText(prompt, row["text"], end, _ids(f"{side}_token_ids", ids)))
    return tuple(steps)


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


def _as_fields(value: Any) -> Any:
    """Return a value that JSON can hold: the fields of a slotted dataclass, the text of anything else.

    Unknown token ids of a step are left out, so that rows without ids keep the checksum that they always had.
    """
    if not is_dataclass(value):
        return str(value)
    values = [getattr(value, field.name) for field in fields(value)]
    return values[:-1] if isinstance(value, StepText) and value.token_ids is None else values


# Consistency of a data set


class Contradictions:
    """Counts pairs of which the data set also has the reverse, as they are added.

    Attributes:
        same_text: pairs (prompt, A, B) for which the data set also has (prompt, B, A).
        same_content: the same, with A and B compared by the text inside their last tag, normalised.
        named: the names of the first few, each with the pair that it reverses.
        pairs: the names of all of them.

    >>> contradictions = Contradictions()
    >>> contradictions.add("1", "Who?", [("", "<answer>Jo</answer>")], [("", "<answer>Al</answer>")])
    >>> contradictions.add("2", "Who?", [("", "<answer>Al</answer>")], [("", "<answer>JO!</answer>")])
    >>> contradictions.same_text, contradictions.same_content, contradictions.named
    (0, 2, [('1', '2')])
    """

    def __init__(self, repeated: Collection[tuple[str, str]] = ()) -> None:
        """Take the questions with a text that another question has too: their pairs may contradict each other."""
        self.total = self.same_text = self.same_content = 0
        self.named: list[tuple[str, str]] = []
        self.pairs: set[str] = set()
        self._repeated = repeated
        self._question: tuple[str, str] | None = None
        self._lasting: defaultdict[bytes, list[str]] = defaultdict(list)
        self._names = self._lasting  # of the pairs by what they prefer

    def begin(self, dataset: str, question_id: str) -> None:
        """Name the question of the next pairs. Pairs of questions that are not `repeated` are forgotten after them."""
        if self._question != (dataset, question_id):
            self._question = (dataset, question_id)
            self._names = self._lasting if self._question in self._repeated else defaultdict(list)

    def add(self, name: str, prompt: object, chosen: Sequence[TypedText], rejected: Sequence[TypedText]) -> None:
        """Add a pair: its name, the prompt in any form with a `repr` of its own, and the steps of both sides."""
        self.total += 1
        state = _key(prompt)
        self.same_text += self._add(name, state, [text for _, text in chosen], [text for _, text in rejected])
        self.same_content += self._add(
            name, state, [_content(*step) for step in chosen], [_content(*step) for step in rejected]
        )

    def _add(self, name: str, state: bytes, chosen: Sequence[object], rejected: Sequence[object]) -> int:
        """Return how many more pairs have their reverse in the data set."""
        same = self._names[_key(state, chosen, rejected)]
        same.append(name)
        reverse = self._names.get(_key(state, rejected, chosen))
        if not reverse:
            return 0
        self.pairs |= {name, *reverse}
        two = (reverse[0], name)
        if len(self.named) < _NAMED_CONTRADICTIONS and two not in self.named:
            self.named.append(two)
        return 1 + (len(reverse) if len(same) == 1 else 0)  # the first of its kind contradicts all of its reverses

    def add_row(self, row: CheckedRow) -> None:
        """Add a checked row of any layout."""
        sides = row.sides
        if isinstance(sides, StepSides):
            read = sides.chosen[0].prompt
            prompt: object = read.messages, read.prefix
            chosen, rejected = ([step.text for step in side] for side in (sides.chosen, sides.rejected))
        elif isinstance(sides, ChatSides):
            prompt = sides.prompt
            chosen, rejected = ([message["content"] for message in side] for side in (sides.chosen, sides.rejected))
        else:
            prompt, chosen, rejected = sides.prompt, [sides.chosen], [sides.rejected]
        first, second = row.types
        self.add(row.place, prompt, [(first, text) for text in chosen], [(second, text) for text in rejected])

    def summary(self) -> dict[str, Any]:
        """Return the counts and the first names as JSON can hold them."""
        return {"same_text": self.same_text, "same_content": self.same_content, "named": list(map(list, self.named))}

    def __str__(self) -> str:
        """Return the number of contradictory pairs with the first names; "" without such pairs."""
        if not self.same_text and not self.same_content:
            return ""
        count = max(self.same_text, self.same_content)
        named = ", ".join(f"{first} and {second}" for first, second in self.named)
        return (
            f"{count} of {self.total} pairs contradict each other, {self.same_text} of them word for word: the same "
            f"two steps after the same prompt, preferred the other way round (first: {named})"
        )


class PairRules(Contradictions):
    """Counts the pairs of splits, the pairs that contradict each other, and the texts that two splits share.

    Args:
        repeated: what `repeated_questions` returns, if the trees are known: pairs of a question then come one after
            another. Otherwise prompts are compared, without regard to case and white space.

    Attributes:
        rows: the number of pairs by split.
        texts: the first split of each question, whatever its ids; of unknown trees, of each prompt, as a digest.
        shared_texts: texts in two splits.
    """

    def __init__(self, repeated: Mapping[tuple[str, str], tuple[str, str]] | None = None) -> None:
        super().__init__(repeated or ())
        self.rows: Counter[str] = Counter()
        self.texts: dict[object, str] = {}
        self.shared_texts: set[object] = set()
        self._firsts = repeated
        self._questions: dict[tuple[str, str], str] = {}
        self._shared: set[tuple[str, str]] = set()

    def add_pair(self, split: str, row: CheckedRow) -> None:
        """Add a pair of a split."""
        if self._firsts is not None:
            self.begin(*row.group)
        self.add_row(row)
        self.rows[split] += 1
        text: object = _prompt_digest(row) if self._firsts is None else self._firsts.get(row.group, row.group)
        if self.texts.setdefault(text, split) != split:
            self.shared_texts.add(text)
        if self._questions.setdefault(row.group, split) != split and not row.group[1].startswith(BY_PROMPT):
            self._shared.add(row.group)

    def check_questions(self, name: str) -> int:
        """Return how many questions have pairs; raise DataError if one is in two splits. `name` is that of the data."""
        if self._shared:
            dataset, question = min(self._shared)
            more = len(self._shared) - 1
            raise DataError(
                f"{name}: question {quoted(question)}{f' of {quoted(dataset)}' if dataset else ''} is in both splits"
                f"{f', and {more} more are' if more else ''}, so the held-out metrics would mean nothing; split by "
                "question, as build-tree does"
            )
        return len(self._questions)


def _prompt_digest(row: CheckedRow) -> str:
    if isinstance(row.sides, StepSides):
        read = row.sides.chosen[0].prompt
        texts = [*(message.content for message in read.messages), read.prefix]
    else:
        prompt = row.sides.prompt
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return short_hash(common_text("\n".join(texts)))


def _content(type: str, text: str) -> TypedText:
    """Return type and text inside the last tag, normalised; the whole step if it has none, or cannot be parsed."""
    tagged = None if type == "malformed" else _LAST_TAG.fullmatch(text)
    if tagged is None:
        return type, text.strip()
    return type or tagged[1], normalize_answer(tagged[2]) or text.strip()


def _key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]
