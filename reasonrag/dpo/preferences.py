"""Preference data of any origin to checked rows: a run, a folder, a file or a Hub data set, in any row layout.

Layouts: our own tables of pairs, TRL's lists of messages, with or without a prompt, and plain texts, and
the published RAG-ProGuide and PRO-STEP. Rows that cannot be used are named, never skipped silently. `PairRules` checks
that no preference reverses another one and that no question is in two splits.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError, model_validator

from reasonrag.core.config import POLICY_CARD, Config, PolicyCard, load_config
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import named_path
from reasonrag.core.text import common_length, common_text, normalize_answer, quoted, valid_unicode
from reasonrag.core.types import Message, Prompt, Span, as_finite
from reasonrag.storage import inputs
from reasonrag.storage.files import reading, short_hash
from reasonrag.storage.folder import read_run
from reasonrag.storage.inputs import NO_OBJECT, SUFFIXES, NumberedRow, RowProblems, raw_rows, text_id, warn_left_out
from reasonrag.storage.parquet import Row, column_names, read_batches

HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.-]+))?")
_BY_PROMPT = "prompt "  # the group of a row without a question id begins with this
_HUB_TIMEOUT_S = 10.0
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval", "evaluation")
_NAMED_CONTRADICTIONS = 3
_SIDES = ("chosen", "rejected")
# By the first word of what RAG-ProGuide and PRO-STEP call an action; a "Reason" of the latter has no type of ours.
_ACTIONS = {"Query": "query", "Search": "query", "Evidence": "evidence", "Answer": "answer", "Other": "malformed"}
_ADVICE = (
    "Needed are prompt, chosen and rejected (lists of messages, or texts), or chosen_steps and rejected_steps; "
    "repair or remove these rows."
)
_LAST_TAG = re.compile(r".*<(\w+)>([^<]*)</\1>\s*", re.DOTALL)

Ids = tuple[int, ...]
Messages = list[dict[str, Any]]
Question = tuple[str, str]  # data set and id


# Checked rows


@dataclass(frozen=True, slots=True)
class StepText:
    """A step as it was written. `end`: stop (at a stop string), turn (the policy ended its turn), length (cut off).

    `token_ids` are the ids that the policy sampled, with an end token or what follows a stop string in
    its last token; None if they are unknown.
    """

    prompt: Prompt
    text: str
    end: str
    token_ids: Ids | None = None


def as_ids(token_ids: list[int] | None) -> Ids | None:
    """Return the token ids of a row, None if they are unknown."""
    return None if token_ids is None else tuple(token_ids)


@dataclass(frozen=True, slots=True)
class StepSides:
    """Two steps, or two trajectories, with known ends."""

    chosen: tuple[StepText, ...]
    rejected: tuple[StepText, ...]


@dataclass(frozen=True, slots=True)
class ChatSides:
    """Two whole turns as lists of messages, TRL's conversational layout."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


@dataclass(frozen=True, slots=True)
class TextSides:
    """Two continuations of a text, TRL's standard layout."""

    prompt: str
    chosen: str
    rejected: str


Sides = StepSides | ChatSides | TextSides


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

    `margin` is the difference of the rewards, None if unknown. `depth`
    counts the steps before the decision. `group` is data set and question;
    rows without a question id are grouped by their prompt. `confidence` is
    the probability that the order is right, None if unknown.
    """

    place: str
    sides: Sides
    margin: float | None
    depth: int
    group: Question
    types: tuple[str, str] = ("", "")
    target: Target | None = None
    confidence: float | None = None


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
                label = [] if row.target is None else [row.target]
                values = [split, row.sides, row.margin, row.depth, row.group, *label]
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
    # The pairs of a run are read with its config.yaml, which says how the policy was prompted.
    if path.name == "pairs" and (path.parent / "run.json").is_file():
        path = path.parent
    if path.is_dir():
        with reading(path):
            return _read_folder(path)
    if path.is_file() or data.lower().endswith(SUFFIXES):
        return Preferences(list(pairs_in(path)), [])
    return _read_hub(data)


def _read_folder(path: Path) -> Preferences:
    """Read a run, or a folder with Parquet files, of which `config.yaml` may tell how the policy was prompted."""
    config: Config | None = None
    summary: dict[str, Any] = {}
    if (path / "run.json").exists() or (path / "journal.sqlite").exists():
        (config, summary), folder = read_run(path), path / "pairs"
    else:
        folder = path if any(path.glob("*.parquet")) else path / "data"
        if (path / "config.yaml").is_file():
            config = load_config(file=path / "config.yaml")
        if not any(folder.glob("*.parquet")):
            raise DataError(f"{path}: no run and no Parquet file in this folder; give one that has either")
        rows = [file for file in folder.iterdir() if file.name.lower().endswith(SUFFIXES)]
        warn_left_out(folder, rows, set(folder.glob("*.parquet")))
    # By its name, a file is for training unless that begins with the one of a held-out split.
    check_shards(folder)
    rows_by_split: defaultdict[str, list[CheckedRow]] = defaultdict(list)
    for file in sorted(folder.glob("*.parquet")):
        check_of_run(file, summary)
        rows_by_split[split_of(file.name)] += pairs_in(file)
    # A copied run may lack a file: training on a part of
    # the pairs would look like training on all of them.
    expected = summary.get("pairs") or {}
    for split in ("train", "test"):
        count = len(rows_by_split.get(split, []))
        if expected.get(split, count) != count:
            raise DataError(
                f"{path}: {count} {split} pairs found and {expected[split]} in run.json; write "
                f"them again with `reasonrag pairs {path}`"
            )
    prompts = (summary.get("content") or {}).get("prompts")
    card = None if config is None else PolicyCard.of(config.model_dump(mode="json"), prompts)
    return _of_splits(str(path), rows_by_split, card)


def _of_splits(source: str, rows_by_split: Mapping[str, list[CheckedRow]], card: PolicyCard | None) -> Preferences:
    if not rows_by_split.get("train"):
        names = ", ".join(quoted(split) for split, rows in rows_by_split.items() if rows)
        elsewhere = f": the split train has none, {names} has; save the one that you want as Parquet and give that file"
        few = "; build trees of more questions, or lower --min-margin or --min-confidence"
        raise DataError(f"{source}: no pairs to train on{elsewhere if names else few}")
    held_out = next((split for split in _HELD_OUT if split in rows_by_split), "")
    return Preferences(rows_by_split["train"], rows_by_split.get(held_out, []), card)


def split_of(name: str) -> str:
    """Return the held-out split that the name of a file begins with, else "train".

    >>> split_of("validation-00000-of-00001.parquet"), split_of("hotpot.parquet")
    ('validation', 'train')
    """
    word = re.match("[a-z]*", name.lower())
    return word[0] if word and word[0] in _HELD_OUT else "train"


def check_shards(folder: Path) -> None:
    """Raise DataError if a folder holds some files of `STEM-00000-of-000NN.parquet`, ..., and not all of them."""
    files = list(folder.glob("*.parquet"))
    for file in files:
        if (match := inputs.SHARD.match(file.name)) and match[3] != ".parquet":
            raise DataError(f"{file} is a copy of a file beside it, or not of this folder; move it elsewhere")
    if problem := inputs.missing_shards(files):
        raise DataError(f"{folder}: {problem}; copy the whole folder")


def check_of_run(file: Path, summary: Mapping[str, Any]) -> None:
    """Raise DataError if the `config_hash` of some pairs is not that of the `run.json` beside them."""
    if (run := summary.get("config_hash")) and "config_hash" in column_names(file):
        for batch in read_batches(file, None, columns=["config_hash"]):
            if set(batch["config_hash"].to_pylist()) - {run}:
                problem = f"{file} holds pairs of another run, not of the run.json beside it"
                raise DataError(f"{problem}; write them again with `reasonrag pairs`")


def pairs_in(path: Path) -> Iterator[CheckedRow]:
    """Yield the pairs of a file one by one.

    Raises:
        DataError: the file cannot be read or holds no pairs; or,
            at its end, some rows cannot be used, which it names.
    """
    row = None
    for row in checked_rows(path.name, raw_rows(path), RowProblems(str(path))):
        yield row
    if row is None:
        raise DataError(f"{path}: no pairs in it")


def _read_hub(data: str) -> Preferences:
    """Read a data set with a `train` split; its test or validation split is held out. Its code is never run.

    The splits and the policy card are of one commit; offline, of the commit that was fetched before.
    """
    if not (address := HUB_NAME.fullmatch(data)):
        raise DataError(f"data {quoted(data)}: no such file or folder; give a run's folder, a file, or a Hub id")
    name, revision, configuration = address.group("name", "revision", "config")
    try:
        import datasets
        import huggingface_hub

        offline = huggingface_hub.is_offline_mode()
        if not offline:  # otherwise `load_dataset` retries an unreachable Hub for half a minute, and prints about it
            huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
        patterns = ["README.md", POLICY_CARD, "prompts/*"]
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
        card = PolicyCard.read(Path(folder))
        # Offline, loading by name would take any cached revision and configuration.
        source, commit = (folder, None) if offline else (name, Path(folder).name)
        splits = datasets.load_dataset(source, configuration, revision=commit)
    except ConfigError:
        raise
    # Offline mode, sockets, HTTP statuses and damaged
    # caches raise types of their own, from three libraries.
    except Exception as error:
        raise DataError(
            f"data {quoted(data)} is no folder or file, and cannot be fetched from the Hub ({type(error).__name__}); "
            "check the name, or download it and give the Parquet or JSONL file"
        ) from error
    rows_by_split: dict[str, list[CheckedRow]] = {}
    for split in splits:
        if split == "train" or split in _HELD_OUT:
            problems = RowProblems(f"{data}, split {split}")
            rows_by_split[split] = list(checked_rows(split, enumerate(splits[split], 1), problems))
    return _of_splits(data, rows_by_split, card)


# The layouts of a row


def checked_rows(name: str, numbered: Iterable[NumberedRow], problems: RowProblems) -> Iterator[CheckedRow]:
    """Check record rows with their 1-based numbers; `name`, of a file or split, is for messages about single rows.

    Raises:
        DataError: at the end, if some rows cannot be used; it names them and gives the reasons.
    """
    for number, record in numbered:
        try:
            yield read_row(f"{name} row {number}", record)
        except Unusable as problem:
            problems.add(str(problem), number)
    problems.check(_ADVICE)


def _check_message(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise ValueError("a message needs a role and a content of text")
    return message


def _as_share(value: object) -> float | None:
    share = as_finite(value)
    return share if share is not None and 0 <= share <= 1 else None  # else a column of another tool


_Name = Annotated[Any, AfterValidator(lambda value: value if isinstance(value, str) else "")]
_Text = InstanceOf[str]  # pydantic's own text refuses half a character, which `encode` replaces
_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
_Messages = Annotated[list[Annotated[dict[str, Any], AfterValidator(_check_message)]], Field(min_length=1)]


class _Record(BaseModel):
    """What a row has to be: values of exactly these types; unknown columns are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Span(_Record):
    text: _Text
    token_ids: _TokenIds | None = None


class _Step(_Record):
    """A step and its prompt: messages, and an open turn as text, and by spans if any of its token ids are known."""

    prompt: _Messages
    prefix: _Text | None = None
    turn: list[_Span] | None = None
    text: _Text
    end: Literal["stop", "turn", "length"]
    token_ids: _TokenIds | None = None

    def checked(self) -> StepText:
        prefix = self.prefix or ""
        # Spans with token ids are the policy's words; a turn that is known as text alone is one span.
        spans = self.turn or ([_Span(text=prefix)] if prefix and self.turn is None else [])
        if "".join(span.text for span in spans) != prefix:
            raise Unusable("the spans of an open turn differ from its text")
        turn = [Span(span.text, as_ids(span.token_ids), by_policy=span.token_ids is not None) for span in spans]
        messages = tuple(Message(message["role"], message["content"]) for message in self.prompt)
        return StepText(Prompt(messages, tuple(turn)), self.text, self.end, as_ids(self.token_ids))


class _Steps(_Record):
    chosen: Annotated[list[_Step], Field(min_length=1)]
    rejected: Annotated[list[_Step], Field(min_length=1)]


class _Chats(_Record):
    prompt: _Messages
    chosen: _Messages
    rejected: _Messages

    @model_validator(mode="after")
    def _are_of_the_policy(self) -> Self:
        # A side that begins with the prompt would show it twice, and score the second copy.
        if {side[place]["role"] for side in (self.chosen, self.rejected) for place in (0, -1)} != {"assistant"}:
            raise ValueError("chosen and rejected begin or end with another role than assistant")
        return self


class _Facts(_Record):
    """Columns that rows of every layout may have."""

    margin: Annotated[float, Field(ge=0)] | None = None  # else the sides are swapped
    confidence: Annotated[Any, AfterValidator(_as_share)] = None
    depth: Annotated[int, Field(ge=0)] | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    dataset: _Name = ""
    chosen_type: _Name = ""
    rejected_type: _Name = ""

    @model_validator(mode="after")
    def _margin_is_of_rewards(self) -> Self:
        better, worse = self.chosen_reward, self.rejected_reward
        if better is None or worse is None:
            return self
        if better <= worse:
            raise ValueError("chosen_reward is not above rejected_reward")
        if self.margin is not None and not math.isclose(self.margin, better - worse, abs_tol=1e-9):
            raise ValueError("margin is not chosen_reward less rejected_reward")
        return self


def read_row(place: str, record: Any) -> CheckedRow:
    """Read one record row in any known layout; unknown columns are ignored. `place` names the row in messages.

    >>> read_row("row 1", {"prompt": "Who made Jaws? ", "chosen": "Spielberg", "rejected": "Spiel"}).sides
    TextSides(prompt='Who made Jaws? ', chosen='Spielberg', rejected='Spiel')

    Raises:
        Unusable: a column is missing, or has a value of another kind.
    """
    # A line of JSON lines may be a list, a number, or an object with the same key twice.
    if not isinstance(record, Mapping):
        raise Unusable(NO_OBJECT)
    record = _with_our_names(record)
    try:
        facts, sides = _Facts.model_validate(record), _read_sides(record)
    except ValidationError as error:
        # Only the first problem, without the numbers of list
        # entries, so that equal problems can be counted.
        problem = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(part for part in problem["loc"] if isinstance(part, str))
        reason = problem["msg"].removeprefix("Value error, ")
        raise Unusable(f"{name}: {reason}" if name else reason) from None
    except OverflowError:
        raise Unusable("a number is too large") from None
    if _is_tie(sides):
        raise Unusable("chosen and rejected are equal")
    # Without an id, the prompt stands for the question:
    # rows of one state stay in one split and one sample.
    if record.get("question_id") is None:
        prompt = sides.chosen[0].prompt if isinstance(sides, StepSides) else sides.prompt
        question = _BY_PROMPT + hashlib.sha256(json.dumps(prompt, default=_as_fields).encode()).hexdigest()[:16]
    else:
        question = text_id(record["question_id"]) or ""
        if not question:
            raise Unusable("question_id is empty, or neither a text nor a whole number")
    group, types = (valid_unicode(facts.dataset), question), (facts.chosen_type, facts.rejected_type)
    return CheckedRow(place, sides, facts.margin, facts.depth or 0, group, types, confidence=facts.confidence)


def _with_our_names(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row as it is, but of the published RAG-ProGuide and PRO-STEP with our columns.

    In the former, `prompt` is one text of the system and the user message, and `layer` the depth. The latter has
    plain texts, the depth as `step_level`, and the F1 of both sides.
    """
    system, user = record.get("instruction"), record.get("input")
    columns: dict[str, Any] = {}
    if record.get("prompt") == f"System: {system}\nUser: {user}":
        columns["prompt"] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        columns["depth"] = record.get("layer")
        for side in _SIDES:
            columns[side] = [{"role": "assistant", "content": record.get(side) or None}]
    elif record.get("step_level") is not None:
        better, worse = (as_finite(record.get(f"{side}_f1")) for side in _SIDES)
        columns = {**record, "depth": record["step_level"]}
        columns["margin"] = None if better is None or worse is None else better - worse
    else:
        return record
    for side in _SIDES:
        columns[f"{side}_type"] = _ACTIONS.get(str(record.get(f"{side}_action_type")).partition(" ")[0])
    return columns


def _read_sides(record: Mapping[str, Any]) -> Sides:
    """Choose the layout by the columns that are there, and read both sides."""
    if any(record.get(f"{side}_steps") is not None for side in _SIDES):
        return _step_sides({side: _steps_of_trajectory(record, side) for side in _SIDES})
    record = _with_prompt(record)
    if isinstance(record["chosen"], str):
        texts = [record[name] for name in ("prompt", *_SIDES)]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise Unusable("prompt, chosen and rejected are not three texts with any content")
        return TextSides(*texts)
    if record.get("tools") or record.get("chat_template_kwargs"):
        raise Unusable("tools and chat_template_kwargs are not supported")
    chats = _Chats.model_validate(record)
    # Ends are known only of steps; a whole turn ends as the chat template ends it.
    if any(record.get(f"{side}_end") is not None for side in _SIDES):
        return _step_sides({side: [_step_of_pair(record, chats.prompt, side)] for side in _SIDES})
    # Our rows have a config_hash. As a chat, one without
    # ends would be scored with an end that was not sampled.
    if record.get("config_hash") is not None:
        raise Unusable("of another version of reasonrag, without chosen_end (`reasonrag pairs` writes it again)")
    return ChatSides(chats.prompt, chats.chosen, chats.rejected)


def _with_prompt(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with a prompt. Without one, it is the messages with which both sides begin."""
    for side in _SIDES:
        if record.get(side) is None:
            raise Unusable(f"{side} missing")
    chosen, rejected = record["chosen"], record["rejected"]
    if record.get("prompt") is not None:
        return record
    shared = common_length(chosen, rejected) if isinstance(chosen, list) and isinstance(rejected, list) else 0
    if not shared:
        raise Unusable("prompt missing, and chosen and rejected begin with no common message")
    return {**record, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _step_of_pair(record: Mapping[str, Any], prompt: Messages, side: str) -> Row:
    """Return the one step of a side, in the columns of a step of a trajectory."""
    if len(record[side]) != 1 or record[side][0]["role"] != "assistant":
        raise Unusable(f"{side} is not one message of the assistant, as its end requires")
    step = {
        "text": record[side][0]["content"],
        "end": record.get(f"{side}_end"),
        "token_ids": record.get(f"{side}_token_ids"),
    }
    # A prompt with the assistant's message last leaves that turn open; TRL continues it too.
    *before, last = prompt
    if last["role"] != "assistant":
        return {**step, "prompt": prompt}
    if not before:
        raise Unusable("prompt is an open turn and nothing else")
    return {**step, "prompt": before, "prefix": last["content"], "turn": record.get("turn")}


def _steps_of_trajectory(record: Mapping[str, Any], side: str) -> Any:
    """Return the steps of a side, each with its token ids and its open turn, which have columns for themselves."""
    steps = record.get(f"{side}_steps")
    for name, column in (("token_ids", f"{side}_token_ids"), ("turn", f"{side}_turns")):
        values = record.get(column)
        if values is None or not isinstance(steps, list):
            continue
        if not isinstance(values, list) or len(values) != len(steps):
            raise Unusable(f"{column} is not a list with one entry for each step")
        steps = [{**dict(step), name: value} for step, value in zip(steps, values, strict=True)]
    return steps


def _step_sides(steps_by_side: Mapping[str, Any]) -> StepSides:
    steps = _Steps.model_validate(steps_by_side)
    return StepSides(*(tuple(step.checked() for step in side) for side in (steps.chosen, steps.rejected)))


def _is_tie(sides: Sides) -> bool:
    """Return whether both sides are the same steps; the same text may have another end."""
    if not isinstance(sides, StepSides):
        return sides.chosen == sides.rejected
    written = [[(step.text, step.end) for step in side] for side in (sides.chosen, sides.rejected)]
    return written[0] == written[1]


def _as_fields(value: Any) -> Any:
    """Return a value that JSON can hold: the fields of a slotted dataclass, the text of anything else.

    Unknown token ids of a step are left out, so that rows
    without ids keep the checksum that they always had.
    """
    if not is_dataclass(value):
        return str(value)
    values = [getattr(value, field.name) for field in fields(value)]
    return values[:-1] if isinstance(value, StepText) and value.token_ids is None else values


# Consistency of a data set


class PairRules:
    """Counts pairs of which the data set also has the reverse, and texts and questions that are in two splits.

    Args:
        repeated: what `repeated_questions` returns, if the trees are known: pairs of a question then come
            one after another, and only those of repeated questions are remembered. Otherwise prompts are
            compared, without regard to case and white space.

    Attributes:
        same_text: pairs (prompt, A, B) for which the data set also has (prompt, B, A).
        same_content: the same, with A and B compared by the text inside their last tag, normalised.
        named: the names of the first few, each with the pair that it reverses.
        rows: the number of pairs by split.
        repeats: rows that repeat an earlier one, word for word.
        texts: the first split of each question, whatever its
            ids; of unknown trees, of each prompt, as a digest.
        shared_texts: texts in two splits.

    >>> rules = PairRules()
    >>> for place, chosen, rejected in (("1", "Jo", "Al"), ("2", "Al", "JO!")):
    ...     sides = {"chosen": f"<answer>{chosen}</answer>", "rejected": f"<answer>{rejected}</answer>"}
    ...     rules.add_row("train", read_row(place, {"prompt": "Who?", **sides}))
    >>> rules.same_text, rules.same_content, rules.named
    (0, 2, [('1', '2')])
    """

    def __init__(self, repeated: Mapping[Question, Question] | None = None) -> None:
        self.same_text = self.same_content = self.repeats = 0
        self.named: list[tuple[str, str]] = []
        self.rows: Counter[str] = Counter()
        self.texts: dict[object, str] = {}
        self.shared_texts: set[object] = set()
        self._repeated = repeated
        self._question: Question | None = None
        self._lasting: defaultdict[bytes, list[str]] = defaultdict(list)  # names of pairs by what they prefer
        self._names = self._lasting
        self._split_of: dict[Question, str] = {}
        self._shared: set[Question] = set()

    def add_row(self, split: str, row: CheckedRow) -> None:
        """Add a checked row of any layout, which is in a split."""
        prompt, *sides = _texts_of(row.sides)
        # Prompts of different questions differ, so what one question prefers can be forgotten after it.
        if self._repeated is not None and self._question != row.group:
            self._question = row.group
            self._names = self._lasting if row.group in self._repeated else defaultdict(list)
        contents = [[_content(kind, text) for text in side] for kind, side in zip(row.types, sides, strict=True)]
        self.same_text += self._count_reverses(row.place, prompt, *sides)
        self.same_content += self._count_reverses(row.place, prompt, *contents)
        same = self._names[_key("row", prompt, sides)]
        same.append(row.place)
        self.repeats += len(same) > 1
        self.rows[split] += 1
        # Questions are compared by their text if it is known:
        # the same one may stand there with another id.
        text: object = short_hash(common_text("\n".join(prompt)))
        if self._repeated is not None:
            text = self._repeated.get(row.group, row.group)
        if self.texts.setdefault(text, split) != split:
            self.shared_texts.add(text)
        if self._split_of.setdefault(row.group, split) != split and not row.group[1].startswith(_BY_PROMPT):
            self._shared.add(row.group)

    def _count_reverses(self, name: str, prompt: object, chosen: object, rejected: object) -> int:
        """Return how many more pairs have their reverse in the data set."""
        same = self._names[_key(prompt, chosen, rejected)]
        same.append(name)
        if not (reverse := self._names.get(_key(prompt, rejected, chosen))):
            return 0
        two = (reverse[0], name)
        if len(self.named) < _NAMED_CONTRADICTIONS and two not in self.named:
            self.named.append(two)
        return 1 + (len(reverse) if len(same) == 1 else 0)  # the first of its kind contradicts all of its reverses

    def check_questions(self, name: str) -> int:
        """Return how many questions have pairs; raise DataError if one is in two splits. `name` is that of the data."""
        if self._shared:
            dataset, question = min(self._shared)
            of_dataset = f" of {quoted(dataset)}" if dataset else ""
            raise DataError(
                f"{name}: {len(self._shared)} questions are in both splits, the first is {quoted(question)}"
                f"{of_dataset}, so the held-out metrics would mean nothing; split by question, as build-tree does"
            )
        return len(self._split_of)

    def summary(self) -> dict[str, Any]:
        """Return the counts and the first names as JSON can hold them."""
        return {"same_text": self.same_text, "same_content": self.same_content, "named": list(map(list, self.named))}

    def __str__(self) -> str:
        """Return the number of contradictory pairs with the first names; "" without such pairs."""
        if not (count := max(self.same_text, self.same_content)):
            return ""
        named = ", ".join(f"{first} and {second}" for first, second in self.named)
        return (
            f"{count} of {self.rows.total()} pairs contradict each other, {self.same_text} of them word for word: the "
            f"same two steps after the same prompt, preferred the other way round (first: {named})"
        )


def _texts_of(sides: Sides) -> list[list[str]]:
    """Return the texts of the prompt, of the chosen side and of the rejected one."""
    if not isinstance(sides, StepSides):
        parts: list[str | Messages] = [sides.prompt, sides.chosen, sides.rejected]
        return [[part] if isinstance(part, str) else [message["content"] for message in part] for part in parts]
    state = sides.chosen[0].prompt
    prompt = [*(message.content for message in state.messages), state.prefix]
    return [prompt, [step.text for step in sides.chosen], [step.text for step in sides.rejected]]


def _content(kind: str, text: str) -> tuple[str, str]:
    """Return type and text inside the last tag, normalised; the whole step if it has none, or cannot be parsed."""
    tagged = None if kind == "malformed" else _LAST_TAG.fullmatch(text)
    if tagged is None:
        return kind, text.strip()
    return kind or tagged[1], normalize_answer(tagged[2]) or text.strip()


def _key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]
