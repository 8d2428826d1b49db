"""A report with trees of 60 nodes, plain ones and such as attack their reader, and what tests do on its pages."""

from __future__ import annotations

from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from tests.report.hostile import HOSTILE, rows

PLAIN = "Which town on the river was home to the captain of the Meridian"
ATTACK = f"WHOMEVER WE MOMENTARILY MARRED {HOSTILE}<a href='javascript:alert(3)'>javascript:alert(4)</a>\x9b2J\r[red]"
SMALL = 120  # questions after the two trees of 60 nodes; a page of the list has 50


def sixty(**texts):
    """A tree of 60 nodes that a search has visited often."""
    return [row | {"visits": 1000 + row["visits"]} for row in rows(60, **texts)]


def whole(browser):
    """Show every node."""
    Select(browser.find_element(By.ID, "shown")).select_by_value("all")
    return browser


def text(browser, id):
    return browser.find_element(By.ID, id).text


def node(browser, number):
    return browser.find_element(By.CSS_SELECTOR, f'.node[data-id="{number}"]')


def press(browser, *keys):
    """Press them one after another where the focus is; returns what has it then."""
    for key in keys:
        browser.switch_to.active_element.send_keys(key)
    return browser.switch_to.active_element
