from __future__ import annotations

from xml.etree import ElementTree

from reasonrag.report.terminal import picture
from reasonrag.report.trees import QuestionTree, histogram
from tests.report.hostile import HOSTILE
from tests.report.toys import rows_of


def test_margins_at_an_edge_count_above_it():
    counts = histogram([0.15, 0.1499, 1.0])
    assert (counts["0.1 to 0.15"], counts["0.15 to 0.2"], counts["0.95 to 1"]) == (1, 1, 1)
    assert (len(counts), sum(counts.values())) == (20, 3)


def test_a_picture_of_a_tree_is_a_file_whose_text_acts_on_nothing():
    rows = rows_of([-1, 0, 0, 1])
    for row in rows:
        row |= {"question": HOSTILE, "content": HOSTILE}
    drawn = picture(QuestionTree.of(rows))
    ElementTree.fromstring(drawn)
    assert not [part for part in ("@font-face", "href", "<script", "\x1b") if part in drawn]
