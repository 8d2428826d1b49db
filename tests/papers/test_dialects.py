"""Formats with marks of their own: a golden trajectory of each, and the published ones of `../shared/data`."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from papers.dialects import R1SearcherFormat, ReActFormat
from reasonrag.core.text import normalize_answer
from tests.formats import page
from tests.formats.test_real_trajectories import DATA, rows

GOLDEN = Path(__file__).parents[1] / "golden" / "papers" / "dialects"
published_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA.name} is not beside the repository")


@pytest.fixture(scope="module")
def published():
    return rows("trajectories/trajectories.jsonl.gz")


@pytest.mark.parametrize("dialect", [R1SearcherFormat, ReActFormat], ids=lambda dialect: dialect.name)
def test_the_golden_trajectory_is_played_and_read_as_written_down(dialect):
    golden = json.loads((GOLDEN / f"{dialect.name}.json").read_text(encoding="utf-8"))
    format, trajectory = page.play(golden, dialect())
    reading = format.read(trajectory)
    assert page.turn(format, trajectory) == golden["expected"].pop("turn")
    assert {**asdict(reading), "blocks": [asdict(block) for block in reading.blocks]} | {
        "stop_reason": trajectory.stop_reason
    } == golden["expected"]
    assert format.read_text("".join(span.text for span in format.turn(trajectory.steps))) == reading


@pytest.mark.data
@published_data
def test_r1_searchers_trajectories_are_read_as_they_were_run(published):
    format = R1SearcherFormat()
    own = [row for row in published if row["format"] == "r1-searcher"]
    read = [format.read_text(row["text"]) for row in own]
    assert all(reading.well_formed for reading in read) and len(read) == 595
    assert [reading.answer for reading in read] == [row["prediction"].strip() for row in own]
    written = [re.findall(r"(?s)<\|begin_of_query\|>(.*?)<\|end_of_query\|>", row["text"]) for row in own]
    assert [list(reading.queries) for reading in read] == [[*map(str.strip, queries)] for queries in written]
    assert sum(map(len, written)) == 1412
    assert all(block.context for reading in read for block in reading.blocks if block.is_search)


@pytest.mark.data
@published_data
def test_fireacts_trajectories_are_read_as_they_were_run(published):
    """One log takes the thought behind the answer along; one trajectory has words behind a search, so it made none."""
    format = ReActFormat()
    own = [row for row in published if row["format"] == "react"]
    read = [format.read_text(row["text"]) for row in own]
    assert Counter(reading.reason for reading in read) == {"": 260, "empty_answer": 1, "written_observation": 1}
    answers = [normalize_answer(reading.answer or "") for reading in read]
    assert sum(answer == row["prediction"] for answer, row in zip(answers, own, strict=True)) == 261
    written = [re.findall(r"(?m)^Action: search\[(.*)\]$", row["text"]) for row in own]
    assert [list(reading.queries) for reading in read] == written
    assert sum(map(len, written)) > 500
