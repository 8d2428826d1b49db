from __future__ import annotations

from dataclasses import asdict

import pytest

from reasonrag.formats import FORMATS
from tests.formats import page


@pytest.mark.parametrize("name", FORMATS)
def test_the_golden_trajectory_is_played_and_read_as_written_down(name):
    golden = page.load(name)
    format, trajectory = page.play(golden)
    reading = format.read(trajectory)
    assert page.turn(format, trajectory) == golden["expected"].pop("turn")
    assert {**asdict(reading), "blocks": [asdict(block) for block in reading.blocks]} | {
        "stop_reason": trajectory.stop_reason
    } == golden["expected"]


def test_the_page_on_formats_is_up_to_date():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "python -m tests.formats.page"
