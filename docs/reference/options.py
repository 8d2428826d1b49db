"""`reasonrag/commands/options.json`: what `--help` needs to know of settings, so that it imports neither."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from docs.reference.settings import SETTINGS, fields
from reasonrag.core.serving import ListenSettings
from reasonrag.core.settings import Flag
from reasonrag.online_rl.settings import PlanSettings
from reasonrag.retrieval.server import ServeSettings

_TYPES = {str: "text", ByteSize: "text", int: "integer", float: "number", bool: "boolean"}


def options_json() -> str:
    """Return the file: flags and presets by model."""
    flags = {model.__name__: _flags(model) for _, model, _ in SETTINGS}
    flags |= {model.__name__: _flags(model) for model in (ServeSettings, ListenSettings, PlanSettings)}
    presets = {model.__name__: sorted(presets) for _, model, presets in SETTINGS if presets}
    return json.dumps({"flags": flags, "presets": presets}, indent=1, ensure_ascii=False) + "\n"


def _flags(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    flags = {}
    for key, field in fields(model):
        for flag in (item for item in field.metadata if isinstance(item, Flag)):
            flags[key] = _described(flag, field)
    return flags


def _described(flag: Flag, field: FieldInfo) -> dict[str, Any]:
    kind, several = _type(field.annotation)
    text = f"{field.description}{' (repeatable)' if several else ''}"
    text += "" if text.endswith("...") else "."
    default = field.get_default(call_default_factory=True)
    entry: dict[str, Any] = {"flag": flag, "type": kind, "help": text[0].upper() + text[1:]}
    entry["default"] = "" if default is None or default is False or default == () else f"; default: {default}"
    return entry | ({"several": True} if several else {})


def _type(annotation: Any) -> tuple[str | list[str], bool]:
    """Return the type of one value, or its choices, and whether the flag is repeatable."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        (annotation,) = (one for one in inner if one is not type(None))
        return _type(annotation)
    if origin is tuple:
        return _type(inner[0])[0], True
    if origin is Literal:
        return list(inner), False
    return _TYPES[annotation], False
