from __future__ import annotations

import pytest

from reasonrag.report import write_report
from tests.report.browser.pages import ATTACK, PLAIN, SMALL, sixty
from tests.report.hostile import rows, write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    trees = [sixty(question_id="plain", text=PLAIN), sixty(question_id=ATTACK, dataset=ATTACK, text=ATTACK)]
    trees += [rows(1 + n % 7, question_id=f"q{n}", text=f"the ship {n} of {SMALL}") for n in range(SMALL)]
    folder = write_run(tmp_path_factory.mktemp("browser") / "run", trees, text=ATTACK)
    write_report(folder)
    return folder


@pytest.fixture
def page(browser, run):
    """Opens a page of the report, by its path, in a window of a laptop's size or another."""

    def opened(path, **view):
        browser.view(**view)
        browser.open(run / "report" / path)
        return browser

    return opened
