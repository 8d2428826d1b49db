from __future__ import annotations

from xml.etree import ElementTree

from reasonrag.report.terminal import picture
from reasonrag.report.trees import QuestionTree
from tests.report.hostile import HOSTILE
from tests.report.toys import rows_of


def test_a_picture_of_a_tree_is_a_file_whose_text_acts_on_nothing():
    rows = rows_of([-1, 0, 0, 1])
    for row in rows:
        row |= {"question": HOSTILE, "content": HOSTILE}
    drawn = picture(QuestionTree.of(rows))
    ElementTree.fromstring(drawn)
    assert not [part for part in ("@font-face", "href", "<script", "\x1b") if part in drawn]
