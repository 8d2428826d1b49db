"""Safe YAML and JSON loading: plain values, bounded size, duplicate keys refused.

Readers disagree on which of two equal keys counts: Python's libraries take the last one, Arrow and the Hub refuse the
text. It is refused here, because a setting or a golden answer would be lost silently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import excerpt

MOST_CHARS = 1 << 20  # of a YAML text; PyYAML reads it in seconds
_DEEPEST = 64
_LONGEST_NUMBER = 64  # characters; `1:1:1:...` is a number of base 60, which takes quadratic time
_PLAIN = ("null", "bool", "int", "float", "seq", "map", "str")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands in it twice

    Raises:
        ValueError: it is not JSON, nested too deeply, or an object has the same key twice.
    """
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON (an `object_pairs_hook`); raise ValueError if a key stands in it twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands in it twice")
    return values


_JSON = json.JSONDecoder(object_pairs_hook=unique)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, texts, numbers, true, false and null.

    As in YAML 1.2, `no` and `off` are texts; so are dates.

    Raises:
        ValueError: it is not YAML, has an alias or the same key twice, a tag asks for another type, or it is too large:
            in characters, in depth, or in digits of a number.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has more than {MOST_CHARS:,} characters")
    try:
        return _Loader(text).get_single_data()
    # PyYAML raises nearly everything: IndexError for `!!int ""`, KeyError for `!!bool x`, RecursionError, ...
    except Exception as error:
        message = str(error).replace('in "<unicode string>", line', "in line")  # the caller names the file
        raise ValueError(" ".join(message.split()) or type(error).__name__) from error


def read_text(file: Path) -> str:
    """Return the text of a file, of which `parse_yaml` needs no more than this; raise OSError or ValueError."""
    with file.open(encoding="utf-8") as opened:
        return opened.read(MOST_CHARS + 1)


def named_path(text: str) -> Path:
    """Return the path that a person or a setting names, with `~` written out.

    Raises:
        ConfigError: it is too long, holds a null character, names an unknown user, or may not be looked at.
    """
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{excerpt(text, 80)!r} cannot be used as a path", quoting=reason) from error
    return path


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON value with every text in it changed; names of fields stay as they are."""
    if isinstance(value, Mapping):
        return {name: map_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def to_yaml(value: Any) -> str:
    """Return a value as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Refuses a text while it is composed, before values are made: a refusal costs little."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few of them can stand for billions of values
            raise yaml.YAMLError("an alias (*NAME) is not supported; write the value out")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.YAMLError(f"nested deeper than {_DEEPEST} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")):
            if len(node.value) > _LONGEST_NUMBER:
                raise yaml.YAMLError(f"a number of {len(node.value):,} characters")
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, str(key.value)
                if name in lines:
                    raise yaml.YAMLError(
                        f"the key {name[:80]!r} stands in it twice, in line {lines[name]} and in line {line}"
                    )
                lines[name] = line
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in found
        if tag.endswith((":null", ":int", ":float")) or (tag.endswith(":bool") and first in "tTfF")
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
