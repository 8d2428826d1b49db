from __future__ import annotations

import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from reasonrag.core.errors import DataError
from reasonrag.report import write_report
from reasonrag.storage.parquet import read_shards, write_parquet
from reasonrag.storage.tables import trajectory_schema
from tests.report.finished import GOLD, SETTING, write_evaluation
from tests.report.reading_pages import Page, listed

COUNT = 13
# Where two attempts part that do the same, and what their step is called.
OTHER_WORDS = """
const [first, second] = ["a", "b"].map((text) => ({ steps: [{ text, action: "query", content: "x", passages: [] }] }));
return [forkOf(first, second), mark([first, second], 0, 1)];
"""
POLICIES = ("base", "other", "third")
FAILING = (("other", 1), ("base", 12), *((name, 5) for name in POLICIES))


def plain(words):
    return " ".join(["word"] * words)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "eval"
    write_evaluation(folder, COUNT, POLICIES, text=plain, failing=FAILING)
    return folder, write_report(folder).parent


def rows(folder, policy):
    return list(read_shards(folder / policy / "trajectories", SETTING.name, trajectory_schema()))


def details(report, place):
    return Page(report / "questions" / f"{place:05d}.html").details


def test_each_question_has_the_attempts_of_all_policies(evaluation):
    folder, report = evaluation
    found = listed(report)
    asked = [n for n in range(COUNT) if n != 5]  # which nobody finished
    assert [int(cells[1].split()[0][1:]) for cells in found] == asked
    by_policy = {name: {row["question_id"]: row for row in rows(folder, name)} for name in POLICIES}
    for cells in found:
        shown = details(report, cells[0])["attempts"]
        for name, (attempt, told) in zip(POLICIES, zip(shown, cells[5], strict=True), strict=True):
            row = by_policy[name].get(cells[1])
            if row is None:
                assert (attempt["steps"], attempt["cause"], told) == ([], "word", "word")
            else:
                assert told[:3] == [row["answer"], row["em"], row["f1"]]
                assert [step["text"] for step in attempt["steps"]] == [step["text"] for step in row["trajectory"]]


def test_a_turn_that_goes_on_is_kept_once_and_whole(evaluation):
    folder, report = evaluation
    row = rows(folder, "base")[3]
    found = details(report, 3)
    (attempt, *_) = found["attempts"]
    turn = ""
    for step, recorded in zip(attempt["steps"], row["trajectory"], strict=True):
        turn = turn + step["prefix"] if step["continues"] else step["prefix"]
        assert turn == recorded["prefix"]
        assert [found["messages"][place] for place in step["prompt"]] == recorded["prompt"]
        assert [found["passages"][place]["contents"] for place, _ in step["passages"]] == [
            passage["contents"] for passage in recorded["passages"]
        ]
        turn += step["text"]


def test_the_first_page_tells_the_figures_with_their_intervals(evaluation):
    folder, report = evaluation
    figures = json.loads((folder / "metrics.json").read_text())
    text = Page(report / "index.html").text.replace("\n[", " [")  # an interval stands below its mean
    for settings in figures["policies"].values():
        em = settings[SETTING.name]["em"]
        assert f"{em['mean']:.3f} [{em['low']:.3f}, {em['high']:.3f}]" in text
    for row in figures["differences"]:
        if row["metric"] == "em":
            assert f"{row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]" in text
    assert "Questions set aside, by cause" in text


def test_one_policy_alone_has_pages_too(tmp_path):
    report = write_report(write_evaluation(tmp_path / "eval", 2, ("base",), text=plain)).parent
    assert not Page(report / "index.html").all("select", id="left")
    assert [len(cells[5]) for cells in listed(report)] == [1, 1]


def test_tables_in_different_orders_are_refused(tmp_path):
    folder = write_evaluation(tmp_path / "eval", 4, text=plain)
    path = folder / "other" / "trajectories" / f"{SETTING.name}-00000-of-00001.parquet"
    write_parquet(path, list(reversed(rows(folder, "other"))), trajectory_schema())
    with pytest.raises(DataError, match="in different orders"):
        write_report(folder)


def test_a_person_finds_where_policies_differ_and_sees_where_they_part(browser, evaluation):
    report = evaluation[1]
    browser.open(report / "index.html")
    status = browser.find_element(By.ID, "status")
    assert status.text == f"{COUNT - 1} of {COUNT - 1} questions"
    # base is wrong at multiples of two, other of three; of 1 and 12 one was set aside.
    Select(browser.find_element(By.ID, "filter")).select_by_value("em")
    assert status.text == f"6 of {COUNT - 1} questions"  # 2, 3, 4, 8, 9, 10
    Select(browser.find_element(By.ID, "right")).select_by_visible_text("third")
    assert status.text == f"3 of {COUNT - 1} questions"  # third is wrong at multiples of four: 2, 6, 10
    Select(browser.find_element(By.ID, "filter")).select_by_value("gained")
    gained = status.text
    Select(browser.find_element(By.ID, "left")).select_by_visible_text("third")
    Select(browser.find_element(By.ID, "right")).select_by_visible_text("base")
    Select(browser.find_element(By.ID, "filter")).select_by_value("lost")
    assert status.text == gained  # the same questions, seen from the other side
    Select(browser.find_element(By.ID, "filter")).select_by_value("")
    browser.find_element(By.CSS_SELECTOR, "#list th:last-child button").click()
    apart = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#list tbody td:last-child")]
    known = [float(value) for value in apart if value != "–"]
    assert known == sorted(known) and known[0] < 0

    browser.find_elements(By.CSS_SELECTOR, "#list a")[-1].click()
    assert browser.current_url.endswith("#2,0")
    assert [Select(browser.find_element(By.ID, side)).first_selected_option.text for side in ("left", "right")] == [
        "third",
        "base",
    ]
    browser.find_element(By.LINK_TEXT, "All questions").click()
    for side, policy in (("left", "base"), ("right", "other")):  # as they were chosen before
        chosen = Select(browser.find_element(By.ID, side))
        assert chosen.first_selected_option.text != policy
        chosen.select_by_visible_text(policy)
    browser.find_element(By.ID, "search").send_keys("q3")
    browser.find_element(By.CSS_SELECTOR, "#list a").click()
    assert browser.find_element(By.ID, "difference").text == "They first differ in step 2 of 5."
    steps = [step.text.splitlines()[0] for step in browser.find_elements(By.CSS_SELECTOR, "#steps > li")]
    assert steps == ["Step 1: the same", "Step 2: here they first differ", "Step 3", "Step 4", "Step 5"]
    assert "own 0" in browser.find_element(By.CSS_SELECTOR, ".fork article").text
    assert browser.execute_script(OTHER_WORDS) == [1, ": the same, in other words"]
    passage = browser.find_element(By.CSS_SELECTOR, "#steps details")
    passage.find_element(By.TAG_NAME, "summary").click()
    assert passage.find_element(By.TAG_NAME, "pre").text.startswith("Title\nword")
    scores = browser.find_element(By.ID, "scores").text
    assert f"answer {GOLD} not word word {GOLD}" in scores and "EM 1 0 1" in scores
    browser.view(dark=True, width=420)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    browser.find_element(By.LINK_TEXT, "Next").click()
    assert browser.current_url.endswith("00004.html#0,1")
    assert browser.console() == []
    assert all(url.startswith(report.as_uri()) for url in browser.requests())
