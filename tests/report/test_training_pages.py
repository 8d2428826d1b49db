from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from reasonrag.core.errors import DataError
from reasonrag.core.plots import Line, Panel
from reasonrag.report import write_report
from reasonrag.report.charts import chart, charts
from reasonrag.report.training_pages import pieces, steps_shown, weights
from reasonrag.storage.parquet import read_parquet
from reasonrag.storage.tables import rollout_schema
from tests.report.finished import write_pair_training, write_training
from tests.report.reading_pages import Page, listed

STEPS, QUESTIONS, SIZE = 3, 2, 4
NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=50)

# Pairs of texts of a page's pictures that lie over each other, and texts that reach out of their picture.
COLLISIONS = """
const found = [];
for (const picture of document.querySelectorAll("svg.plot")) {
  const frame = picture.getBoundingClientRect();
  const texts = [...picture.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([name, a], place) => {
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1) found.push([name, "out"]);
    for (const [other, b] of texts.slice(place + 1))
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) found.push([name, other]);
  });
}
return found;
"""


def plain(words):
    return " ".join(["word"] * words)


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    folder = write_training(
        tmp_path_factory.mktemp("training") / "rl", steps=STEPS, questions=QUESTIONS, size=SIZE, text=plain
    )
    return folder, write_report(folder).parent


@pytest.fixture(scope="module")
def rows(training):
    return [
        row for path in sorted((training[0] / "rollouts").iterdir()) for row in read_parquet(path, rollout_schema())
    ]


def test_curves_are_told_in_words_and_numbers(tmp_path):
    page = Page(write_report(write_pair_training(tmp_path / "dpo", text=plain)))
    assert len(page.all("svg", role="img")) == 2  # loss and margin, each in training and held out
    assert "train: 0.7 at 10, 0.6 at 20, lowest 0.6, highest 0.7. held-out: 0.65 at 10" in page.text
    assert "train: 0.1 at 10, 0.1 at 10" in page.text  # what is no number is left out
    assert not (page.path.parent / "rollouts").exists() and not page.all("table", id="list")
    assert ["max length", "12,345"] in page.rows


def test_the_machine_is_not_told(training):
    assert "a machine" not in (training[1] / "index.html").read_text(encoding="utf-8")


def test_many_components_are_a_chart_each(training):
    page = Page(training[1] / "index.html")
    assert "components of the reward: 9 charts" in page.text
    assert len(page.all("svg", role="img")) == 2 + 9


def test_every_trajectory_is_listed_with_the_page_of_its_group(training, rows):
    found = listed(training[1])
    assert len(found) == len(rows) == STEPS * QUESTIONS * SIZE
    for cells, row in zip(found, rows, strict=True):
        assert (cells[1:4], cells[4]) == ([row["step"], row["question_id"], row["question"]], row["sample"] + 1)
        assert cells[5:9] == [row[name] for name in ("answer", "golden_answers", "reward", "advantage")]
        page, _, anchor = cells[-2].partition("#")
        group = Page(training[1] / page)
        assert group.all("article", id=anchor)
        assert len(group.all("article")) == SIZE


def test_an_attempt_without_a_verdict_is_set_aside_and_never_0(training):
    found = listed(training[1])
    aside = [cells for cells in found if "unscored" in cells[-1]]
    assert len(aside) == STEPS * QUESTIONS
    assert {(cells[7], cells[13]) for cells in aside} == {(None, "unreachable")}
    assert all(cells[7] is not None and not cells[13] for cells in found if cells not in aside)
    page = Page(training[1] / aside[0][-2].partition("#")[0])
    assert page.text.count("set aside: unreachable") == 2  # in the table of rewards, and over the attempt


def test_a_group_tells_components_with_their_weights_and_what_was_in_the_loss(training):
    page = Page(training[1] / "groups" / "00000.html")
    table = {cells[0]: cells[1:] for cells in page.rows}
    assert table["answer"] == ["0.8", "0", "1", "0", "1"]
    assert table["format"] == ["0.2", "1", "1", "1", "1"]
    assert table["bonus"] == ["1", "0.4", "0.4", "0.4", "–"]  # its weight is in it
    assert table["em"] == ["", "0", "1", "0", "1"]
    assert table["policy tokens"] == ["", "20", "20", "20", "20"]
    assert table["policy tokens in the loss"] == ["", "20", "20", "0", "0"]  # cut off; without a verdict
    assert table["stop reason"] == ["", "answered", "answered", "answered, cut off", "answered"]


def test_what_an_answer_earns_at_least_is_told_where_there_is_such_a_thing(tmp_path):
    folder = write_training(tmp_path / "rl", steps=1, questions=1, text=plain, reward="outcome")
    least = "and at least 0.1 if there is an answer"
    assert least not in Page(write_report(folder).parent / "groups" / "00000.html").text
    summary = json.loads((folder / "training.json").read_text())
    summary["settings"]["reward"]["outcome"] |= {"format_weight": 0.2, "answer_present": 0.1}
    (folder / "training.json").write_text(json.dumps(summary))
    text = Page(write_report(folder).parent / "groups" / "00000.html").text
    assert least in text and "exact match of the answer" in text  # what `em` is


def test_weights_are_those_of_the_formulas():
    assert weights({"name": "outcome", "outcome": {"format_weight": 0.2}}) == {"answer": 0.8, "format": 0.2}
    of = {"lambda_p": 0.3, "lambda_a": 0.6, "lambda_f": 0.1}
    assert weights({"name": "search-p1", "search_p1": of}) == {"path": 0.3, "outcome": 0.6, "format": 0.1}
    assert weights({"name": "mine:Reward"}) == {}


@given(st.text(alphabet="<>/ab\n", max_size=30), st.text(max_size=30))
def test_pieces_join_to_the_turn(before, found):
    turn = f"{before}</search>\n<information>{found}</information>{before}</search>{found}"
    for name in ("search_r1", "hiprag", "unknown"):
        assert "".join(piece.text for piece in pieces(turn, name)) == turn
    told = [piece.text for piece in pieces(turn, "search_r1") if piece.is_passages]
    assert told[:1] == ([found.partition("</information>")[0]] if found.partition("</information>")[0] else told[:1])


def test_of_a_long_training_evenly_chosen_steps_are_shown(training):
    folder = training[0] / "rollouts"
    some = steps_shown(folder, most=2 * QUESTIONS * SIZE)
    assert (some.shown, some.total) == (2, STEPS)
    assert [path.name for path in some.files] == ["step-000001.parquet", "step-000003.parquet"]
    assert steps_shown(folder).shown == STEPS


def test_damaged_rollouts_are_refused(tmp_path):
    folder = write_training(tmp_path / "rl", steps=1, questions=1, text=plain)
    (folder / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"step-000001\.parquet cannot be read"):
        write_report(folder)
    assert not (folder / "report" / "index.html").exists()


@settings(max_examples=15, deadline=None)
@given(NUMBERS, NUMBERS)
def test_a_chart_holds_its_points_and_ticks(first, second):
    lines = Line("a", range(len(first)), first), Line("b", range(len(second)), second)
    drawn = chart(Panel("t", "step", "y", lines), "chart-1")
    known = [(float(x), y) for line in lines for x, y in zip(line.x, line.y, strict=True) if not math.isnan(y)]
    shown = [(float(x), value) for x, values in drawn.rows for value in values if value is not None]
    assert sorted(shown) == sorted(known)
    assert drawn.labels == [line.label for line in lines if not all(map(math.isnan, line.y))]
    if drawn.svg is None:
        assert not known
        return
    root = ElementTree.fromstring(drawn.svg)
    left, top, right, bottom = map(float, root.attrib["viewBox"].split())
    labels = [(element.attrib, element.text) for element in root.iter("text")]
    assert all(left <= float(at["x"]) <= right and top <= float(at["y"]) <= bottom for at, _ in labels if "x" in at)
    assert drawn.title in [text for _, text in labels]


def test_a_line_without_a_number_is_no_column():
    nothing = Line("a", [1.0], [float("inf")])
    drawn = chart(Panel("t", "step", "y", (nothing, Line("b", [1.0], [2.0]))), "chart-1")
    assert (drawn.labels, drawn.rows) == (["b"], [("1", [2.0])])


def test_lines_of_one_label_are_columns_of_their_own():
    lines = (Line("word " * 20 + "a", [1.0], [2.0]), Line("word " * 20 + "b", [1.0], [3.0]))
    assert chart(Panel("t", "step", "y", lines), "chart-1").rows == [("1", [2.0, 3.0])]


def test_a_long_curve_has_a_short_table():
    line = Line("a", range(5_000), [1.0] * 5_000)
    ((drawn,), _) = charts([Panel("t", "step", "y", (line,))])
    assert (drawn.every, len(drawn.rows)) == (25, 200)


def test_a_person_finds_what_was_set_aside_and_reads_its_group(browser, training):
    report = training[1]
    for dark, width in ((False, 1400), (True, 420)):
        browser.view(dark=dark, width=width)
        browser.open(report / "index.html")
        browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert browser.execute_script(COLLISIONS) == []
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    Select(browser.find_element(By.ID, "filter")).select_by_value("unscored")
    count = STEPS * QUESTIONS
    assert browser.find_element(By.ID, "status").text == f"{count} of {count * SIZE} trajectories"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#list tbody tr")) == count
    browser.find_element(By.CSS_SELECTOR, "#list a").click()
    aimed = browser.find_element(By.CSS_SELECTOR, "article:target")
    assert f"Attempt {SIZE}" in aimed.text and "set aside: unreachable" in aimed.text
    passages = browser.find_element(By.CSS_SELECTOR, "#attempt-1 details")
    passages.find_element(By.TAG_NAME, "summary").click()
    assert passages.find_element(By.TAG_NAME, "pre").text.startswith("[1] Title")
    browser.find_element(By.LINK_TEXT, "Next").click()
    assert browser.current_url.endswith("groups/00001.html")
    assert browser.console() == []
    assert all(url.startswith(report.as_uri()) for url in browser.requests())


def test_summary_and_pages_agree_on_the_settings(training):
    summary = json.loads((training[0] / "training.json").read_text())
    text = Page(training[1] / "index.html").text
    assert all(str(value) in text for value in summary["identity"].values())
