"""Cards: rendered from templates in which every foreign text is inert, and merged into the card that is there.

Our part of a card's text stands between two HTML comments; everything around them is other people's. The first one
also holds a checksum of each YAML value that we wrote, so that the next publishing knows which ones a person has
changed since, and keeps those.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import inert, one_line, printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from yaml import MappingNode, SafeLoader

Yaml = dict[str, Any]

# Marks, links (`www.` is one, a version is none), mathematics; tags are written as entities.
_MARKUP = re.compile(r"([\\`*_{}\[\]!|~$^:@]|\.(?=\D))")
_CELL_CHARS = 200
_BLOCK = re.compile(r"<!-- reasonrag:begin([^>\n]*)-->.*?<!-- reasonrag:end -->", re.DOTALL)
_COMMENT = re.compile(r"<!-- reasonrag:(?:begin|end)")
_NAMED = ("configs", "dataset_info")  # lists of mappings with a `config_name`, merged by it


def render(template: str, **values: Any) -> str:
    """A template's text. What it prints is escaped, unless it went through `fenced`; what is missing is "unknown".

    Raises:
        DataError: a value is of another kind than the template expects.
    """
    from jinja2 import TemplateError

    try:
        return _environment().get_template(template).render(**values)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"its figures (run.json, training.json) are of unexpected kinds ({one_line(str(error))[:80]}); they are of "
            "another version of reasonrag, or were edited"
        ) from error


def mapping(held: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A mapping within what a file holds; an empty one where there is none."""
    found = held.get(name)
    return found if isinstance(found, dict) else {}


def escaped(value: object) -> str:
    """Text from outside, for a line or a cell of Markdown: one line, nothing hidden, no markup, no HTML.

    >>> escaped("<b>|*a*")
    '&lt;b&gt;\\\\|\\\\*a\\\\*'
    """
    text = printable(one_line(str(value)))
    text = text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"
    return _MARKUP.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def unescaped(card: str) -> str:
    """A card's text as a reader sees it: a token that was escaped is a token.

    >>> unescaped(escaped("<hf_abc>"))
    '<hf_abc>'
    """
    text = re.sub(r"\\([\\`*_{}\[\]!|~$^:@.])", r"\1", card)
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def fenced(text: str, language: str = "") -> Markup:
    """A block of code that its text cannot end, and that shows no tag even where it is not taken for code."""
    from markupsafe import Markup

    shown = inert(printable(text)).replace("<", "‹")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{shown}\n{fence}")


def number(value: float) -> str:
    """A number for people.

    >>> number(12345), number(0.123456)
    ('12,345', '0.1235')
    """
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def merge_card(
    old: str | None,
    data: Yaml,
    body: str,
    *,
    asked: Collection[str] = (),
    is_gone: Callable[[str], bool] = lambda pattern: False,
) -> str:
    """The card that goes up.

    Args:
        old: the card that is there. Its text outside our comments stays, and so does every YAML value that we did not
            write or that was changed since.
        data: our YAML values.
        body: our text.
        asked: names of those of our values that a person has asked for now, whatever the old card says.
        is_gone: whether a configuration's pattern of files is ours and no file is there any more.

    Raises:
        ConfigError: the old card cannot be read, so nothing can be kept of it.
    """
    import yaml

    before, comments, text = _split(old or "")
    block = _BLOCK.search(text)
    if len(_COMMENT.findall(text)) != (2 if block else 0):
        raise _unreadable("its comments reasonrag:begin and reasonrag:end are not one pair")
    try:
        before |= {name: data[name] for name in asked}
        merged = _merge_yaml(before, data, _checksums(block[1] if block else ""), is_gone)
        front = comments + _yaml(merged)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise _unreadable(f"its YAML holds values of unexpected kinds ({one_line(str(error))[:80]})") from error
    ours = f"<!-- reasonrag:begin {_written(data)} -->\n{body.strip()}\n<!-- reasonrag:end -->"
    if block:
        text = text[: block.start()] + ours + text[block.end() :]
    else:
        text = f"{text.rstrip()}\n\n{ours}\n" if text.strip() else f"\n{ours}\n"
    return f"---\n{front}---\n{text}"


def _split(card: str) -> tuple[Yaml, str, str]:
    """YAML values of a card, the lines between them that are comments, and its text."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    card = card.removeprefix("\ufeff")
    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return {}, "", card
    try:
        data = yaml.load(block[2], _loader())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise _unreadable(f"its YAML is broken ({one_line(str(problem))[:120]})") from error
    if not isinstance(data, dict | None):
        raise _unreadable(f"its YAML is a {type(data).__name__}, not a mapping")
    comments = "".join(f"{line}\n" for line in re.findall(r"^#[^\r\n]*", block[2], re.MULTILINE))
    return data or {}, comments, card[block.end() :]


@cache
def _loader() -> type[SafeLoader]:
    """YAML as the Hub reads it: `no` is a language, and a name that stands twice is an error."""
    from yaml import SafeLoader
    from yaml.constructor import ConstructorError

    class Loader(SafeLoader):
        def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = Counter(name.value for name, _ in node.value if isinstance(name.value, str))
            if twice := next((name for name, times in names.items() if times > 1), None):
                raise ConstructorError(problem=f"{twice} stands in it twice")
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if first in "tTfF" or not tag.endswith(":bool")]
        for first, found in SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _unreadable(why: str) -> ConfigError:
    return ConfigError(f"the card that is there (README.md) cannot be merged with: {why}; mend it on the Hub first")


def _merge_yaml(before: Yaml, ours: Yaml, written: Mapping[str, str], is_gone: Callable[[str], bool]) -> Yaml:
    """Values of the old card, in its order, then what is new."""
    merged = {name: value for name, value in before.items() if name in ours or written.get(name) != _checksum(value)}
    for name, value in ours.items():
        if name in _NAMED:
            merged[name] = _merge_named(before, name, value, is_gone)
        elif name not in before:
            if name not in written:  # else a person has taken it out
                merged[name] = value
        elif written.get(name) == _checksum(before[name]):
            merged[name] = value
        elif isinstance(value, list) and isinstance(before[name], list):
            merged[name] = before[name] + [item for item in value if item not in before[name]]
    return merged


def _merge_named(before: Yaml, name: str, ours: list[Yaml], is_gone: Callable[[str], bool]) -> list[Yaml]:
    """Entries by `config_name`: ours replaced, those whose files are gone left out, all others as they are."""
    gone = {
        entry["config_name"]
        for entry in _entries(before, "configs")
        if (paths := _paths(entry)) and all(map(is_gone, paths))
    }
    new = {entry["config_name"]: entry for entry in ours}
    merged = []
    for entry in _entries(before, name):
        mine = new.pop(entry["config_name"], None)
        if mine is not None:
            merged.append(entry | mine)
        elif entry["config_name"] not in gone:
            merged.append(entry)
    defaults = [entry["config_name"] for entry in (*_entries(before, name), *ours) if entry.get("default")]
    return _with_one_default([*merged, *new.values()], defaults)


def _with_one_default(entries: list[Yaml], wanted: list[str]) -> list[Yaml]:
    """`datasets` refuses two: one by name needs no mark, else the first of those `wanted` that are there has it."""
    names = [entry["config_name"] for entry in entries]
    chosen = next((name for name in ("default", *wanted) if name in names), None)
    return [
        {key: value for key, value in entry.items() if key != "default" or name == chosen}
        for name, entry in zip(names, entries, strict=True)
    ]


def _entries(data: Yaml, name: str) -> list[Yaml]:
    """A single one may stand without a list, and a `dataset_info` without a name."""
    found = data.get(name) or []
    found = [found] if isinstance(found, dict) else found
    return list(found) if name == "configs" else [{"config_name": "default", **entry} for entry in found]


def _paths(config: Yaml) -> list[str]:
    """The patterns of files that a configuration names."""
    files = config.get("data_files") or []
    files = [files] if isinstance(files, str) else files
    paths = [item["path"] if isinstance(item, dict) else item for item in files]
    return [str(path) for item in paths for path in (item if isinstance(item, list) else [item])]


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _checksum(value: Any) -> str:
    """8 hex digits of a YAML value. As YAML, where a value that refers to itself a million times stays short."""
    return hashlib.sha256(_yaml(value).encode()).hexdigest()[:8]


def _written(data: Yaml) -> str:
    return " ".join(f"{name}={_checksum(value)}" for name, value in data.items() if name not in _NAMED)


def _checksums(comment: str) -> dict[str, str]:
    return dict(re.findall(r"([\w-]+)=([0-9a-f]{8})\b", comment))


def _listed(values: Iterable[object]) -> Markup:
    """Texts from outside, in a row."""
    from markupsafe import Markup

    return Markup(", ".join(map(escaped, values)) or "unknown")


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("reasonrag.publish", "templates"),
        autoescape=False,  # this is Markdown: `finalize` escapes
        undefined=ChainableUndefined,  # a run of another version may not have counted everything
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"listed": _listed}
    return environment


def _shown(value: Any) -> Any:
    from jinja2 import Undefined
    from markupsafe import Markup

    if value is None or isinstance(value, Undefined):
        return "unknown"
    if isinstance(value, Markup):
        return value
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else escaped(value)
