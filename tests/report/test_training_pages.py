from __future__ import annotations

import pytest

from reasonrag.report import write_report
from reasonrag.storage.parquet import read_parquet
from reasonrag.storage.tables import rollout_schema
from tests.report.finished import write_pair_training, write_training
from tests.report.reading_pages import Page, listed

STEPS, QUESTIONS, SIZE = 3, 2, 4


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


def test_curves_are_pictures_that_are_described_in_words(tmp_path, training):
    page = Page(write_report(write_pair_training(tmp_path / "dpo", text=plain)))
    loss, margin = (image["alt"] for image in page.all("img"))
    assert "train: 0.7 at 10, 0.6 at 20; held-out: 0.65 at 10" in loss
    assert "train: 0.1 at 10, 0.1 at 10" in margin  # a NaN is left out
    assert not page.all("table", id="list")
    page = Page(training[1] / "index.html")
    assert len(page.all("img")) == 3 + 9  # a chart for each component of the reward
    assert "a machine" not in page.text


def test_every_trajectory_is_listed_with_the_page_of_its_group(training, rows):
    found = listed(training[1])
    assert len(found) == len(rows) == STEPS * QUESTIONS * SIZE
    for cells, row in zip(found, rows, strict=True):
        assert (cells[1:4], cells[4]) == ([row["step"], row["question_id"], row["question"]], row["sample"] + 1)
        assert cells[5:9] == [row[name] for name in ("answer", "golden_answers", "reward", "advantage")]
        page, _, chosen = cells[-2].partition("#")
        attempts = Page(training[1] / page).details["attempts"]
        assert len(attempts) == SIZE and attempts[int(chosen.split(",")[0])]["label"] == f"attempt {cells[4]}"


def test_an_attempt_without_a_verdict_is_set_aside_and_never_0(training):
    found = listed(training[1])
    aside = [cells for cells in found if "unscored" in cells[-1]]
    assert len(aside) == STEPS * QUESTIONS
    assert {(cells[7], cells[13]) for cells in aside} == {(None, "unreachable")}
    assert all(cells[7] is not None and not cells[13] for cells in found if cells not in aside)
    attempts = Page(training[1] / aside[0][-2].partition("#")[0]).details["attempts"]
    assert attempts[-1]["facts"][0] == "set aside: unreachable"


def test_a_group_has_components_and_its_tokens(training):
    details = Page(training[1] / "questions" / "00000.html").details
    attempts = [attempt["facts"] for attempt in details["attempts"]]
    table = dict(zip(details["facts"], map(list, zip(*attempts, strict=True)), strict=True))
    assert table["answer"] == ["0", "1", "0", "1"]
    assert table["bonus"] == ["0.4", "0.4", "0.4", None]
    assert table["policy tokens"] == ["20", "20", "20", "20"]
    assert table["stop reason"] == ["answered", "answered", "answered, cut off", "answered"]


def test_of_a_long_training_run_every_nth_file_is_shown(training, tmp_path, monkeypatch):
    monkeypatch.setattr("reasonrag.report.attempt_pages._MOST_TRAJECTORIES", 2 * QUESTIONS * SIZE)
    report = write_report(training[0], tmp_path / "report").parent
    assert [cells[1] for cells in listed(report)[:: QUESTIONS * SIZE]] == [1, 3]
    assert "one step in 2" in Page(report / "index.html").text
