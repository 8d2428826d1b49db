"""No number of a claim is typed by hand: all are read from the results when the page is written.

That a page is what its template writes today is in `test_reference.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.reference import ROOT
from docs.reference.claims import Figure, Result, hold, page

TEMPLATES = sorted((ROOT / "docs" / "reference").glob("*.j2"))
_BLOCKS = re.compile(r"<!-- written from .*?<!-- end -->", re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|arXiv:[\d.]+", re.DOTALL)
_NUMBER = re.compile(r"(?<![A-Za-z])\d")  # F1 and Search-P1 are names


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_no_number_of_its_own(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    for expression in re.findall(r"{{.*?}}|{%.*?%}", text, re.DOTALL):
        without_names = re.sub(r"\"[^\"]*\"|hold\(.*\)", "", expression, flags=re.DOTALL)
        assert not re.search(r"\d", without_names), expression
        text = text.replace(expression, "")
    assert not _NUMBER.search(_CODE.sub("", text))


def test_claims_about_results_stand_in_blocks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Results\n")[2].partition("\n## ")[0]
    assert _BLOCKS.fullmatch(section.strip())
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not _NUMBER.search(_CODE.sub("", _BLOCKS.sub("", index)))


def test_a_number_reads_as_it_does_in_prose() -> None:
    share = {"mean": 0.8941, "low": 0.8774, "high": 1.0, "n": 99}
    lower = {"mean": -0.0479, "low": -0.0708, "high": -0.025, "n": 99, "p_adjusted": 0.04}
    assert str(Figure(share, "em", is_change=False)) == ".894"
    assert Figure(share, "em", is_change=False).with_interval == ".894 [.877, 1.000]"
    assert f"{Figure(share | {'mean': 1.875}, 'retrievals', is_change=False)!s}" == "1.88"
    change = Figure(lower, "em", is_change=True)
    assert (str(change), change.mean, change.sign) == ("-4.8 [-7.1, -2.5]", "-4.8", -1)
    assert str(Figure(lower, "retrievals", is_change=True)) == "-0.05 [-0.07, -0.03]"
    assert Figure(lower | {"p_adjusted": 0.06}, "em", is_change=True).sign == 0


def test_a_claim_that_does_not_hold_is_not_written() -> None:
    assert hold(Result("rounds").change("greedy", "siblings-1 - base", "em").sign == 1) == ""
    with pytest.raises(ValueError, match="does not hold"):
        hold(Result("rounds").mean("greedy", "siblings-1", "em") > 1)


def test_what_is_not_in_a_block_stays() -> None:
    assert _BLOCKS.sub("", page("README.md")) == _BLOCKS.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
