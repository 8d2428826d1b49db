"""Cards on the Hub: rendered from one template with every foreign text inert, and merged with the card that is there.

Our part of a card's text is between two HTML comments; the text around them belongs to the people who edit the card,
and so does every YAML value under a name that we do not write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag import __version__
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import parse_yaml, to_yaml
from reasonrag.core.table import inert_markdown
from reasonrag.core.text import excerpt, printable, quoted
from reasonrag.storage.files import write_json
from reasonrag.training.folder import without_places

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

Yaml = dict[str, Any]
UNKNOWN = "unknown"
"""The licence of data or of a model without a known one."""

_CELL_CHARS = 200
_BEGIN, _END = "<!-- reasonrag:begin", "<!-- reasonrag:end -->"
_BLOCK = re.compile(f"{_BEGIN}[^>\n]*-->.*?{_END}", re.DOTALL)
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,63}")


def render(**values: Any) -> str:
    """Render the template. Values are escaped, except for those from `fenced`; missing values become "unknown".

    Raises:
        DataError: a value has another type than the template expects.
    """
    from jinja2 import TemplateError

    try:
        return _environment().get_template("card.md.j2").render(version=__version__, **values)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"run.json or training.json holds values of unexpected kinds ({excerpt(str(error), 80)}); it is of "
            "another version of reasonrag, or was edited"
        ) from error


def mapping(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the mapping under a name; an empty one if there is another value."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def fenced(text: str, language: str = "") -> Markup:
    """Return a block of code that the text cannot end, without tags, in case it is not rendered as code."""
    from markupsafe import Markup

    block = printable(text).replace("<", "‹")
    longest = max((len(run) for run in re.findall("`+", block)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{block}\n{fence}")


def fenced_yaml(value: Mapping[str, Any]) -> Markup:
    """Return settings as a block of YAML, without paths and addresses of this machine."""
    return fenced(to_yaml(without_places(value)).strip(), "yaml")


def place_json(value: Mapping[str, Any], target: Path) -> None:
    """Write a mapping as JSON, without paths and addresses of this machine.

    Raises:
        DataError: JSON cannot express a value, such as NaN or half a character.
    """
    try:
        write_json(target, without_places(value))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{target.name} holds what JSON cannot express ({excerpt(str(error), 80)}); mend it") from error


def merge_card(old: str | None, data: Yaml, body: str) -> str:
    """Return the card to upload: our YAML values and text, merged into the card that is there.

    Text outside of our comments, tags, and YAML values under other names are kept. A licence that is there is kept if
    ours is unknown.

    Raises:
        ConfigError: the old card cannot be parsed, so its content would be lost.
    """
    values, text = _split(old or "")
    block = _BLOCK.search(text)
    if text.count(_BEGIN) != text.count(_END) or text.count(_END) > 1:
        raise _unreadable("its comments reasonrag:begin and reasonrag:end are not one pair")
    merged = values | data
    old_tags = values.get("tags")
    if isinstance(old_tags, list):
        merged["tags"] = old_tags + [tag for tag in data.get("tags", ()) if tag not in old_tags]
    if data.get("license") == UNKNOWN and values.get("license"):
        merged["license"] = values["license"]
    ours = f"{_BEGIN} -->\n{body.strip()}\n{_END}"
    if block:
        text = text[: block.start()] + ours + text[block.end() :]
    else:
        text = f"{text.rstrip()}\n\n{ours}\n" if text.strip() else f"\n{ours}\n"
    return f"---\n{to_yaml(merged)}---\n{text}"


def _split(card: str) -> tuple[Yaml, str]:
    """Split a card into its YAML values and its text."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    card = card.removeprefix("\ufeff")
    block = REGEX_YAML_BLOCK.search(card)
    if block is None:
        return {}, card
    try:
        data = parse_yaml(block[2])
    except ValueError as error:
        raise _unreadable(f"its YAML is broken ({excerpt(str(error), 120)})") from error
    if not isinstance(data, dict | None):
        raise _unreadable(f"its YAML is a {type(data).__name__}, not a mapping")
    return data or {}, card[block.end() :]


def _unreadable(why: str) -> ConfigError:
    return ConfigError(f"the card that is there (README.md) cannot be merged with: {why}; mend it on the Hub first")


def check_licence(given: str | None) -> str | None:
    """Return a licence's identifier on the Hub in lower case; raise ConfigError if it is not an identifier."""
    if given is not None and not _LICENCE.fullmatch(given.lower()):
        raise ConfigError(
            f"--license {quoted(given)} is not a licence's identifier; give one of the Hub's, such as cc-by-sa-4.0, "
            "apache-2.0 or mit"
        )
    return given and given.lower()


@cache
def _environment() -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    return Environment(
        loader=PackageLoader("reasonrag.publish", "templates"),
        autoescape=False,  # this is Markdown: `finalize` escapes
        undefined=ChainableUndefined,  # a run of another version may lack some counts
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printed(value: Any) -> Any:
    from jinja2 import Undefined
    from markupsafe import Markup

    if value is None or isinstance(value, Undefined):
        return "unknown"
    if isinstance(value, Markup):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return inert_markdown(str(value)[:_CELL_CHARS])
