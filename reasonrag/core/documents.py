"""YAML and JSON that people and other programs wrote: plain values, at a bounded cost, and no key twice.

Where a key stands twice, readers disagree on which value counts: Python and YAML's libraries take the last one, Arrow
and the Hub refuse the text. Here it is refused, as a setting or a golden answer would be lost without a word.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from reasonrag.core.errors import ConfigError
from reasonrag.core.secrets import excerpt

MOST_CHARS = 1 << 20  # of a YAML text; PyYAML reads it in seconds
_MOST_VALUES = 50_000  # each use of an alias counts with all that it stands for
_DEEPEST = 64
_LONGEST_NUMBER = 64  # characters; `1:1:1:...` is a number of base 60, which takes quadratic time
_PLAIN = ("null", "bool", "int", "float", "seq", "map", "str")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands in it twice

    Raises:
        ValueError: it is no JSON, nested too deeply, or a key stands twice in one object.
    """
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON (an `object_pairs_hook`); raise ValueError if a key stands in it twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} stands in it twice")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=unique)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, texts, numbers, true, false and null.

    As in YAML 1.2, `no` and `off` are texts; so are dates. Aliases and merge keys work.

    Raises:
        ValueError: it is no YAML, a key stands twice, a tag asks for another type, or it is too large: in characters,
            in values with aliases written out, in depth, or in digits of a number.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has more than {MOST_CHARS:,} characters")
    try:
        return _Loader(text).get_single_data()
    # PyYAML raises nearly everything: IndexError for `!!int ""`, KeyError for `!!bool x`, RecursionError, ...
    except Exception as error:
        said = str(error).replace('in "<unicode string>", line', "in line")  # who calls this names the file
        raise ValueError(" ".join(said.split()) or type(error).__name__) from error


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
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Counts while it composes, before a value is made: what is refused has cost little."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[yaml.Node, int] = {}  # values in each finished node, aliases written out

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        before, is_alias = self._values, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"nested deeper than {_DEEPEST} levels")
        node = cast(yaml.Node, super().compose_node(parent, index))
        self._depth -= 1
        if is_alias and node not in self._sizes:
            self._refuse("an alias stands for what it is part of")
        self._values += self._sizes[node] if is_alias else 1
        if self._values > _MOST_VALUES:
            self._refuse(f"more than {_MOST_VALUES:,} values, with aliases written out")
        if isinstance(node, yaml.ScalarNode):
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                self._refuse(f"a number of {len(node.value):,} characters")
        elif isinstance(node, yaml.MappingNode) and not is_alias:
            self._check_keys(node)
        self._sizes[node] = self._values - before
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                self._refuse(f"the key {name[:80]!r} stands in it twice, in line {lines[name]} and in line {line}")
            lines[name] = line

    def _refuse(self, why: str) -> None:
        raise yaml.YAMLError(why)


_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in found
        if tag.endswith((":null", ":int", ":float", ":merge")) or (tag.endswith(":bool") and first in "tTfF")
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
