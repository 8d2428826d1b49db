from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from reasonrag.report.run_pages import depth_first, layout, tree_picture
from reasonrag.report.site import shortened
from reasonrag.report.stats import margin_histogram, whole_number_histogram
from reasonrag.report.trees import QuestionTree
from tests.report.hostile import HOSTILE
from tests.report.toys import rows_of

PARENTS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.just(-1), *(st.integers(0, node - 1) for node in range(1, n))).map(list)
)


@given(PARENTS)
def test_nodes_of_a_column_keep_a_row_apart_and_parents_stand_midway(parents):
    all_children = QuestionTree.of(rows_of(parents)).children
    positions = layout(all_children)
    columns: dict[int, list[float]] = {}
    for position in positions:
        columns.setdefault(position.column, []).append(position.row)
    assert all(b - a >= 1 for rows in columns.values() for a, b in pairwise(sorted(rows)))
    for node, children in enumerate(all_children):
        if children:
            rows = [positions[child].row for child in children]
            assert positions[node].row == (rows[0] + rows[-1]) / 2
            assert rows == sorted(rows)
    assert sorted(depth_first(all_children)) == list(range(len(parents)))


def test_a_chain_of_ten_thousand_steps_is_laid_out():
    positions = layout([*([node + 1] for node in range(9_999)), []])
    assert (positions[-1].column, positions[-1].row) == (9_999, 0.0)


def test_margins_at_an_edge_count_above_it():
    counts = margin_histogram([0.15, 0.1499, 1.0])
    assert (counts["0.10 to 0.15"], counts["0.15 to 0.20"], counts["0.95 to 1.00"]) == (1, 1, 1)
    assert (len(counts), sum(counts.values())) == (20, 3)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_a_histogram_counts_every_value_in_at_most_twenty_bins(values):
    counts = whole_number_histogram(values)
    assert sum(counts.values()) == len(values)
    assert len(counts) <= 20
    bounds = [tuple(map(int, name.split(" to "))) for name in counts]
    assert (bounds[0][0], bounds[-1][-1] >= max(values)) == (min(values), True)
    assert all(later[0] == earlier[-1] + 1 for earlier, later in pairwise(bounds))
    for (low, high), count in zip(((bound[0], bound[-1]) for bound in bounds), counts.values(), strict=True):
        assert count == sum(low <= value <= high for value in values)


@given(st.text(max_size=300), st.integers(2, 40))
def test_a_shortened_text_is_one_short_line(text, columns):
    line = shortened(text, columns)
    assert len(line) <= columns
    assert "\n" not in line


def test_a_picture_of_a_tree_is_a_file_whose_text_acts_on_nothing():
    rows = rows_of([-1, 0, 0, 1])
    for row in rows:
        row |= {"question": HOSTILE, "content": HOSTILE}
    picture = ElementTree.fromstring(tree_picture(QuestionTree.of(rows)))
    assert [element.tag.partition("}")[2] for element in picture].count("g") == 4
    assert not list(picture.iter("{http://www.w3.org/2000/svg}script"))
