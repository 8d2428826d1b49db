"""Settings as frozen models: defaults, then a policy's folder, a preset, a YAML file, `--set a.b=c` and flags.

A field declared by `execution` cannot change a result (paths, speed, prices): work may be
resumed with another value. Every other field is part of an identity.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.text import excerpt, find_secrets, one_line, valid_unicode

Tree = dict[str, Any]
Dotted = Mapping[str, Any]  # dotted names to values, `{"search.iterations": 32}`

# The shipped chat templates, with the token that ends a turn in each.
CHAT_TEMPLATES = {
    "gemma": "<end_of_turn>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "chatml-tools": "<|im_end|>",  # with functions that the model may call
    "llama3-tools": "<|eot_id|>",
}
CHAT_TEMPLATE = (
    "chat template of a model that has none, as base models have none, or instead of its own: "
    f"{', '.join(CHAT_TEMPLATES)}, or a Jinja file"
)

MOST = 1_000_000
COMMIT = "_commit"  # ends the name of a Hub commit in an identity, which earlier versions did not write
EXECUTION = "execution"  # marks the fields that `execution` declares
# A text stands for a tuple of one text.
_ONE_OR_SEVERAL = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


# --- Declaring settings ---


class Flag(str):
    """The command-line flag that sets a field.

    Its type, choices and help are those of the field. `python -m docs.reference` writes all flags into
    `commands/options.json`, so that `--help` needs none of the models.
    """


def setting(default: Any, description: str, flag: str | None = None, **limits: float) -> Any:
    """Declare a field that can change a result, and so is part of an identity.

    Args:
        default: value if none is given.
        description: help text of the flag, and text in `docs/settings.md`.
        flag: flag that sets the field, such as `--seed`.
        limits: `ge`, `gt`, `le` and `lt`, as pydantic's `Field` takes them. Counts are at most `MOST` without `le`.
    """
    if "ge" in limits and (limits["ge"] >= 1 or type(default) is int):  # a count, which nothing can hold if it is huge
        limits.setdefault("le", MOST)
    # Flags and marks travel in the metadata of the field, which pydantic keeps and does not read.
    field = Field(default, description=description, **limits)  # type: ignore[call-overload]
    if flag:
        field.metadata.append(Flag(flag))
    if isinstance(default, tuple):
        field.metadata.append(_ONE_OR_SEVERAL)
    return field


def execution(default: Any, description: str, flag: str | None = None, **options: Any) -> Any:
    """Declare a field that cannot change a result: work may be resumed with another value. See `setting`."""
    field = setting(default, description, flag, **options)
    field.metadata.append(EXECUTION)
    return field


def price(description: str, flag: str) -> Any:
    """Declare a price, which may be unknown. See `execution`."""
    return execution(None, description, flag, ge=0, le=1e9)


def share(default: float, description: str, flag: str | None = None) -> Any:
    """Declare a share, in [0, 1], that cannot change a result. See `execution`."""
    return execution(default, description, flag, ge=0, le=1)


class Section(BaseModel):
    """A frozen group of settings. An unknown key is an error, and so is a secret in any value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_before_fields(cls, tree: Any) -> Any:
        # Before the fields are validated, because pydantic's
        # messages quote the value, which may be a secret.
        _refuse_secrets(tree)
        return tree


S = TypeVar("S", bound=Section)

# A user name without a password is refused too: some servers take a token as `https://TOKEN@host`.
_URL_WITH_KEY = re.compile(
    r"https?://(?:[^/]*@|\S*[?&](?:api[_-]?|access[_-]?|auth[_-]?)?(?:key|token|password|secret)=)", re.IGNORECASE
)


def _refuse_secrets(value: object, *names: str) -> None:
    """Raise if a value holds a secret: settings are written to the run's folder and shown on its pages."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_secrets(str(name), *names, str(name))
            _refuse_secrets(inner, *names, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_secrets(inner, *names)
    elif isinstance(value, str):
        problem = ""
        if names and names[-1].endswith("key_env") and value and not value.isidentifier():
            problem = "not a valid environment variable name; give the one that holds the key"
        elif (has_key := _URL_WITH_KEY.search(value)) or (secrets := find_secrets(value)):
            kind = (
                "the URL carries a user name or password, or a key"
                if has_key
                else f"this looks like a secret ({secrets[0].kind})"
            )
            problem = (
                f"{kind}, and settings are kept and shown; leave it out and put the key into an environment variable: "
                "HF_TOKEN for the Hub, the one that api_key_env names for a model's server, REASONRAG_TOKEN for a "
                "retrieval server"
            )
        if problem:
            place = excerpt(valid_unicode(".".join(names)), 200)  # pydantic cannot quote half of a character
            raise ValueError(f"{place}: {problem}" if place else problem)


# --- Reading settings ---


def gather(
    presets: Mapping[str, Tree], *, preset: str | None = None, file: Path | None = None, overrides: Dotted | None = None
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
        # "search.iterations" becomes {"search": {"iterations": value}}, from the inside out.
        for part in reversed(name.split(".")):
            value = {part: value}
        merge(tree, value)
    return tree


def merge(tree: Tree, more: Mapping[str, Any]) -> None:
    """Merge `more` into a tree in place, section by section; `more` wins."""
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
            merge(tree[name], value)
        else:
            # Presets are shared by all calls, and a later merge would change them.
            tree[name] = copy.deepcopy(value)


def expect(kind: type[Section], settings: object) -> None:
    """Raise ConfigError if settings that a script gives are not of a kind."""
    if not isinstance(settings, kind):
        name = kind.__name__
        raise ConfigError(
            f"a {type(settings).__name__} is not a {name}; make one with {name}(...), or as docs/extend.md does"
        )


def validate(model: type[S], tree: Mapping[str, Any]) -> S:
    """Return the settings of a tree.

    Raises:
        ConfigError: a key is unknown (the message has the nearest
            name), a value is out of range, or two contradict.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]  # the others often follow from it
    name = ".".join(map(str, problem["loc"]))[:200]
    if problem["type"] == "extra_forbidden":
        known = [*_names(model)]
        nested = "; in YAML, nest its parts instead of writing dots"
        advice = nested if name in known else nearest(name, known, "docs/settings.md has all")
        message = f"unknown key {name!r}{advice}"
    elif problem["type"] == "value_error":  # ours: these messages do not quote values, which may be secrets
        message = ": ".join(filter(None, (name, problem["msg"].removeprefix("Value error, "))))
    else:
        message = f"{name}: {problem['msg']} (found {reprlib.repr(problem['input'])})"
    raise ConfigError(one_line(f"configuration: {message}"))


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the sections and settings of a model."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{prefix}{name}.")


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


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest known name, or else all of them, or `otherwise`."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; {otherwise or 'known: ' + ', '.join(known)}"


def named_path(text: str) -> Path:
    """Return the path that a person or a setting names, with `~` written out.

    Raises:
        ConfigError: it is too long, holds a null character,
            names an unknown user or a variable, or may not be looked at.
    """
    try:
        if text.startswith("$"):
            raise ValueError("variables are a shell's, and are not written out here; write the path")
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{excerpt(text, 80)!r} cannot be used as a path", quoting=reason) from error
    return path


def refuse_links(folder: Path, part: str = "") -> None:
    """Raise RunError if a folder, or a part of it, holds a pipe, a device, or a link that leads out of the folder.

    Folders come from others, too: through such a link a command would read or overwrite any file of the user.
    The folder itself may be a link. In the cache of the Hub, links may lead to its blobs.
    """
    allowed = [folder.resolve()]
    allowed += [parent.parent / "blobs" for parent in allowed[0].parents if parent.name == "snapshots"]
    for place, folders, files in itertools.chain([(str(folder), [part], [])], os.walk(folder / part)):
        for path in (Path(place, name) for name in (*folders, *files)):
            try:
                mode = path.lstat().st_mode
            except OSError:  # another process has deleted it
                continue
            target = Path(os.path.realpath(path))  # of a circle, the link itself, which leads nowhere
            leads_out = stat.S_ISLNK(mode) and not any(target.is_relative_to(place) for place in allowed)
            if leads_out or not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = f"link that leads out of {folder}" if leads_out else "pipe or a device"
                raise RunError(f"{path} is a {kind}; delete it, or put a copy of what you want there in its place")


# --- Comparing settings ---


def identity(settings: Section, prefix: str = "") -> dict[str, Any]:
    """Return the settings that can change a result, flat: `{"search.iterations": 64, ...}`."""
    names: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Section):
            names |= identity(value, f"{prefix}{name}.")
        elif EXECUTION not in field.metadata:
            names[f"{prefix}{name}"] = value
    return names


def differences(before: Mapping[str, Any], now: Mapping[str, Any], defaults: Section | None = None) -> str:
    """Describe which settings differ, for an error message; "" if none does.

    A setting that did not exist yet when `before` was written had the value that it has in `defaults`. A
    commit is compared if both name one.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
    'b: 2 there, 3 now'
    """
    known = {} if defaults is None else identity(defaults)
    before = {name: value for name, value in known.items() if name in now} | dict(before)
    unknown = {name for name in before.keys() ^ now.keys() if name.endswith(COMMIT)}
    names = sorted(name for name in (before.keys() | now.keys()) - unknown if before.get(name) != now.get(name))
    return ", ".join(f"{name}: {before.get(name)!r} there, {now.get(name)!r} now" for name in names)


# --- YAML ---

MOST_CHARS = 1 << 20  # of a YAML text; PyYAML reads it in seconds
_LONGEST_NUMBER = 64  # characters; `1:1:1:...` is a number of base 60, which takes quadratic time


def dump(settings: Section) -> str:
    """Return the resolved settings as YAML that `gather` can read."""
    return to_yaml(settings.model_dump(mode="json"))


def to_yaml(value: Any) -> str:
    """Return a value as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(file: Path) -> Tree:
    """Read a mapping of sections from a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            tree = parse_yaml(opened.read(MOST_CHARS + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration {file} cannot be read", quoting=error) from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"configuration {file} holds a {type(tree).__name__}, not a mapping of sections")
    return tree or {}


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, texts, numbers, true, false and null.

    As in YAML 1.2, `no` and `off` are texts; so are dates.

    Raises:
        ValueError: it is not YAML, too large, or has an alias, a tag, or the same key twice.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has more than {MOST_CHARS:,} characters")
    try:
        return _Loader(text).get_single_data()
    except Exception as error:  # PyYAML raises nearly everything: KeyError, ValueError, RecursionError, ...
        message = str(error).replace('in "<unicode string>", line', "in line")  # the caller names the file
        raise ValueError(one_line(message) or type(error).__name__) from error


class _Loader(yaml.SafeLoader):
    """Refuses a text while it is composed, before values are made: a refusal costs little."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):  # a few of them can stand for billions of values
            raise yaml.YAMLError("an alias (*NAME) is not supported; write the value out")
        if getattr(event, "tag", None):  # it would ask for another type
            raise yaml.YAMLError(f"the tag {event.tag[:80]!r} is not supported; leave it out")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            if len(node.value) > _LONGEST_NUMBER:
                raise yaml.YAMLError(f"a number of {len(node.value):,} characters")
        elif isinstance(node, yaml.MappingNode):
            # Libraries disagree on which of two equal keys counts, and a setting would be lost silently.
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    places = f"in line {lines[name]} and in line {line}"
                    raise yaml.YAMLError(f"the key {name[:80]!r} stands in it twice, {places}")
                lines[name] = line
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# As in YAML 1.2: `yes`, `no`, `on`, `off`, dates, merge keys, 010 and 12:30 stay texts, and 1e-5 is a number.
_Loader.yaml_implicit_resolvers = {}
for _tag, _first, _pattern in (
    ("null", ["~", "n", "N", ""], "~|null|Null|NULL|"),
    ("bool", list("tTfF"), "true|True|TRUE|false|False|FALSE"),
    ("int", list("-+0123456789"), "[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
    ("float", list("-+.0123456789"), r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.inf|\.nan"),
):
    for _class in (_Loader, _Dumper):  # a text that would be read as a number is written in quotes
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
