"""The report as a person meets it, in a real browser: drawn, clicked, typed at, and attacked."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from reasonrag.report import write_report
from tests.browser import chromium
from tests.e2e.product import pair_rows
from tests.report.hostile import HOSTILE, rows, write_run

PLAIN = "Which town on the river was home to the captain of the Meridian"
ATTACK = f"WHOMEVER WE MOMENTARILY MARRED {HOSTILE}<a href='javascript:alert(3)'>javascript:alert(4)</a>\x9b2J\r[red]"
SMALL = 120  # questions after the two trees of 60 nodes; a page of the list has 50

# Boxes, labels, lines and their looks as the browser has computed them, in the coordinates of the screen.
DRAWN = """
const box = ({ left, top, right, bottom }) => [left, top, right, bottom];
const inner = (node) => box(node.getBoundingClientRect());
const end = (path, length) => {
  const point = path.getPointAtLength(length).matrixTransform(path.getScreenCTM());
  return [point.x, point.y];
};
return {
  nodes: [...document.querySelectorAll('.node')].map((node) => ({
    id: Number(node.dataset.id),
    box: inner(node),
    said: node.getAttribute("aria-label"),
    labels: [...node.querySelectorAll('.title, .figures, .mark, .quote, .fold')].map((label) => ({
      text: label.textContent,
      box: box(label.getBoundingClientRect()),
      cut: label.scrollWidth > label.clientWidth && getComputedStyle(label).textOverflow !== "ellipsis",
    })).filter((label) => label.text),
    look: ["borderTopColor", "borderTopWidth", "borderTopStyle", "color"].map((name) => getComputedStyle(node)[name]),
    fill: getComputedStyle(node).backgroundColor,
  })),
  edges: [...document.querySelectorAll('.edge')].map((path) => ({
    start: end(path, 0),
    end: end(path, path.getTotalLength()),
    look: ((style) => [style.stroke, parseFloat(style.strokeWidth), Number(style.opacity)])(getComputedStyle(path)),
  })),
};
"""

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


def sixty(**texts):
    """A tree of 60 nodes that a search has visited often."""
    return [row | {"visits": 1000 + row["visits"]} for row in rows(60, **texts)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trees = [sixty(question_id="plain", text=PLAIN), sixty(question_id=ATTACK, dataset=ATTACK, text=ATTACK)]
    trees += [rows(1 + n % 7, question_id=f"q{n}", text=f"the ship {n} of {SMALL}") for n in range(SMALL)]
    folder = write_run(tmp_path_factory.mktemp("browser") / "run", trees, text=ATTACK)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, run):
    """Opens a page of the report, by its path, in a window of a laptop's size or another."""

    def opened(path, **view):
        browser.view(**view)
        browser.open(run / "report" / path)
        return browser

    return opened


@pytest.fixture(params=["plain", "attack", "outline"])
def tree(request, page):
    """The page of a question with 60 nodes, all of them shown: plain words, words that attack, and those as outline."""
    browser = page(f"questions/0000{int(request.param != 'plain')}.html")
    if request.param == "outline":
        browser.find_element(By.ID, "outline").click()
    return whole(browser)


def whole(browser):
    """Show every node."""
    Select(browser.find_element(By.ID, "shown")).select_by_value("all")
    return browser


def drawn(browser):
    """Ids of the nodes that are shown."""
    return {int(node.get_attribute("data-id")) for node in browser.find_elements(By.CSS_SELECTOR, ".node")}


def text(browser, id):
    return browser.find_element(By.ID, id).text


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


def node(browser, number):
    return browser.find_element(By.CSS_SELECTOR, f'.node[data-id="{number}"]')


def press(browser, *keys):
    """Press them one after another where the focus is; returns what has it then."""
    for key in keys:
        browser.switch_to.active_element.send_keys(key)
    return browser.switch_to.active_element


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_sixty_nodes_are_drawn_apart_each_with_its_figures(tree):
    nodes = tree.execute_script(DRAWN)["nodes"]
    assert sorted(node["id"] for node in nodes) == list(range(60))
    for place, node in enumerate(nodes):
        assert all(apart(node["box"], other["box"]) for other in nodes[:place]), node["id"]
        row = sixty()[node["id"]]
        spre = re.search(rf"SPRE (\S+) · N {row['visits']}:", node["said"])[1]
        assert spre == "–" if row["spre"] is None else abs(float(spre) - row["spre"]) < 0.001


def test_labels_stay_within_their_box_and_off_each_other(tree):
    for node in tree.execute_script(DRAWN)["nodes"]:
        left, top, right, bottom = node["box"]
        for place, label in enumerate(node["labels"]):
            x, y, end, below = label["box"]
            assert left + 2 <= x and end <= right - 2 and top < y and below < bottom, (node["id"], label)
            assert not label["cut"], label
            # A line's box has room above and below its letters.
            assert all(apart([x, y + 2, end, below - 2], other["box"]) for other in node["labels"][:place]), label


def test_lines_lead_from_the_right_of_each_parent_to_the_left_of_its_child(page):
    drawn = whole(page("questions/00000.html")).execute_script(DRAWN)
    boxes = {node["id"]: node["box"] for node in drawn["nodes"]}

    def at(point, side):
        (found,) = [id for id, box in boxes.items() if abs(box[side] - point[0]) <= 3 and box[1] < point[1] < box[3]]
        return found

    lines = {(at(edge["start"], 2), at(edge["end"], 0)) for edge in drawn["edges"]}
    assert lines == {((child - 1) // 2, child) for child in range(1, 60)}


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


def test_zoom_makes_the_whole_tree_fit_its_frame(page):
    browser = whole(page("questions/00000.html"))
    over = "return [scroll.scrollWidth - scroll.clientWidth, scroll.scrollHeight - scroll.clientHeight]"
    assert max(browser.execute_script(over)) > 100
    browser.find_element(By.ID, "fit").click()
    assert max(browser.execute_script(over)) <= 1
    before = browser.execute_script(width := "return document.querySelector('.node').getBoundingClientRect().width")
    browser.find_element(By.ID, "closer").click()
    assert browser.execute_script(width) > before


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


def test_a_pair_of_the_question_shows_both_texts_side_by_side(run, page):
    browser = page("questions/00000.html")
    pair = next(row for row in pair_rows(run) if row["question_id"] == "plain")
    browser.find_element(By.CSS_SELECTOR, ".pair summary").click()
    sides = WebDriverWait(browser, 20).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".pair article"))
    nodes = sixty(question_id="plain", text=PLAIN)
    assert [side.find_element(By.TAG_NAME, "pre").text for side in sides] == [
        nodes[pair[f"{side}_node_id"]]["text"] for side in ("chosen", "rejected")
    ]
    assert sides[0].rect["y"] == sides[1].rect["y"] and sides[0].rect["x"] < sides[1].rect["x"]


def test_the_list_of_pairs_begins_with_the_smallest_margin_filters_by_type_and_opens_both_texts(run, page):
    browser = page("pairs.html")
    pairs = pair_rows(run)
    assert text(browser, "status") == f"{len(pairs)} of {len(pairs)} pairs"
    margins = [float(margin) for margin in column(browser, 9)]
    assert margins == sorted(margins) and margins[0] == round(min(pair["margin"] for pair in pairs), 3)
    kinds = Select(browser.find_element(By.ID, "filter"))
    for kind, count in Counter(f"{pair['chosen_type']} > {pair['rejected_type']}" for pair in pairs).items():
        kinds.select_by_value(kind)
        assert text(browser, "status") == f"{count} of {len(pairs)} pairs"
        assert set(column(browser, 3)) == {kind}
    kinds.select_by_value("")
    browser.find_element(By.ID, "search").send_keys("plain " + PLAIN)
    browser.find_element(By.CSS_SELECTOR, "#list tbody button").click()
    sides = WebDriverWait(browser, 20).until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".opened article"))
    texts = {row["text"] for row in sixty(question_id="plain", text=PLAIN)}
    assert len(sides) == 2 and all(side.find_element(By.TAG_NAME, "pre").text in texts for side in sides)
    browser.find_element(By.CSS_SELECTOR, "#list tbody button").click()
    assert not browser.find_elements(By.CSS_SELECTOR, ".opened")
    browser.find_element(By.CSS_SELECTOR, "#list a").click()
    assert browser.find_element(By.CSS_SELECTOR, ".pair[open] article").is_displayed()


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


def test_a_search_keeps_what_has_all_its_words_and_says_how_many(page):
    browser = page("index.html")
    assert text(browser, "status") == f"{SMALL + 2} of {SMALL + 2} questions"
    browser.find_element(By.ID, "search").send_keys("SHIP 11 who?")
    assert text(browser, "status") == f"11 of {SMALL + 2} questions"  # 11, and 110 to 119
    assert ids(browser) == [f"q{n}" for n in (11, *range(110, 120))]
    press(browser, "x")
    assert (text(browser, "status"), ids(browser)) == (f"0 of {SMALL + 2} questions", [])
    assert text(browser, "page") == "Page 0 of 0"


def test_a_heading_sorts_by_its_column_both_ways(page):
    browser = page("index.html")
    nodes = browser.find_element(By.CSS_SELECTOR, "#list th:nth-child(5) button")
    for direction, first in (("ascending", 1), ("descending", 60)):
        nodes.click()
        assert nodes.find_element(By.XPATH, "..").get_attribute("aria-sort") == direction
        shown = [int(count) for count in column(browser, 4)]
        assert shown == sorted(shown, reverse=direction == "descending")
        assert shown[0] == first and len(set(shown)) > 1
    assert len(browser.find_elements(By.CSS_SELECTOR, "#list [aria-sort]")) == 1


def test_the_list_is_paged(page):
    browser = page("index.html")
    back, on = browser.find_element(By.ID, "previous"), browser.find_element(By.ID, "next")
    seen = column(browser, 1)
    assert not back.is_enabled()
    for number in (2, 3):
        on.click()
        assert text(browser, "page") == f"Page {number} of 3"
        seen += column(browser, 1)
    assert seen == [str(place + 1) for place in range(SMALL + 2)]
    assert not on.is_enabled()
    back.click()
    assert column(browser, 1)[0] == "51"


def test_a_question_opens_from_the_list_and_its_neighbours_from_it(page):
    browser = page("index.html")
    browser.find_element(By.CSS_SELECTOR, "#list a").click()
    headings = [browser.find_element(By.TAG_NAME, "h1").text]
    for link in ("next", "next", "prev"):
        browser.find_element(By.CSS_SELECTOR, f"nav a[rel={link}]").click()
        headings.append(browser.find_element(By.TAG_NAME, "h1").text)
    assert headings[0] == f"Who? {PLAIN}"
    assert headings[2] == f"Who? the ship 0 of {SMALL}"
    assert headings[1] == headings[3] != headings[0]
    browser.find_element(By.LINK_TEXT, "All questions").click()
    assert text(browser, "status").startswith(f"{SMALL + 2} of")


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


def test_letters_stand_out_in_light_and_dark(page):
    grounds = set()
    for dark in (False, True):
        for path in ("index.html", "pairs.html", "questions/00000.html"):
            browser = page(path, dark=dark)
            if path.startswith("questions"):
                node(whole(browser), 2).click()
            assert browser.execute_script(FAINT) == {}
            grounds.add((dark, browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")))
    assert len(grounds) == len({ground for _, ground in grounds}) == 2


@pytest.mark.parametrize("path", ["index.html", "pairs.html", "questions/00000.html", "questions/00001.html"])
def test_a_narrow_page_is_not_wider_than_its_window(page, path):
    browser = page(path, width=380, height=800)
    if path.startswith("questions"):
        node(whole(browser), 2).click()
    browser.execute_script("for (const folded of document.querySelectorAll('details')) folded.open = true")
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth - {root}.clientWidth") <= 0


@pytest.mark.parametrize("path", ["index.html", "pairs.html"])
def test_a_laptop_shows_every_table_of_a_list_whole(page, path):
    browser = page(path)
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.scrollWidth > e.clientWidth && e.clientWidth)"
    assert browser.execute_script(f"return {wide}.map((e) => e.outerHTML.slice(0, 80))") == []


def test_a_click_in_a_narrow_window_brings_the_panel_into_it(page):
    browser = page("questions/00000.html", width=380, height=800)
    node(browser, 0).click()
    title = "document.getElementById('panel-title').getBoundingClientRect()"
    assert browser.execute_script(f"return 0 <= {title}.top && {title}.bottom <= innerHeight")


def test_foreign_text_is_shown_and_never_obeyed(page, run):
    for path in ("index.html", "pairs.html", "questions/00001.html"):
        browser = page(path)
        if path.startswith("questions"):
            node(whole(browser), 6).click()
        browser.execute_script("for (const folded of document.querySelectorAll('details')) folded.open = true")
        assert not browser.find_elements(
            By.CSS_SELECTOR, "img, iframe, [onerror], [onload], main [style]:not(#tree, .node)"
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
    before = len(page("index.html").requests())
    for path in ("index.html", "pairs.html", "questions/00000.html", "questions/00001.html"):
        browser = page(path)
    assert browser.console() == []
    asked = browser.requests()[before:]
    assert len(asked) >= 8
    assert all(url.startswith(f"{(run / 'report').as_uri()}/") for url in asked)
