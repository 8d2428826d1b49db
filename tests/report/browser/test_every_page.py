"""What holds for every page of a report in a real browser: contrast, width, foreign text, and what it asks for."""

from __future__ import annotations

import unicodedata

import pytest
from selenium.webdriver.common.by import By

from tests.report.browser.pages import node, text, whole

# Every visible text whose contrast with what lies behind it is below 4.5 (WCAG 2.2, 1.4.3). A canvas knows any colour.
FAINT = """
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(color) {
  if (color === "none") return [0, 0, 0, 0];
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = color;
  pixel.fillRect(0, 0, 1, 1);
  return [...pixel.getImageData(0, 0, 1, 1).data];
}
function luminance(color) {
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.map((part) => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const color = rgba(getComputedStyle(at).backgroundColor);
    if (color[3] === 255) return color;
  }
}
const found = new Map();
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
  if (element.matches("script, title, :disabled")) continue;
  const style = getComputedStyle(element);
  const color = element.namespaceURI.endsWith("svg") ? style.fill : style.color;
  const [above, below] = [luminance(rgba(color)), luminance(behind(element))];
  const contrast = (Math.max(above, below) + 0.05) / (Math.min(above, below) + 0.05);
  if (contrast < 4.5) found.set(`${element.tagName}.${element.className}`, contrast);
}
return Object.fromEntries(found);
"""


def test_letters_stand_out_in_light_and_dark(page):
    grounds = set()
    for dark in (False, True):
        for path in ("index.html", "questions/00000.html"):
            browser = page(path, dark=dark)
            if path.startswith("questions"):
                node(whole(browser), 2).click()
            assert browser.execute_script(FAINT) == {}
            grounds.add((dark, browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")))
    assert len(grounds) == len({ground for _, ground in grounds}) == 2


@pytest.mark.parametrize("path", ["index.html", "questions/00000.html", "questions/00001.html"])
def test_a_narrow_page_is_not_wider_than_its_window(page, path):
    browser = page(path, width=380, height=800)
    if path.startswith("questions"):
        node(whole(browser), 2).click()
    browser.execute_script("for (const folded of document.querySelectorAll('details')) folded.open = true")
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") <= 0


def test_foreign_text_is_shown_and_never_obeyed(page, run):
    for path in ("index.html", "questions/00001.html"):
        browser = page(path)
        if path.startswith("questions"):
            node(whole(browser), 6).click()
        browser.execute_script("for (const folded of document.querySelectorAll('details')) folded.open = true")
        assert not browser.find_elements(
            By.CSS_SELECTOR, "main img:not(.plot), iframe, [onerror], [onload], main [style]:not(#tree, .node)"
        )
        links = [link.get_attribute("href") for link in browser.find_elements(By.TAG_NAME, "a")]
        assert all(link.startswith((run / "report").as_uri()) for link in links)
        everything = browser.execute_script("return document.documentElement.outerHTML")
        assert not {char for char in everything if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
        shown = text(browser, "main")
        for inert in (
            "</script><script>alert(1)</script><img src=x",
            "�[31mred�]8;;http://evil",
            "abc�gnp.exe",
            "[red]",
        ):
            assert inert in shown
        assert browser.alerts() == []


def test_pages_say_nothing_on_the_console_and_ask_for_nothing_but_their_own_files(page, run):
    for path in ("index.html", "questions/00000.html", "questions/00001.html"):
        browser = page(path)
    assert browser.console() == []
    asked = browser.requests()
    assert len(asked) >= 6
    assert all(url.startswith(f"{(run / 'report').as_uri()}/") for url in asked)
