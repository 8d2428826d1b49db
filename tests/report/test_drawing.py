from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from reasonrag.report.terminal import picture
from reasonrag.report.trees import QuestionTree, histogram
from tests.report.hostile import HOSTILE
from tests.report.toys import rows_of


def test_margins_at_an_edge_count_above_it():
    counts = histogram([0.15, 0.1499, 1.0])
    assert (counts["0.1 to 0.15"], counts["0.15 to 0.2"], counts["0.95 to 1"]) == (1, 1, 1)
    assert (len(counts), sum(counts.values())) == (20, 3)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_a_histogram_counts_every_value_in_at_most_twenty_bins(values):
    counts = histogram(values)
    assert sum(counts.values()) == len(values)
    assert len(counts) <= 20
    bounds = [tuple(map(int, name.split(" to "))) for name in counts]
    assert (bounds[0][0], bounds[-1][-1] >= max(values)) == (min(values), True)
    assert all(later[0] == earlier[-1] + 1 for earlier, later in pairwise(bounds))
    for (low, high), count in zip(((bound[0], bound[-1]) for bound in bounds), counts.values(), strict=True):
        assert count == sum(low <= value <= high for value in values)


def test_a_picture_of_a_tree_is_a_file_whose_text_acts_on_nothing():
    rows = rows_of([-1, 0, 0, 1])
    for row in rows:
        row |= {"question": HOSTILE, "content": HOSTILE}
    drawn = picture(QuestionTree.of(rows))
    ElementTree.fromstring(drawn)
    assert not [part for part in ("@font-face", "href", "<script", "\x1b") if part in drawn]
