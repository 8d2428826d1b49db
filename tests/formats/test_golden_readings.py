"""Lists of turns and what they are, written from the papers by hand: `tests/golden/formats`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reasonrag.formats import FORMATS

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"


def cases(name):
    return [pytest.param(case, id=case["what"]) for case in json.loads((GOLDEN / name).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("case", cases("hiprag_checker.json"))
def test_hiprag_accepts_what_algorithms_2_and_3_accept(case):
    reading = FORMATS["hiprag"]().read_text(case["text"])
    assert (reading.well_formed, reading.reason) == (case["accepted"], case.get("reason", "")), case.get("line")
    if case["accepted"]:
        assert len(reading.blocks) == case["steps"]
        assert reading.answer


@pytest.mark.fault(
    "22", "turns without a tag, nested, unclosed, with two answers, empty, ...", "the outcome that is listed for each"
)
@pytest.mark.parametrize("name", ["search_r1", "search_p1", "when_to_search"])
def test_the_other_papers_turns_are_read_as_listed(name, figure):
    format = FORMATS[name]()
    listed = json.loads((GOLDEN / f"{name}_reader.json").read_text(encoding="utf-8"))
    malformed = sum(not case["well_formed"] for case in listed)
    figure(f"{len(listed)} texts of {name} read as listed, {malformed} of them malformed")
    assert len(listed) >= 15
    for case in listed:
        reading = format.read_text(case["text"])
        found = (reading.well_formed, reading.reason, list(reading.queries), reading.answer)
        assert found == (case["well_formed"], case["reason"], case["queries"], case["answer"]), case["what"]
        assert len(reading.blocks) == case.get("steps", len(reading.blocks)), case["what"]


def test_every_line_of_the_algorithms_that_can_reject_is_in_the_list():
    """Line 20 of Alg. 3 cannot: it asks again what line 10 has answered."""
    lines = {case.get("line") for case in json.loads((GOLDEN / "hiprag_checker.json").read_text(encoding="utf-8"))}
    of_2 = {f"Alg. 2 line {n}" for n in (2, 3, 4, 7, 8, 10, 11, 17, 20, 22, 27)}
    of_3 = {f"Alg. 3 line {n}" for n in (2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 21)}
    assert of_2 | of_3 <= lines
