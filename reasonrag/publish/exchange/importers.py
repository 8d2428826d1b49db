"""Published preferences to a folder of pairs: TRL's layouts, and the RAG-ProGuide rows (arXiv:2505.14069) both ways.

Every row is written down as lists of messages and then passes the checks of `dpo train --data` (`dpo.preferences`), so
what is imported can be trained on. Columns of `tables.pair_schema` that the source lacks stay null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import DataError, RunError
from reasonrag.core.secrets import redact_data
from reasonrag.core.text import common_length, valid_unicode
from reasonrag.core.types import as_finite
from reasonrag.dpo.contradictions import Contradictions
from reasonrag.dpo.preferences import Unusable, messages, read_row
from reasonrag.publish.exchange.exporters import output, write_json_lines
from reasonrag.storage.parquet import Row, ShardWriter
from reasonrag.storage.records import NO_OBJECT, RowProblems, raw_rows, text_id
from reasonrag.storage.tables import pair_schema

if TYPE_CHECKING:
    import pyarrow as pa

SET_ASIDE = "set_aside.jsonl"

Log = Callable[[str], object]

_SHARD_ROWS = 50_000
_IMPORTED = "pairs.json"  # `reasonrag pairs --out` writes a file of this name beside its pairs, too
_COLUMNS = ("prompt", "chosen", "rejected")
_INT32 = range(-(2**31), 2**31)
_WHOLE_WORDS = re.compile(r"(?s:.*\s)?")
_PROGUIDE_ACTIONS = {
    "Query Generation": "query",
    "Evidence Extraction": "evidence",
    "Answer Generation": "answer",
    "Other": "malformed",
}


def import_trl(source: Path, out: Path, *, test: Path | None = None, log: Log = print) -> dict[str, int]:
    """Write preferences in one of TRL's layouts as a folder of pairs; see `import_rows`."""
    return import_rows(source, out, from_trl, test=test, log=log)


def import_proguide(source: Path, out: Path, *, test: Path | None = None, log: Log = print) -> dict[str, int]:
    """Write RAG-ProGuide rows as a folder of pairs; see `import_rows`.

    Returns:
        Also `not_restored`: the rows that `to_proguide` would not give back unchanged, because they have further fields
        or fields that do not follow from their texts.
    """
    not_restored = 0

    def read_and_count(raw: Mapping[str, Any]) -> Row:
        nonlocal not_restored
        pair = from_proguide(raw)
        not_restored += to_proguide(pair) != raw
        return pair

    return import_rows(source, out, read_and_count, test=test, log=log) | {"not_restored": not_restored}


def import_rows(
    source: Path,
    out: Path,
    read: Callable[[Mapping[str, Any]], Row],
    *,
    test: Path | None = None,
    log: Log = print,
) -> dict[str, int]:
    """Write a file's pairs to `out/train-*.parquet`, those of a held-out file to `out/test-*.parquet`.

    Unusable rows are set aside: `set_aside.jsonl` holds each one, with its number and the reason. Secrets are replaced
    in all rows. A single file is not split, because rows that name no question cannot be split by question.

    Args:
        source: a .jsonl(.gz, .zst), .json (one list) or .parquet file.
        out: see `exporters.output`.
        read: returns a row of `tables.pair_schema`, or raises `Unusable`.
        test: a held-out file of the same layout.
        log: receives a warning that names the first pairs that contradict each other.

    Returns:
        Rows by split, the number of rows `set_aside`, and of pairs that are `contradictory`. These are kept.

    Raises:
        DataError: a file cannot be read, or none of its rows is usable (the rows are named).
        RunError: see `exporters.output`.
    """
    files = {"train": source} if test is None else {"train": source, "test": test}
    for file in files.values():
        if file.resolve().parent == out.resolve():
            raise RunError(f"{file} lies in {out}, the folder to be written; choose a new one for --out")
    set_aside: list[Row] = []
    contradictions = Contradictions()
    with output(out, _IMPORTED, "train-*.parquet", "test-*.parquet", SET_ASIDE) as counts:
        for split, file in files.items():
            writer = ShardWriter(out, split, pair_schema(), shard_rows=_SHARD_ROWS)
            problems = RowProblems(str(file))
            for number, given in raw_rows(file):
                raw = redact_data(given, "an imported row")
                try:
                    if not isinstance(raw, dict):
                        raise Unusable(NO_OBJECT)
                    pair = read(raw)
                    contradictions.add_row(read_row(f"{file.name} row {number}", pair))
                    writer.add(pair)
                except Unusable as reason:
                    problems.add(str(reason), number)
                    set_aside.append({"file": file.name, "row": number, "reason": str(reason), "given": raw})
            if not writer.rows:
                problems.check("No other rows are in it, so there is nothing to import.")
                raise DataError(f"{file}: no rows in it")
            writer.close()
            counts[split] = writer.rows
        counts["set_aside"] = write_json_lines(out / SET_ASIDE, set_aside)
        counts["contradictory"] = contradictions.same_content
    if text := str(contradictions):
        log(f"warning: {text}; all are kept")
    return counts


def from_trl(raw: Mapping[str, Any]) -> Row:
    """Return a row in one of TRL's layouts as one of `tables.pair_schema`.

    Layouts are lists of messages or plain texts, with a prompt or without one. A plain prompt becomes a user message, a
    plain completion a message of the assistant. A missing prompt is the common beginning of chosen and rejected: whole
    messages, or text up to the last white space, so that no word is cut.

    >>> pair = from_trl({"chosen": "Who made Jaws? Spielberg", "rejected": "Who made Jaws? Spiel"})
    >>> pair["prompt"], pair["chosen"]
    ([{'role': 'user', 'content': 'Who made Jaws? '}], [{'role': 'assistant', 'content': 'Spielberg'}])

    Raises:
        Unusable: the row holds no preference, or one that the table cannot hold.
    """
    if any(raw.get(name) for name in ("tools", "chat_template_kwargs")):
        raise Unusable("tools and chat_template_kwargs have no place in a pair")
    pair: Row = dict.fromkeys(pair_schema().names)
    pair |= _conversation(*(raw.get(name) for name in _COLUMNS)) | _provenance(raw)
    if not any(message["content"].strip() for message in pair["prompt"]):
        raise Unusable("prompt is empty, or chosen and rejected have no beginning in common")
    read_row("", pair)
    return pair


def from_proguide(raw: Mapping[str, Any]) -> Row:
    """Return a RAG-ProGuide row as one of `tables.pair_schema`; `layer` is the depth: steps before the decision.

    `prompt` and the contents follow from the texts, so they are not kept.

    Raises:
        Unusable: a text is missing or empty, both sides are equal, or a type or the layer is invalid.
    """
    texts = {name: _text(raw, name) for name in ("instruction", "input", "chosen", "rejected")}
    types: Row = {}
    for side in ("chosen", "rejected"):
        action = raw.get(f"{side}_action_type")
        if not isinstance(action, str) or action not in _PROGUIDE_ACTIONS:
            raise Unusable(f"{side}_action_type is none of {', '.join(_PROGUIDE_ACTIONS)}")
        types[f"{side}_type"] = _PROGUIDE_ACTIONS[action]
    if types["chosen_type"] == "malformed":
        raise Unusable("chosen_action_type is Other, and a step without an action is never chosen")
    layer = raw.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < 2**31:
        raise Unusable("layer is no count of steps")
    prompt = [_message("system", texts["instruction"]), _message("user", texts["input"])]
    sides = {side: [_message("assistant", texts[side])] for side in ("chosen", "rejected")}
    return from_trl({"prompt": prompt, **sides, **types, "depth": layer})


def to_proguide(pair: Row) -> Row:
    """Return the official fields of a pair whose prompt is a system and a user message, in their order.

    The published file is one JSON list with the fields that `preference_data_generatoin.py` of wlzhang2020/ReasonRAG
    writes.

    >>> asked = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "Who?"}]
    >>> chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("<answer> A </answer>", "B"))
    >>> to_proguide(from_trl({"prompt": asked, "chosen": chosen, "rejected": rejected}))["chosen_content"]
    'A'
    """
    instruction, asked = (message["content"] for message in pair["prompt"])
    chosen, rejected = pair["chosen"][0]["content"], pair["rejected"][0]["content"]
    return {
        "instruction": instruction,
        "input": asked,
        "prompt": f"System: {instruction}\nUser: {asked}",
        "chosen": chosen,
        "rejected": rejected,
        "chosen_action_type": _action_type(chosen),
        "chosen_content": _content(chosen),
        "rejected_action_type": _action_type(rejected),
        "rejected_content": _content(rejected),
        "layer": pair["depth"],
    }


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"{name} missing or empty")
    if valid_unicode(value) != value:
        raise Unusable(f"{name} holds half of a surrogate pair")
    return value


# The type goes by the first of these tags that opens, the content by the first that closes, in another order: so it is
# in the published rows.
def _action_type(response: str) -> str:
    for name, tag in _PROGUIDE_ACTIONS.items():
        if f"<{tag}>" in response:
            return name
    return "Other"


def _content(response: str) -> str:
    for tag in ("answer", "query", "evidence"):
        if closed := re.search(f"<{tag}>(.*?)</{tag}>", response, re.DOTALL):
            return closed[1].strip()
    return ""


def _conversation(prompt: object, chosen: object, rejected: object) -> Row:
    """Return the three columns as lists of messages."""
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        chosen, rejected = valid_unicode(chosen), valid_unicode(rejected)
        if prompt is None:
            words = _WHOLE_WORDS.match(chosen[: common_length(chosen, rejected)])
            prompt = words[0] if words else ""
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        asked = [_message("user", prompt)]
        sides = [[_message("assistant", chosen)], [_message("assistant", rejected)]]
    elif isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, list | None):
        sides = [_plain_messages("chosen", chosen), _plain_messages("rejected", rejected)]
        if prompt is None:
            shared = common_length(*sides)
            asked, sides = sides[0][:shared], [side[shared:] for side in sides]
        else:
            asked = _plain_messages("prompt", prompt)
    else:
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    return {"prompt": asked, "chosen": sides[0], "rejected": sides[1]}


def _message(role: str, content: str) -> Row:
    return {"role": role, "content": valid_unicode(content)}


def _plain_messages(name: str, value: list[Any]) -> list[Row]:
    plain = []
    for message in messages(name, value):
        if any(message[further] for further in message.keys() - {"role", "content"}):
            raise Unusable(f"{name} has a message with more than a role and a content")
        plain.append(_message(valid_unicode(message["role"]), message["content"]))
    return plain


def _provenance(raw: Mapping[str, Any]) -> Row:
    """Return the columns of `tables.pair_schema` that the row has, checked for their types."""
    known: Row = {}
    for field in pair_schema():
        value = raw.get(field.name)
        if field.name not in _COLUMNS and value is not None:
            known[field.name] = _value(field.name, field.type, value)
    return known


def _value(name: str, type: pa.DataType, value: Any) -> Any:
    kind = str(type)
    if name == "question_id" and (id := text_id(value)):
        return id
    if isinstance(value, list) and kind.startswith("list"):
        return [_value(name, type.value_type, item) for item in value]
    if isinstance(value, dict) and kind.startswith("struct"):
        known = {field.name: (field.type, value.get(field.name)) for field in type}
        return {key: None if part is None else _value(name, of, part) for key, (of, part) in known.items()}
    if kind == "string" and isinstance(value, str):
        return valid_unicode(value)
    if kind == "int32" and isinstance(value, int) and not isinstance(value, bool) and value in _INT32:
        return value
    if kind == "double" and (number := as_finite(value)) is not None:
        return number
    raise Unusable(f"{name} is no {'text' if kind == 'string' else 'number that fits'}")
