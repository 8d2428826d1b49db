"""Cards on the Hub: rendered from templates with every foreign text inert, and merged with a person's edits.

Our part of a card's text is between two HTML comments; the text around them belongs to others. The first comment also
holds a checksum of each YAML value that we wrote. The next upload compares them, and keeps the values that a person has
changed since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from reasonrag.core.documents import parse_yaml, to_yaml
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.secrets import excerpt
from reasonrag.core.text import one_line, printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

Yaml = dict[str, Any]

# Markup, links (`www.` starts one, a version number does not), mathematics. HTML tags are written as entities.
_MARKUP = re.compile(r"([\\`*_{}\[\]!|~$^:@]|\.(?=\D))")
_CELL_CHARS = 200
_BLOCK = re.compile(r"<!-- reasonrag:begin([^>\n]*)-->.*?<!-- reasonrag:end -->", re.DOTALL)
_CHECKSUM = re.compile(r"([\w-]+)=([0-9a-f]{8})\b")
_COMMENT = re.compile(r"<!-- reasonrag:(?:begin|end)")
_BY_CONFIG = ("configs", "dataset_info")  # lists of mappings that are merged by their `config_name`


def render(template: str, **values: Any) -> str:
    """Render a template. Values are escaped, except for those from `fenced`; missing values become "unknown".

    Raises:
        DataError: a value has another type than the template expects.
    """
    from jinja2 import TemplateError

    try:
        return _environment().get_template(template).render(**values)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"run.json or training.json holds values of unexpected kinds ({excerpt(str(error), 80)}); it is of "
            "another version of reasonrag, or was edited"
        ) from error


def mapping(held: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping under a name; an empty one if there is none."""
    value = held.get(name)
    return value if isinstance(value, dict) else {}


def versions(summary: Mapping[str, Any]) -> list[str]:
    """Return the installed versions that `run.json` or `training.json` lists, as "name version"."""
    return [f"{name} {version}" for name, version in mapping(summary, "versions").items()]


def escaped(value: object) -> str:
    """Make foreign text inert in a line or a cell of Markdown: one line, no hidden characters, markup or HTML.

    >>> escaped("<b>|*a*")
    '&lt;b&gt;\\\\|\\\\*a\\\\*'
    """
    text = printable(one_line(str(value)))
    text = text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"
    return _MARKUP.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def unescaped(card: str) -> str:
    """Return a card's text as a reader sees it, so that secrets in it can be found.

    >>> unescaped(escaped("<hf_abc>"))
    '<hf_abc>'
    """
    text = re.sub(r"\\([\\`*_{}\[\]!|~$^:@.])", r"\1", card)
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def fenced(text: str, language: str = "") -> Markup:
    """Return a block of code that the text cannot end, without tags, in case it is not rendered as code."""
    from markupsafe import Markup

    block = printable(text).replace("<", "‹")
    longest = max((len(run) for run in re.findall("`+", block)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{block}\n{fence}")


def number(value: float) -> str:
    """Format a number for people.

    >>> number(12345), number(0.123456)
    ('12,345', '0.1235')
    """
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def merge_card(
    old: str | None,
    data: Yaml,
    body: str,
    *,
    overrides: Collection[str] = (),
    is_gone: Callable[[str], bool] = lambda pattern: False,
) -> str:
    """Return the card to upload: our values and text, merged into the card that is there.

    Args:
        old: the card that is there. Its text outside our comments is kept, and so is every YAML value that we did not
            write or that was changed since.
        data: our YAML values.
        body: our text.
        overrides: names of those of our values that replace the old ones in any case.
        is_gone: whether a configuration's pattern of files is ours and no such file exists any more.

    Raises:
        ConfigError: the old card cannot be parsed, so nothing of it could be kept.
    """
    values, comments, text = _split(old or "")
    block = _BLOCK.search(text)
    if len(_COMMENT.findall(text)) != (2 if block else 0):
        raise _unreadable("its comments reasonrag:begin and reasonrag:end are not one pair")
    try:
        values |= {name: data[name] for name in overrides}
        written_checksums = dict(_CHECKSUM.findall(block[1])) if block else {}
        front = comments + to_yaml(_merge_yaml(values, data, written_checksums, is_gone))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise _unreadable(f"its YAML holds values of unexpected kinds ({excerpt(str(error), 80)})") from error
    checksums = " ".join(f"{name}={_checksum(value)}" for name, value in data.items() if name not in _BY_CONFIG)
    ours = f"<!-- reasonrag:begin {checksums} -->\n{body.strip()}\n<!-- reasonrag:end -->"
    if block:
        text = text[: block.start()] + ours + text[block.end() :]
    else:
        text = f"{text.rstrip()}\n\n{ours}\n" if text.strip() else f"\n{ours}\n"
    return f"---\n{front}---\n{text}"


def _split(card: str) -> tuple[Yaml, str, str]:
    """Split a card into its YAML values, the comments between them, and its text."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    card = card.removeprefix("\ufeff")
    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return {}, "", card
    try:
        data = parse_yaml(block[2])
    except ValueError as error:
        raise _unreadable(f"its YAML is broken ({excerpt(str(error), 120)})") from error
    if not isinstance(data, dict | None):
        raise _unreadable(f"its YAML is a {type(data).__name__}, not a mapping")
    comments = "".join(f"{line}\n" for line in re.findall(r"^#[^\r\n]*", block[2], re.MULTILINE))
    return data or {}, comments, card[block.end() :]


def _unreadable(why: str) -> ConfigError:
    return ConfigError(f"the card that is there (README.md) cannot be merged with: {why}; mend it on the Hub first")


def _merge_yaml(old: Yaml, ours: Yaml, written: Mapping[str, str], is_gone: Callable[[str], bool]) -> Yaml:
    """Merge YAML values: those of the old card in its order, then the new ones.

    Args:
        old: values of the card that is there.
        ours: our values now.
        written: checksums of the values that we wrote last time.
        is_gone: see `merge_card`.
    """
    # A value of ours that we no longer write goes, unless a person has changed it.
    merged = {name: value for name, value in old.items() if name in ours or written.get(name) != _checksum(value)}
    for name, value in ours.items():
        if name in _BY_CONFIG:
            merged[name] = _merge_by_config(old, name, value, is_gone)
        elif name not in old:
            if name not in written:  # else a person has removed it
                merged[name] = value
        elif written.get(name) == _checksum(old[name]):
            merged[name] = value
        elif isinstance(value, list) and isinstance(old[name], list):
            merged[name] = old[name] + [item for item in value if item not in old[name]]
    return merged


def _merge_by_config(old: Yaml, name: str, ours: list[Yaml], is_gone: Callable[[str], bool]) -> list[Yaml]:
    """Replace our entries, drop those whose files are gone, and keep all others."""
    gone = set()
    for entry in _entries(old, "configs"):
        paths = _paths(entry)
        if paths and all(map(is_gone, paths)):
            gone.add(entry["config_name"])
    new = {entry["config_name"]: entry for entry in ours}
    merged = []
    for entry in _entries(old, name):
        replacement = new.pop(entry["config_name"], None)
        if replacement is not None:
            merged.append(entry | replacement)
        elif entry["config_name"] not in gone:
            merged.append(entry)
    defaults = [entry["config_name"] for entry in (*_entries(old, name), *ours) if entry.get("default")]
    return _with_one_default([*merged, *new.values()], defaults)


def _with_one_default(entries: list[Yaml], wanted: list[str]) -> list[Yaml]:
    """Keep one `default` mark, as `datasets` refuses two: none if an entry is named default, else the first wanted."""
    names = [entry["config_name"] for entry in entries]
    default = next((name for name in ("default", *wanted) if name in names), None)
    for position, entry in enumerate(entries):
        if entry["config_name"] != default:
            entries[position] = {key: value for key, value in entry.items() if key != "default"}
    return entries


def _entries(data: Yaml, name: str) -> list[Yaml]:
    """List the entries under a name. A single entry needs no list, and a single `dataset_info` no name."""
    entries = data.get(name) or []
    entries = [entries] if isinstance(entries, dict) else entries
    return list(entries) if name == "configs" else [{"config_name": "default", **entry} for entry in entries]


def _paths(config: Yaml) -> list[str]:
    """List the patterns of files that a configuration names."""
    files = config.get("data_files") or []
    files = [files] if isinstance(files, str) else files
    paths = [item["path"] if isinstance(item, dict) else item for item in files]
    return [str(path) for item in paths for path in (item if isinstance(item, list) else [item])]


def _checksum(value: Any) -> str:
    """8 hex digits of a value, written as YAML."""
    return hashlib.sha256(to_yaml(value).encode()).hexdigest()[:8]


def _listed(values: Iterable[object]) -> Markup:
    from markupsafe import Markup

    return Markup(", ".join(map(escaped, values)) or "unknown")


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("reasonrag.publish", "templates"),
        autoescape=False,  # this is Markdown: `finalize` escapes
        undefined=ChainableUndefined,  # a run of another version may lack some counts
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"listed": _listed}
    return environment


def _printed(value: Any) -> Any:
    from jinja2 import Undefined
    from markupsafe import Markup

    if value is None or isinstance(value, Undefined):
        return "unknown"
    if isinstance(value, Markup):
        return value
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else escaped(value)
