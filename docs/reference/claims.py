"""The claims of README and the first page, with every number from `docs/results/*.json`.

A page holds blocks that a template writes:

    <!-- written from docs/reference/why.md.j2 -->
    <!-- end -->

A template has no digit of its own, which a test checks. `{{ result("rounds").mean("greedy", "outcome-1", "em") }}` is a
number, and `{{ hold(...) }}` writes nothing, but raises if the results do not say what the words beside it say.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import jinja2

from papers.measures import METRICS, sign
from papers.results import SETTINGS
from reasonrag.core.bootstrap import LEVEL

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(<!-- written from (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Figure(float):
    """The mean of an interval; as text `.894` or `1.87`, and a difference, in points, `+32.2 [+29.2, +35.1]`."""

    def __new__(cls, interval: dict[str, Any], metric: str, *, is_change: bool) -> Figure:
        figure = super().__new__(cls, interval["mean"])
        figure.interval, figure._share, figure._is_change = interval, METRICS[metric].share, is_change
        return figure

    interval: dict[str, Any]
    _share: bool
    _is_change: bool

    def __str__(self) -> str:
        return self.with_interval if self._is_change else self._text("mean")

    @property
    def with_interval(self) -> str:
        """The number with its interval, such as `.894 [.877, .910]`."""
        mark = "+" if self._is_change else ""
        return f"{self._text('mean', mark)} [{self._text('low', mark)}, {self._text('high', mark)}]"

    @property
    def mean(self) -> str:
        """The number without its interval; a difference has its sign, such as `+31.8`."""
        return self._text("mean", "+" if self._is_change else "")

    @property
    def sign(self) -> int:
        """The sign of a difference that is certain (its page has it in bold), else 0."""
        return sign(self.interval) or 0

    def _text(self, name: str, mark: str = "") -> str:
        value = self.interval[name] + 0.0  # no negative zero
        if self._is_change and self._share:
            return f"{100 * value:{mark}.1f}"
        return re.sub(r"\b0\.", ".", f"{value:.3f}") if self._share else f"{value:{mark}.2f}"


class Result:
    """One `docs/results/NAME.json`; `data` is all of it."""

    def __init__(self, name: str) -> None:
        self.data: dict[str, Any] = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        self._variants = next(iter(self.data["settings"].values()))["variants"].values()

    @property
    def questions(self) -> str:
        return f"{max(variant['questions'] for variant in self._variants):,}"

    @property
    def per_seed(self) -> str:
        """How many questions each seed draws."""
        (count,) = {count for variant in self._variants for count in variant["questions_by_seed"]}
        return f"{count:,}"

    @property
    def seeds(self) -> int:
        return max(len(variant["seeds"]) for variant in self._variants)

    def mean(self, decoding: str, variant: str, metric: str, kind: str = "") -> Figure:
        """Return a mean of a variant; `decoding` is `greedy` or `sampled`, `kind` one kind of question."""
        return self._figure(decoding, "variants", variant, metric, kind)

    def change(self, decoding: str, difference: str, metric: str, kind: str = "") -> Figure:
        """Return a difference such as `dpo-1 - base`."""
        return self._figure(decoding, "differences", difference, metric, kind)

    def _figure(self, decoding: str, table: str, row: str, metric: str, kind: str) -> Figure:
        (setting,) = (name for name in SETTINGS if name.startswith(decoding))
        found = self.data["settings"][setting][table][row]
        interval = (found["by_kind"][kind] if kind else found["all"])[metric]
        return Figure(interval, metric, is_change=table == "differences")


def hold(condition: bool) -> str:
    """Write nothing.

    Raises:
        ValueError: the results do not say what the words beside it say.
    """
    if not condition:
        raise ValueError("a claim does not hold; see the line of the template above")
    return ""


def page(name: str) -> str:
    """Return a page with its blocks written again."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    names: dict[str, Any] = {"result": Result, "hold": hold, "level": f"{100 * LEVEL:g} %"}

    def block(found: re.Match[str]) -> str:
        paragraphs = environment.get_template(found[2]).render(names).strip().split("\n\n")
        return found[1] + "\n\n".join(map(_wrapped, paragraphs)) + "\n" + found[3]

    return _BLOCK.sub(block, (ROOT / name).read_text(encoding="utf-8"))


def _wrapped(paragraph: str) -> str:
    """Return running text in lines of 120 characters; tables, lists and code stay as they are."""
    is_text = paragraph.lstrip()[:1] not in ("|", "-", "`", "#", "<")
    return textwrap.fill(paragraph, 120, break_on_hyphens=False) if is_text else paragraph.strip()
