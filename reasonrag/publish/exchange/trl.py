"""Preference sets in TRL's layouts to pairs: lists of messages or plain texts, with a prompt or without one.

A pair's table holds messages, so a plain prompt becomes what the user says and a plain completion what the assistant
says. Where there is no prompt, it is what chosen and rejected have in common at their beginning: whole messages, or
text up to the last white space, so that no word is cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from reasonrag.core.text import valid_unicode
from reasonrag.publish.exchange.base import Unusable, import_rows, text_pair
from reasonrag.storage.parquet import Row
from reasonrag.storage.records import text_id
from reasonrag.storage.tables import pair_schema

_LAYOUT = ("prompt", "chosen", "rejected")
_ENDS = {"chosen_end", "rejected_end"}
_INT32 = range(-(2**31), 2**31)
_WHOLE_WORDS = re.compile(r"(?s:.*\s)?")


def import_pairs(source: Path, out: Path, *, test: Path | None = None) -> dict[str, int]:
    """Write preferences as a folder of pairs. Columns of `tables.pair_schema` are kept, missing ones stay null.

    Args:
        source: a .jsonl(.gz, .zst), .json or .parquet file with `chosen`, `rejected` and mostly `prompt`.
        out: folder for the pairs, see `base.import_rows`.
        test: held-out rows of the same layout.

    Returns:
        Rows by split, and those set aside.

    Raises:
        DataError, RunError: see `base.import_rows`.
    """
    return import_rows(source, out, from_trl, test=test)


def from_trl(raw: Mapping[str, Any]) -> Row:
    """A row in one of TRL's layouts as one of `tables.pair_schema`.

    >>> pair = from_trl({"chosen": "Who made Jaws? Spielberg", "rejected": "Who made Jaws? Spiel"})
    >>> pair["prompt"], pair["chosen"]
    ([{'role': 'user', 'content': 'Who made Jaws? '}], [{'role': 'assistant', 'content': 'Spielberg'}])

    Raises:
        Unusable: no preference in it, or one that the table cannot hold.
    """
    if any(raw.get(name) for name in ("tools", "chat_template_kwargs")):
        raise Unusable("tools and chat_template_kwargs have no place in a pair")
    prompt, chosen, rejected = (raw.get(name) for name in _LAYOUT)
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        pair = _of_texts(prompt, chosen, rejected)
    elif isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, list | None):
        pair = _of_messages(prompt, chosen, rejected)
    else:
        raise Unusable("prompt, chosen and rejected are neither all texts nor all lists of messages")
    if not any(message["content"].strip() for message in pair["prompt"]):
        raise Unusable("prompt is empty, or chosen and rejected have no beginning in common")
    pair |= _provenance(raw)
    for side in ("chosen", "rejected"):
        if pair[f"{side}_end"] is None:
            if not any(message["content"].strip() for message in pair[side]):
                raise Unusable(f"{side} is empty")
        elif [message["role"] for message in pair[side]] != ["assistant"]:  # an empty turn was ended all the same
            raise Unusable(f"{side} is not one message of the assistant, as its end says")
    if pair["chosen"] == pair["rejected"]:
        raise Unusable("chosen and rejected are equal")
    return pair


def _of_texts(prompt: str | None, chosen: str, rejected: str) -> Row:
    chosen, rejected = valid_unicode(chosen), valid_unicode(rejected)
    if prompt is None:
        words = _WHOLE_WORDS.match(chosen[: _shared(chosen, rejected)])
        prompt = words[0] if words else ""
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return text_pair([{"role": "user", "content": valid_unicode(prompt)}], chosen, rejected)


def _of_messages(prompt: list[Any] | None, chosen: list[Any], rejected: list[Any]) -> Row:
    sides = [_messages("chosen", chosen), _messages("rejected", rejected)]
    if prompt is None:
        shared = _shared(*sides)
        asked, sides = sides[0][:shared], [side[shared:] for side in sides]
    else:
        asked = _messages("prompt", prompt)
    return text_pair(asked, "", "") | {"chosen": sides[0], "rejected": sides[1]}


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many items two sequences begin with in common."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))


def _messages(name: str, value: list[Any]) -> list[Row]:
    messages = []
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise Unusable(f"{name} holds something else than messages with a role and a content of text")
        if any(message[further] for further in message.keys() - {"role", "content"}):
            raise Unusable(f"{name} has a message with more than a role and a content")
        messages.append({key: valid_unicode(message[key]) for key in ("role", "content")})
    return messages


def _provenance(raw: Mapping[str, Any]) -> Row:
    known: Row = {}
    for field in pair_schema():
        value = raw.get(field.name)
        if field.name not in _LAYOUT and value is not None:
            known[field.name] = _value(field.name, str(field.type), value)
    ends = [known.get(name) for name in _ENDS]
    if any(ends) and not all(end in ("stop", "turn", "length") for end in ends):
        raise Unusable("chosen_end and rejected_end are not both one of stop, turn, length")
    if known.get("depth", 0) < 0:
        raise Unusable("depth is no count of steps")
    return known


def _value(name: str, kind: str, value: Any) -> Any:
    if name == "question_id" and (id := text_id(value)):
        return id
    if kind == "string" and isinstance(value, str):
        return valid_unicode(value)
    if kind == "int32" and isinstance(value, int) and not isinstance(value, bool) and value in _INT32:
        return value
    if kind == "double" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise Unusable(f"{name} is no {'text' if kind == 'string' else 'number that fits'}")
