"""The lists of questions and pairs as a person meets them, in a real browser: searched, sorted, paged, and left."""

from __future__ import annotations

from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.report.browser.pages import SMALL, press, text


def column(browser, number):
    cells = f"#list tbody td:nth-child({number})"
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map((c) => c.innerText)", cells)


def ids(browser):
    """The questions of the list."""
    return [
        name.split()[-1]
        for name in browser.execute_script(
            "return [...document.querySelectorAll('#list tbody small')].map((name) => name.innerText)"
        )
    ]


def test_a_search_keeps_what_has_all_its_words_and_says_how_many(page):
    browser = page("index.html")
    assert text(browser, "status") == f"{SMALL + 2} of {SMALL + 2} questions"
    browser.find_element(By.ID, "search").send_keys("SHIP 11 who?")
    assert text(browser, "status") == f"11 of {SMALL + 2} questions"  # 11, and 110 to 119
    assert ids(browser) == [f"q{n}" for n in (11, *range(110, 120))]
    press(browser, "x")
    assert (text(browser, "status"), ids(browser)) == (f"0 of {SMALL + 2} questions", [])
    assert text(browser, "page") == "Page 0 of 0"


def test_a_question_leads_back_to_the_list_as_it_was(page):
    browser = page("index.html")
    browser.find_element(By.ID, "search").send_keys("ship")
    for _ in range(2):
        browser.find_element(By.CSS_SELECTOR, "#list th:nth-child(2) button").click()  # the last one first
    browser.find_element(By.ID, "next").click()
    left = ids(browser)
    assert left[0] == f"q{SMALL - 51}"
    for back in (browser.back, lambda: browser.find_element(By.LINK_TEXT, "All questions").click(), browser.refresh):
        if back != browser.refresh:
            browser.find_element(By.CSS_SELECTOR, "#list a").click()
            WebDriverWait(browser, 20).until(lambda _: browser.find_elements(By.ID, "panel"))
        back()
        WebDriverWait(browser, 20).until(lambda _: ids(browser) == left)  # going back may take a moment
        assert text(browser, "page") == "Page 2 of 3"
        assert browser.find_element(By.ID, "search").get_attribute("value") == "ship"
        assert browser.find_element(By.CSS_SELECTOR, "#list [aria-sort=descending]").text.startswith("question")
