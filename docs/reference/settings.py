"""`settings.md`: every field of the models that commands are configured by."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from docs.reference.commands import commands
from docs.reference.markdown import NOTE, cell, code
from reasonrag.cli import cli
from reasonrag.core.config import PRESETS, Config
from reasonrag.core.settings import EXECUTION
from reasonrag.core.table import Table
from reasonrag.online_rl.settings import RLSettings, rl_presets
from reasonrag.retrieval.index import IndexConfig
from reasonrag.rounds import ImproveSettings, improve_presets
from reasonrag.training.settings import DPO_PRESETS, PRM_PRESETS, SFT_PRESETS, DPOSettings, PRMSettings, SFTSettings

# The commands, their settings, and presets by name.
SETTINGS: tuple[tuple[str, type[BaseModel], dict[str, Any]], ...] = (
    ("build-tree, pairs, eval, rl plan", Config, PRESETS),
    ("dpo train", DPOSettings, DPO_PRESETS),
    ("sft train", SFTSettings, SFT_PRESETS),
    ("prm train", PRMSettings, PRM_PRESETS),
    ("improve", ImproveSettings, improve_presets("dpo")),
    ("rl train", RLSettings, rl_presets()),
    ("index build", IndexConfig, {}),
)


def settings_page() -> str:
    """Every field of every model, with the flag that sets it."""
    lines = [
        "# Settings reference",
        "",
        NOTE,
        "```bash",
        "reasonrag build-tree --preset demo --set search.c_uct=1.0 --dry-run",
        "```",
        "",
        "Defaults, then what a policy's own folder says (`reasonrag.yaml`: its format, prompts, passages per search),",
        "then `--preset`, then `--config FILE.yaml`, then `--set NAME=VALUE`, then flags: the later one counts. An",
        "unknown name is refused. Settings marked * may differ when work is resumed: they say where things lie, how",
        "fast they go and what they cost. What lies there (questions, corpus, weights) is compared by its checksum.",
        "",
        "In YAML, `no`, `off` and dates are texts. Aliases and tags are refused, and so is a key that stands twice.",
    ]
    shown: set[tuple[str, ...]] = set()
    for title, model, presets in SETTINGS:
        lines += ["", f"## {title}", ""]
        if presets:
            lines += [f"Presets: {', '.join(code(name) for name in presets)}.", ""]
        rows = []
        of_commands = flags(title)
        for name, field in fields(model):
            mark = " *" if EXECUTION in field.metadata else ""
            row = (f"`{name}`{mark}", code(of_commands.get(name, "")), _type(field), _default(field))
            rows.append((*row, cell(field.description or "")))
        new = [row for row in rows if _but_flag(row) not in shown]
        shown |= set(map(_but_flag, rows))
        as_above = f", of which {len(rows) - len(new)} are as above" if len(new) < len(rows) else ""
        lines += [f"{len(rows)} settings{as_above}.", ""]
        lines += Table("", ["setting", "flag", "type", "default", "meaning"], new).markdown(str)
    return "\n".join(lines) + "\n"


def _but_flag(row: tuple[str, ...]) -> tuple[str, ...]:
    name, _, *others = row
    return (name, *others)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every leaf."""
    for name, field in model.model_fields.items():
        inner = get_args(field.annotation)[0] if get_origin(field.annotation) is types.UnionType else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            default = field.get_default(call_default_factory=True)
            for deeper, leaf in fields(inner, f"{prefix}{name}."):
                yield deeper, _with_default(leaf, default, deeper.removeprefix(f"{prefix}{name}."))
        else:
            yield f"{prefix}{name}", field


def _with_default(field: FieldInfo, section: Any, path: str) -> FieldInfo:
    """A field with the default that the section it stands in gives it."""
    value = section
    for name in path.split("."):
        value = getattr(value, name)
    return FieldInfo.merge_field_infos(field, default=value, default_factory=None)


def flags(title: str) -> dict[str, str]:
    """The flags of some commands, by the setting that they set."""
    found: dict[str, str] = {}
    for path, command in commands(cli, ()):
        if " ".join(path) in title.split(", "):
            for option in command.params:
                if key := re.search(r"  \[([\w.]+)(?:; default: .+)?\]$", getattr(option, "help", None) or ""):
                    found.setdefault(key[1], option.opts[0])
    return found


def _type(field: FieldInfo) -> str:
    limits = [_limit(item) for item in field.metadata]
    return ", ".join([_named(field.annotation), *filter(None, limits)])


def _named(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in inner)
    if origin is Annotated:
        return _named(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_named(one) for one in inner if one is not type(None))
    if origin is tuple:
        return f"several {_named(inner[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", ByteSize: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _limit(item: Any) -> str:
    signs = {"ge": "&ge;", "gt": "&gt;", "le": "&le;", "lt": "&lt;"}
    return ", ".join(f"{sign} {getattr(item, name):g}" for name, sign in signs.items() if hasattr(item, name))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return ""
    return code(str(value).lower() if isinstance(value, bool) else str(value))
