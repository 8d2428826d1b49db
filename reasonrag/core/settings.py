"""Settings as frozen models: defaults, then a policy's folder, a preset, a YAML file, flags and `--set a.b=c`.

A field declared by `execution` cannot change a result (paths, speed, prices): work may be
resumed with another value. Every other field is part of an identity.
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from reasonrag.core.documents import parse_yaml, read_text, to_yaml
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import DEMO_FORMATS, ModelAddress
from reasonrag.core.text import excerpt, find_secrets, one_line, valid_unicode

Tree = dict[str, Any]

POLICY_CARD = "reasonrag.yaml"
SHIPPED_PROMPTS = ("default", "brief")
OWN_PROMPTS = "prompts"
PROMPTS_FINGERPRINT = "prompts_fingerprint"
# What a policy's folder may set. A folder may come from anywhere: it can name neither code nor a path.
CARRIED = {
    "format": {"name", "prompts", "max_steps", "tool_parser"},
    "retrieval": {"top_k", "passage_order", "max_passage_chars"},
    "policy": {"max_tokens"},
}

# The shipped chat templates, with the token that ends a turn in each.
CHAT_TEMPLATES = {"gemma": "<end_of_turn>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
WITH_TOOLS = "-tools"  # the same with functions that the model may call
CHAT_TEMPLATES |= {f"{name}{WITH_TOOLS}": end for name, end in CHAT_TEMPLATES.items()}
CHAT_TEMPLATE = (
    "chat template of a model that has none, as base models have none, or instead of its own: "
    f"{', '.join(CHAT_TEMPLATES)}, or a Jinja file"
)

COMMIT = "_commit"  # ends what names a commit of the Hub in an identity, where earlier versions have none
EXECUTION = "execution"  # marks the fields that `execution` declares
# A text stands for a tuple of one text.
_ONE_OR_SEVERAL = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


@dataclass(frozen=True)
class Flag:
    """The command-line flag that sets a field.

    Its type, choices and help are those of the field. `python -m docs.reference` writes all flags into
    `commands/options.json`, so that `--help` needs none of the models.
    """

    name: str
    env: str | None = None  # an environment variable that is read if the flag is not given


def setting(default: Any, description: str, flag: str | None = None, *, env: str | None = None, **limits: float) -> Any:
    """Declare a field that can change a result, and so is part of an identity.

    Args:
        default: value if none is given.
        description: help text of the flag, and text in `docs/settings.md`.
        flag: flag that sets the field, such as `--seed`.
        env: environment variable that is read if the flag is not given.
        limits: `ge`, `gt`, `le` and `lt`, as pydantic's `Field` takes them.
    """
    field = Field(default, description=description, **limits)  # type: ignore[call-overload]
    if flag:
        field.metadata.append(Flag(flag, env))
    if isinstance(default, tuple):
        field.metadata.append(_ONE_OR_SEVERAL)
    return field


def execution(default: Any, description: str, flag: str | None = None, **options: Any) -> Any:
    """Declare a field that cannot change a result: work may be resumed with another value. See `setting`."""
    field = setting(default, description, flag, **options)
    field.metadata.append(EXECUTION)
    return field


def constants(**values: Any) -> Tree:
    """Declare the values of former settings; see `Section`."""
    return values


class Section(BaseModel):
    """A frozen group of settings. An unknown key is an error, and so is a secret in any value.

    Attributes:
        former: settings of reasonrag 0.1 that are constants now, with their values. They stay part of an identity, so
            that a run of 0.1 with these values can be resumed.
        former_execution: likewise, of settings that could not change a result.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    former: ClassVar[Tree] = {}
    former_execution: ClassVar[Tree] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_before_fields(cls, tree: Any) -> Any:
        # Before the fields are validated, because pydantic's messages quote the value, which may be a secret.
        _refuse_secrets(tree)
        return _without_former(cls, tree) if isinstance(tree, dict) else tree

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: Any) -> Any:
        # pydantic takes true for 1. Its `strict` would refuse 1e-5 too, which YAML reads as a text.
        declared = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and {int, float} & {declared, *get_args(declared)}:
            raise ValueError(f"expected a number, got {str(value).lower()}")
        return value


S = TypeVar("S", bound=Section)


def gather(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Tree:
    """Merge a preset, a file and overrides into one tree; the later ones win.

    Args:
        presets: settings by name.
        preset: a key of `presets`.
        file: YAML file with a mapping of sections.
        overrides: dotted names to values, `{"search.iterations": 32}`.

    Raises:
        ConfigError: the preset is unknown (the message has the nearest name), or the file is not YAML.
    """
    tree: Tree = {}
    if preset is not None:
        if preset not in presets:
            raise ConfigError(f"preset {preset!r} is unknown{nearest(preset, presets)}")
        merge(tree, presets[preset])
    if file is not None:
        merge(tree, read_yaml(file))
    for name, value in (overrides or {}).items():
        for key in reversed(name.split(".")):
            value = {key: value}
        merge(tree, value)
    return tree


def validate(model: type[S], tree: Mapping[str, Any]) -> S:
    """Return the settings of a tree.

    Raises:
        ConfigError: a key is unknown (the message has the nearest name), a value is out of range, or two contradict.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(model, error)) from error


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `a.b=c` of `--set` into a name and a value, which is YAML.

    >>> parse_assignment("search.iterations=32")
    ('search.iterations', 32)
    """
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():  # an unset shell variable leaves it empty
        raise ConfigError(f"--set {text[:200]!r} is not of the form section.name=value (null is no value)")
    try:
        return name.strip(), parse_yaml(value)
    except ValueError as error:
        raise ConfigError(f"--set {text[:200]!r}: {value[:200]!r} is not a YAML value", quoting=error) from error


def identity(settings: Section) -> dict[str, Any]:
    """Return the settings that can change a result, flat: `{"search.iterations": 64, ...}`."""
    return dict(_semantic(settings, ""))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], defaults: Section | None = None) -> str:
    """Describe which settings differ, for an error message; "" if none does.

    A setting that did not exist yet when `before` was written had the value that it has in `defaults`. A commit is
    compared if both name one.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
    'b: 2 there, 3 now'
    """
    known = {} if defaults is None else identity(defaults)
    before = {name: value for name, value in known.items() if name in now} | dict(before)
    unknown = {name for name in before.keys() ^ now.keys() if name.endswith(COMMIT)}
    names = sorted(name for name in (before.keys() | now.keys()) - unknown if before.get(name) != now.get(name))
    return ", ".join(f"{name}: {before.get(name)!r} there, {now.get(name)!r} now" for name in names)


def dump(settings: Section) -> str:
    """Return the resolved settings as YAML that `gather` can read."""
    return to_yaml(settings.model_dump(mode="json"))


def read_yaml(file: Path) -> Tree:
    """Read a mapping of sections from a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        tree = parse_yaml(read_text(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration {file} cannot be read", quoting=error) from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"configuration {file} holds a {type(tree).__name__}, not a mapping of sections")
    return tree or {}


def merge(tree: Tree, more: Mapping[str, Any]) -> None:
    """Merge `more` into a tree in place, section by section; `more` wins. Raise ConfigError if that loses a section."""
    for key, value in more.items():
        if key in tree and isinstance(tree[key], dict) != isinstance(value, Mapping):
            where = excerpt(str(key), 200)
            raise ConfigError(f"{where} is given both one value and settings ({where}.NAME); leave one of them out")
        if isinstance(value, Mapping) and key in tree:
            merge(tree[key], value)
        else:
            tree[key] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value


def carried_settings(address: ModelAddress) -> Tree:
    """Return the settings in `reasonrag.yaml` of a policy's folder; an empty tree without that file.

    Raises:
        ConfigError: the file sets something that a policy's folder may not set, or no demo policy speaks that format.
    """
    folder = address.folder
    if folder is None or not (folder / POLICY_CARD).is_file():
        return {}
    file = folder / POLICY_CARD
    tree = read_yaml(file)
    tree.pop(PROMPTS_FINGERPRINT, None)
    for section, values in tree.items():
        for name, value in values.items() if isinstance(values, dict) else [(None, values)]:
            known = name in CARRIED.get(section, ()) and isinstance(value, str | int)
            if not known or str(value).startswith("python:"):
                what = section if name is None else f"{section}.{name}"
                raise ConfigError(
                    f"{file}: {reprlib.repr(what)} cannot be set by a policy's folder, or not in this form; "
                    "remove it, and set it by a flag or in your own configuration"
                )
    if address.scheme == "demo" and address.rest in DEMO_FORMATS:  # one policy that speaks several formats
        merge(tree, {"format": {"name": address.rest}})
    prompts = tree.get("format", {}).get("prompts")
    if prompts == OWN_PROMPTS:
        tree["format"]["prompts"] = str(folder / OWN_PROMPTS)
    elif prompts not in (None, *SHIPPED_PROMPTS):
        raise ConfigError(
            f"{file}: prompts {reprlib.repr(prompts)} are neither shipped ({', '.join(SHIPPED_PROMPTS)}) "
            f"nor the folder {OWN_PROMPTS!r} next to the file; give them with --prompts"
        )
    return tree


def carried_fingerprint(address: ModelAddress) -> str | None:
    """Return the fingerprint of the format that a policy was trained in; None if its folder has none."""
    folder = address.folder
    if folder is None or not (folder / POLICY_CARD).is_file():
        return None
    fingerprint = read_yaml(folder / POLICY_CARD).get(PROMPTS_FINGERPRINT)
    return None if fingerprint is None else str(fingerprint)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known name, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


# A user name without a password is refused too: some servers take a token as `https://TOKEN@host`.
_URL_WITH_USER = re.compile(r"https?://[^/]*@", re.IGNORECASE)


def _refuse_secrets(value: object, *where: str) -> None:
    """Raise if a value holds a secret: settings are written to the run's folder and shown on its pages."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_secrets(str(name), *where, str(name))
            _refuse_secrets(inner, *where, str(name))
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            _refuse_secrets(inner, *where)
    elif isinstance(value, str):
        if where and where[-1].endswith("key_env") and value and not value.isidentifier():
            raise ValueError(f"{_place(where)}not a valid environment variable name; give the one that holds the key")
        if _URL_WITH_USER.search(value):
            raise ValueError(
                f"{_place(where)}the URL carries a user name or password; put a key into the variable named by "
                "api_key_env, and a password into a proxy of yours"
            )
        if found := find_secrets(value):
            raise ValueError(
                f"{_place(where)}this looks like a secret ({found[0].kind}), and settings are kept and shown; leave it "
                "out and put it into an environment variable: HF_TOKEN for the Hub, the one that api_key_env names for "
                "a model's server, REASONRAG_TOKEN for a retrieval server"
            )


def _place(where: tuple[str, ...]) -> str:
    said = excerpt(valid_unicode(".".join(where)), 200)  # pydantic cannot quote half of a character
    return f"{said}: " if where else ""


def _without_former(section: type[Section], tree: Tree) -> Tree:
    """Return the settings without former ones; raise ValueError if the value of a former one is not its constant."""
    constants = {**section.former, **section.former_execution}
    kept = {}
    for name, value in tree.items():
        if name not in constants:
            kept[name] = value
        elif not _is_constant(value, constants[name]):
            moved = f"; trainer.{name} sets it" if "trainer" in section.model_fields else ""
            raise ValueError(
                f"{name} was a setting of reasonrag 0.1 and is always {constants[name]!r} now{moved}; leave it out, or "
                "finish this work with reasonrag 0.1"
            )
    return kept


def _is_constant(value: Any, constant: Any) -> bool:
    if isinstance(constant, dict) and isinstance(value, dict):
        return all(name in constant and _is_constant(inner, constant[name]) for name, inner in value.items())
    return bool(value == constant)


def _semantic(section: Section, prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in section.former.items():
        yield f"{prefix}{name}", value
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _semantic(value, f"{prefix}{name}.")
        elif EXECUTION not in field.metadata:
            yield f"{prefix}{name}", value


def _explain(model: type[Section], error: ValidationError) -> str:
    """Describe the first problems in one line: the key, its value, the allowed values."""
    lines = []
    for problem in error.errors()[:3]:
        where = ".".join(map(str, problem["loc"]))[:200]
        if problem["type"] == "extra_forbidden":
            (*at, key), sections = map(str, problem["loc"]), dict(_sections(model))
            elsewhere = [repr(f"{place}{key}") for place, section in sections.items() if key in section.model_fields]
            parent = sections.get("".join(f"{name}." for name in at), model)
            hint = f"; did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else nearest(key, parent.model_fields)
            lines.append(f"unknown key {where!r}{hint}")
        elif (
            problem["type"] == "value_error"
        ):  # from our validators: their messages do not quote values, which may be secrets
            lines.append(": ".join(filter(None, (where, problem["msg"].removeprefix("Value error, ")))))
        else:
            lines.append(f"{where}: {problem['msg']} (found {reprlib.repr(problem['input'])})")
    return one_line("configuration: " + "; ".join(lines))


def _sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a model and the sections in it, however deep, each with what stands before the names of its settings."""
    yield at, model
    for name, field in model.model_fields.items():
        if isinstance(inner := field.annotation, type) and issubclass(inner, BaseModel):
            yield from _sections(inner, f"{at}{name}.")
