from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reasonrag.report.figures import HEIGHT, WIDTH, margin_histogram, whole_number_histogram
from reasonrag.report.tree_layout import children_of, depth_first, layout
from reasonrag.report.visible import shortened

PARENTS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.none(), *(st.integers(0, node - 1) for node in range(1, n))).map(list)
)


@given(PARENTS)
def test_nodes_of_a_column_keep_a_row_apart_and_parents_stand_midway(parents):
    places = layout(parents)
    columns: dict[int, list[float]] = {}
    for place in places:
        columns.setdefault(place.column, []).append(place.row)
    assert all(b - a >= 1 for rows in columns.values() for a, b in pairwise(sorted(rows)))
    for node, children in enumerate(children_of(parents)):
        if children:
            rows = [places[child].row for child in children]
            assert places[node].row == (rows[0] + rows[-1]) / 2
            assert rows == sorted(rows)
    assert sorted(depth_first(children_of(parents))) == list(range(len(parents)))


def test_a_chain_of_ten_thousand_steps_is_laid_out():
    places = layout([None, *range(9_999)])
    assert (places[-1].column, places[-1].row) == (9_999, 0.0)


def test_margins_at_an_edge_count_above_it():
    counts = {column.label: column.count for column in margin_histogram([0.15, 0.1499, 1.0])}
    assert (counts["0.10 to 0.15"], counts["0.15 to 0.20"], counts["0.95 to 1.00"]) == (1, 1, 1)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_a_histogram_counts_every_value_within_its_picture(values):
    columns = whole_number_histogram(values)
    assert sum(column.count for column in columns) == len(values)
    assert len(columns) <= 20
    assert all(column.x + column.width <= WIDTH and column.y + column.height <= HEIGHT - 39 for column in columns)


@given(st.text(max_size=300), st.integers(2, 40))
def test_a_shortened_text_is_one_short_line(text, columns):
    line = shortened(text, columns)
    assert len(line) <= columns
    assert "\n" not in line
