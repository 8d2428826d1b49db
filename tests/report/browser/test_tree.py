"""The page of a question as a person meets it, in a real browser: drawn, clicked, typed at, and read aloud."""

from __future__ import annotations

import re

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from reasonrag.report import write_report
from tests.e2e.product import pair_rows
from tests.report.browser.pages import PLAIN, node, press, sixty, text, whole
from tests.report.hostile import write_run

# Boxes, labels, lines and their looks as the browser has computed them, in the coordinates of the screen.
DRAWN = """
const box = ({ left, top, right, bottom }) => [left, top, right, bottom];
const inner = (node) => box(node.getBoundingClientRect());
return {
  nodes: [...document.querySelectorAll('.node')].map((node) => ({
    id: Number(node.dataset.id),
    box: inner(node),
    said: node.getAttribute("aria-label"),
    look: ["borderTopColor", "borderTopWidth", "borderTopStyle", "color"].map((name) => getComputedStyle(node)[name]),
    fill: getComputedStyle(node).backgroundColor,
  })),
  edges: [...document.querySelectorAll('.edge')].map((path) => ({
    look: ((style) => [style.stroke, parseFloat(style.strokeWidth), Number(style.opacity)])(getComputedStyle(path)),
  })),
};
"""


@pytest.fixture(params=["plain", "attack", "outline"])
def tree(request, page):
    """The page of a question with 60 nodes, all of them shown: plain words, words that attack, and those as outline."""
    browser = page(f"questions/0000{int(request.param != 'plain')}.html")
    if request.param == "outline":
        browser.find_element(By.ID, "outline").click()
    return whole(browser)


def drawn(browser):
    """Ids of the nodes that are shown."""
    return {int(node.get_attribute("data-id")) for node in browser.find_elements(By.CSS_SELECTOR, ".node")}


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_sixty_nodes_are_drawn_apart_each_with_its_figures(tree):
    nodes = tree.execute_script(DRAWN)["nodes"]
    assert sorted(drawn["id"] for drawn in nodes) == list(range(60))
    for place, drawn in enumerate(nodes):
        assert all(apart(drawn["box"], other["box"]) for other in nodes[:place]), drawn["id"]
        row = sixty()[drawn["id"]]
        spre = re.search(rf"SPRE (\S+) · N {row['visits']}:", drawn["said"])[1]
        assert spre == "–" if row["spre"] is None else abs(float(spre) - row["spre"]) < 0.001


def test_the_best_path_stands_out_and_branches_without_an_answer_are_faded(page):
    drawn = whole(page("questions/00000.html")).execute_script(DRAWN)
    looks = {node["id"]: node["look"] for node in drawn["nodes"]}
    best = {0, 2, 6, 14, 30}  # the shallowest answer
    usual, faded = looks[1], looks[3]  # node 3 is malformed
    assert {id for id, look in looks.items() if look == looks[2]} == best
    assert {id for id, look in looks.items() if look == faded} == set(range(3, 60, 7))
    assert looks[2][0] != usual[0] and float(looks[2][1][:-2]) > float(usual[1][:-2])
    assert (faded[2], usual[2]) == ("dashed", "solid")
    assert faded[3] != usual[3]  # softer letters
    fills = {node["id"]: node["fill"] for node in drawn["nodes"]}
    assert len({fills[id] for id in (0, 1, 2, 3)}) == 4  # SPRE 1, 1/2, 1/3 and none
    widths = [edge["look"][1] for edge in drawn["edges"]]
    assert widths.count(max(widths)) == len(best) - 1
    assert sum(edge["look"][2] < 1 for edge in drawn["edges"]) == len(range(3, 60, 7))


def test_the_first_screen_has_the_root_the_best_path_and_its_siblings(page):
    expected = {0, 1, 2, 5, 6, 13, 14, 29, 30}
    for width, height in ((1440, 900), (390, 844)):
        browser = page("questions/00000.html", width=width, height=height)
        nodes = browser.execute_script(DRAWN)["nodes"]
        assert {node["id"] for node in nodes} == expected
        assert all(node["box"][2] <= width and node["box"][3] <= height for node in nodes), width
        sizes = "return [...document.querySelectorAll('.node *')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
        assert min(browser.execute_script(sizes)) >= 12
        assert "best path leads to the answer with the highest SPRE" in text(browser, "main")


def test_nodes_below_are_counted_shown_and_hidden_and_an_address_opens_what_hides_a_node(page):
    browser = page("questions/00000.html")
    assert text(browser, "count") == "9 of 60 nodes shown"
    fold = node(browser, 5).find_element(By.CLASS_NAME, "fold")
    assert fold.text == "+14"
    fold.click()
    assert drawn(browser) == {0, 1, 2, 5, 6, 11, 12, 13, 14, 29, 30}
    assert node(browser, 5).get_attribute("aria-expanded") == "true"
    press(browser, " ")
    assert drawn(browser) == {0, 1, 2, 5, 6, 13, 14, 29, 30}
    Select(browser.find_element(By.ID, "shown")).select_by_visible_text("2 steps: 7 nodes")
    assert drawn(browser) == set(range(7))
    browser.execute_script("location.hash = '#node-59'")
    WebDriverWait(browser, 20).until(lambda _: text(browser, "panel-title") == "Node 59")
    rect = "return document.querySelector('{}').getBoundingClientRect()"
    frame, shown = (browser.execute_script(rect.format(of)) for of in ("#scroll", '.node[data-id="59"]'))
    assert frame["left"] <= shown["left"] and shown["right"] <= frame["right"] and shown["bottom"] <= frame["bottom"]


def test_equal_siblings_are_drawn_once_and_each_can_be_opened(browser, tmp_path):
    tree = sixty(question_id="plain", text=PLAIN)
    for row in tree[1:3]:
        row |= {"action": "query", "content": "the same"}
    write_report(write_run(tmp_path / "run", [tree], text="plain"))
    browser.view()
    browser.open(tmp_path / "run" / "report" / "questions" / "00000.html")
    whole(browser)
    assert drawn(browser) == set(range(60)) - {2}
    assert "2 query ×2" in node(browser, 1).text and "SPRE 0.333–0.500" in node(browser, 1).text
    node(browser, 1).click()
    assert text(browser, "panel-title") == "Node 2"  # which is on the best path
    browser.find_element(By.CSS_SELECTOR, "#panel summary").click()
    browser.find_element(By.CSS_SELECTOR, "#panel button").click()
    assert text(browser, "panel-title") == "Node 1"
    browser.find_element(By.ID, "merge").click()
    assert drawn(browser) == set(range(60))


def test_a_click_shows_what_a_node_was_asked_found_and_wrote_and_its_pairs(run, page):
    browser = whole(page("questions/00000.html"))
    pair = next(row for row in pair_rows(run) if row["question_id"] == "plain" and row["rejected_type"] == "query")
    row = sixty(question_id="plain", text=PLAIN)[pair["rejected_node_id"]]
    assert row["passages"]
    node(browser, row["node_id"]).click()
    assert text(browser, "panel-title") == f"Node {row['node_id']}"
    assert node(browser, row["node_id"]).get_attribute("aria-selected") == "true"
    for summary in browser.find_elements(By.CSS_SELECTOR, "#panel summary"):
        summary.click()
    shown = [found.text for found in browser.find_elements(By.CSS_SELECTOR, "#panel pre")]
    prompt = [message["content"] for message in row["prompt"]]
    assert shown == [row["text"], row["passages"][0]["contents"], *prompt, row["prefix"]]
    why = "reward {rejected_reward:.3f} against {chosen_reward:.3f}, margin {margin:.3f} (".format(**pair)
    assert f"rejected for node {pair['chosen_node_id']}: {why}" in text(browser, "panel-body")
    browser.find_element(By.CSS_SELECTOR, "#panel li button").click()
    assert text(browser, "panel-title") == f"Node {pair['chosen_node_id']}"
    assert f"chosen over node {row['node_id']}: reward " in text(browser, "panel-body")
    browser.refresh()
    assert text(browser, "panel-title") == f"Node {pair['chosen_node_id']}"  # its address leads to the node


def test_the_keyboard_alone_walks_the_tree_and_opens_a_node(page):
    browser = whole(page("questions/00000.html"))
    browser.find_element(By.ID, "fit").send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("data-id") == "0"
    steps = [(Keys.ARROW_RIGHT, "1"), (Keys.ARROW_DOWN, "2"), (Keys.ARROW_RIGHT, "5"), (Keys.ARROW_UP, "4")]
    for key, expected in [*steps, (Keys.ARROW_LEFT, "1"), (Keys.END, "30"), (Keys.HOME, "0")]:
        assert press(browser, key).get_attribute("data-id") == expected
    focused = press(browser, Keys.ARROW_RIGHT)
    outlines = [node(browser, id).value_of_css_property("outline-style") for id in (1, 2)]
    assert outlines == ["solid", "none"]
    assert focused.get_attribute("tabindex") == "0"
    assert len(browser.find_elements(By.CSS_SELECTOR, '.node[tabindex="0"]')) == 1
    assert press(browser, Keys.ENTER) == focused
    assert text(browser, "panel-title") == "Node 1"
    assert press(browser, Keys.TAB).text == "node 2"  # of the pairs in the panel, right behind the tree
    assert press(browser, Keys.ENTER).get_attribute("data-id") == "2"
    assert text(browser, "panel-title") == "Node 2"


def test_a_screen_reader_meets_a_tree_of_named_items(page):
    browser = whole(page("questions/00000.html"))
    node(browser, 2).click()
    found = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = [
        (item["role"]["value"], item["name"]["value"], {p["name"]: p["value"].get("value") for p in item["properties"]})
        for item in found
        if not item["ignored"] and item.get("name") and "properties" in item
    ]
    (tree,) = [name for role, name, _ in named if role == "tree"]
    assert tree == "Search tree of 60 nodes"
    items = {name: known for role, name, known in named if role == "treeitem"}
    assert len(items) == 60
    (chosen,) = [name for name, known in items.items() if known.get("selected")]
    assert chosen.startswith("best path: Node 2 query, SPRE 0.333 · N 1058: ")
    assert items[chosen]["level"] == 2
    assert {("complementary", "Node 2"), ("heading", "Node 2")} <= {(role, name) for role, name, _ in named}
