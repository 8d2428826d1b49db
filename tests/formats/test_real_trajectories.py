"""Trajectories that others have published, and GRPO rollouts as logged; skipped where `../shared/data` is absent."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from reasonrag.core.text import normalize_answer
from reasonrag.formats import FORMATS
from reasonrag.formats.stream import StreamFormat

DATA = Path(__file__).parents[2].parent / "shared/data"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA.name} is not beside the repository"),
]


def rows(path):
    with gzip.open(DATA / path, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def published():
    found = rows("trajectories/trajectories.jsonl.gz")
    assert len(found) == 1636
    return found


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_published_trajectory_is_read_by_every_format(name, published):
    format = FORMATS[name]()
    for row in published:
        format.parse(row["text"], ())
        if isinstance(format, StreamFormat):
            reading = format.read_text(row["text"])
            assert reading.well_formed == (not reading.reason)


@pytest.mark.parametrize("name", ["search_r1", "hiprag", "search_p1", "when_to_search"])
def test_every_logged_rollout_is_read_by_every_growing_format(name):
    format = FORMATS[name]()
    read = [format.read_text("".join(row["segments"][1:])) for row in rows("rollouts/grpo_groups.jsonl.gz")]
    assert len(read) == 415
    assert sum(reading.answer is not None for reading in read) > 150


def test_why_published_search_r1_trajectories_are_not_well_formed(published):
    """Trained without a format reward, they leave the thought behind the passages out, or write their own passages."""
    read = [FORMATS["search_r1"]().read_text(row["text"]) for row in published if row["format"] == "search-r1"]
    assert Counter(reading.reason for reading in read) == {
        "thought_order": 688,
        "written_observation": 50,
        "unclosed_think": 14,
        "unopened_search": 3,
        "unopened_think": 1,
    }
    orderly = [reading for reading in read if reading.reason == "thought_order"]
    assert all(block.context for reading in orderly for block in reading.blocks if block.is_search)
    assert Counter(len(reading.queries) for reading in orderly) == {1: 606, 2: 81, 3: 1}


@pytest.mark.parametrize(("source", "recorded"), [("search-r1", 754), ("r1-searcher", 595)])
def test_the_recorded_answers_are_found_well_formed_or_not(source, recorded, published):
    """`prediction` is "" where a run found none: the trajectory was cut off."""
    format = FORMATS["search_r1"]()
    compared = [
        normalize_answer(format.read_text(row["text"]).answer or "") == normalize_answer(row["prediction"])
        for row in published
        if row["format"] == source and row.get("prediction") is not None
    ]
    assert (len(compared), sum(compared)) == (recorded, recorded)
