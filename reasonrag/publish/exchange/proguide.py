"""The published RAG-ProGuide rows (arXiv:2505.14069) to pairs, and back.

The file is one JSON list; the fields are those that `preference_data_generatoin.py` of wlzhang2020/ReasonRAG writes.
`prompt`, the types and the contents follow from the texts, so only texts and `layer` are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reasonrag.publish.exchange.base import Unusable, import_rows, text_pair
from reasonrag.storage.parquet import Row

_ACTIONS = {
    "Query Generation": "query",
    "Evidence Extraction": "evidence",
    "Answer Generation": "answer",
    "Other": "malformed",
}
_TYPE_OF_TAG = {action: name for name, action in _ACTIONS.items()}


def import_pairs(source: Path, out: Path, *, test: Path | None = None) -> dict[str, int]:
    """Write RAG-ProGuide rows as a folder of pairs; rewards, visits and ids stay null, as the source has none.

    Args:
        source: the JSON list; JSON lines and Parquet of the same fields are read too.
        out: folder for the pairs, see `base.import_rows`.
        test: held-out rows of the same fields.

    Returns:
        Rows by split, those set aside, and under `not_restored` those that `to_proguide` would give back otherwise:
        they have further fields, or some that do not follow from their texts.

    Raises:
        DataError, RunError: see `base.import_rows`.
    """
    not_restored = 0

    def pair(raw: Mapping[str, Any]) -> Row:
        nonlocal not_restored
        made = from_proguide(raw)
        not_restored += to_proguide(made) != raw
        return made

    return import_rows(source, out, pair, test=test) | {"not_restored": not_restored}


def from_proguide(raw: Mapping[str, Any]) -> Row:
    """A RAG-ProGuide row as one of `tables.pair_schema`. `layer` is the depth: steps before the decision.

    Raises:
        Unusable: a text is missing or empty, both sides are equal, or a type or the layer is not one.
    """
    texts = {name: _text(raw, name) for name in ("instruction", "input", "chosen", "rejected")}
    if texts["chosen"] == texts["rejected"]:
        raise Unusable("chosen and rejected are equal")
    types = {f"{side}_type": _action(raw, f"{side}_action_type") for side in ("chosen", "rejected")}
    if types["chosen_type"] == "malformed":
        raise Unusable("chosen_action_type is Other, and a step without an action is never chosen")
    layer = raw.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < 2**31:
        raise Unusable("layer is no count of steps")
    prompt = [{"role": "system", "content": texts["instruction"]}, {"role": "user", "content": texts["input"]}]
    return text_pair(prompt, texts["chosen"], texts["rejected"]) | types | {"depth": layer}


def to_proguide(pair: Row) -> Row:
    """The official fields of a pair whose prompt is a system and a user message, in their order.

    >>> asked = [{"content": "Reason."}, {"content": "Who?"}]
    >>> to_proguide(text_pair(asked, "<answer> A </answer>", "B"))["chosen_content"]
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
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise Unusable(f"{name} holds half of a surrogate pair")
    return value


def _action(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or value not in _ACTIONS:
        raise Unusable(f"{name} is none of {', '.join(_ACTIONS)}")
    return _ACTIONS[value]


def _action_type(response: str) -> str:
    tag = next((tag for tag in ("query", "evidence", "answer") if f"<{tag}>" in response), "malformed")
    return _TYPE_OF_TAG[tag]


def _content(response: str) -> str:
    for tag in ("answer", "query", "evidence"):
        if found := re.search(f"<{tag}>(.*?)</{tag}>", response, re.DOTALL):
            return found[1].strip()
    return ""
