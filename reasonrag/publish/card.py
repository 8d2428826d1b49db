"""Cards on the Hub: rendered from one template with every foreign text inert, and merged with the card that is there.

Our part of a card's text is between two HTML comments; the text around them belongs to the people who
edit the card, and so does every YAML value under a name that we do not write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reasonrag import __version__
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.settings import parse_yaml, to_yaml
from reasonrag.core.table import inert_markdown
from reasonrag.core.text import excerpt, printable
from reasonrag.report.site import template_environment
from reasonrag.training.run import without_places

if TYPE_CHECKING:
    from markupsafe import Markup

Yaml = dict[str, Any]
UNKNOWN = "unknown"  # the licence of data or of a model without a known one

_CELL_CHARS = 200
_BEGIN, _END = "<!-- reasonrag:begin", "<!-- reasonrag:end -->"
_BLOCK = re.compile(f"{_BEGIN}[^>\n]*-->.*?{_END}", re.DOTALL)


def render(**values: Any) -> str:
    """Render the template. Values are escaped, except for those from `fenced`; missing values become "unknown".

    Raises:
        DataError: a value has another type than the template expects.
    """
    from jinja2 import TemplateError

    try:
        # Markdown: `_shown` escapes.
        environment = template_environment("reasonrag.publish", _shown, missing="unknown", escape=False)
        return environment.get_template("card.md.j2").render(version=__version__, **values)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"run.json or training.json holds values of unexpected kinds ({excerpt(str(error), 80)}); it is of "
            "another version of reasonrag, or was edited"
        ) from error


def _shown(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return inert_markdown(str(value)[:_CELL_CHARS])


def fenced(text: str, language: str = "") -> Markup:
    """Return a block of code that the text cannot end, without tags, in case it is not rendered as code."""
    from markupsafe import Markup

    block = printable(text).replace("<", "‹")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block)), default=0))
    return Markup(f"{fence}{language}\n{block}\n{fence}")


def fenced_yaml(value: Mapping[str, Any]) -> Markup:
    """Return settings as a block of YAML, without paths and addresses of this machine."""
    return fenced(to_yaml(without_places(value)).strip(), "yaml")


def merge_card(old: str | None, data: Yaml, body: str) -> str:
    """Return the card to upload: our YAML values and text, merged into the card that is there.

    Text outside of our comments, tags, and YAML values under other names are kept. A licence that is
    there is kept if ours is unknown.

    Raises:
        ConfigError: the old card cannot be parsed, so its content would be lost.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    text = (old or "").removeprefix("\ufeff")
    values: Any = {}
    try:
        if header := REGEX_YAML_BLOCK.search(text):
            values, text = parse_yaml(header[2]) or {}, text[header.end() :]
        if not isinstance(values, dict):
            raise ValueError(f"its YAML is a {type(values).__name__}, not a mapping")
        if text.count(_BEGIN) != text.count(_END) or text.count(_END) > 1:
            raise ValueError("its comments reasonrag:begin and reasonrag:end are not one pair")
    except ValueError as error:
        raise ConfigError(
            f"the card that is there (README.md) cannot be merged with: {excerpt(str(error), 120)}; mend it on the Hub "
            "first"
        ) from error
    merged = values | data
    if isinstance(values.get("tags"), list):
        merged["tags"] = list(dict.fromkeys([*values["tags"], *data.get("tags", ())]))
    if data.get("license") == UNKNOWN and values.get("license"):
        merged["license"] = values["license"]
    ours = f"{_BEGIN} -->\n{body.strip()}\n{_END}"
    if block := _BLOCK.search(text):
        text = text[: block.start()] + ours + text[block.end() :]
    else:
        text = f"{text.rstrip()}\n\n{ours}\n" if text.strip() else f"\n{ours}\n"
    return f"---\n{to_yaml(merged)}---\n{text}"
