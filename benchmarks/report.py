"""The pages of a big run: how long they take to write, to open and to search, next to what they are bound to.

    python -m benchmarks.report [--questions 3000] [--nodes 30] [--rounds 5] [--trees 400,2000]
    python -m benchmarks.report --screenshots docs/images RUN

The run is generated: every node has a prompt of 2 to 4 kB and every search 3 to 5 passages. Each round loads the first
page anew and waits until its list holds every question, then searches, sorts and turns a page; then it loads the page
of another question and opens a node of its tree; then the list of all pairs, filters it and opens a pair. Single trees
of a search's shape (3 children at most, 8 steps) are opened and shown whole. Times are seconds of Debian's Chromium
without a screen, from the request to what is seen. The second form takes the pictures that the documentation shows, of
a run that is there.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.process import apart, memory_bytes
from benchmarks.table import Table, options
from reasonrag.report import write_report
from reasonrag.report.trees import read_trees
from tests.browser import Browser, chromium
from tests.report.hostile import Row, rows, write_run

BOUNDS = {"list filled": 2.0, "node opened": 1.0, "pairs listed": 2.0, "tree opened": 2.0}  # seconds
WORDS = (
    "the captain of a ship was born in town river launched year harbour market light house sea iron ore timber salt "
    "film director studio company founder mayor capital country language genre spouse employs signed plays"
)

# Does something in the page; the seconds until the frame that shows it has been drawn.
DRAWN = """
const [act, done] = [new Function(arguments[0]), arguments[arguments.length - 1]];
const started = performance.now();
act();
requestAnimationFrame(() => setTimeout(() => done((performance.now() - started) / 1000)));
"""
OVERVIEW = """
const [run, data] = ["results", "data"].map((id) => document.getElementById(id).getBoundingClientRect());
return Math.ceil(data.bottom - run.top);
"""
EVERYTHING = """
const shown = document.getElementById("shown");
shown.value = "all";
shown.dispatchEvent(new Event("change"));
"""
LOADED = """
const [page] = performance.getEntriesByType("navigation");
const [paint] = performance.getEntriesByName("first-contentful-paint");
return [paint?.startTime, page.domContentLoadedEventEnd].map((at) => (at ?? NaN) / 1000);
"""
SEARCH = "const s = document.getElementById('search'); s.value = '{}'; s.dispatchEvent(new Event('input'))"
ACTS = {
    "search": SEARCH.format("captain 99"),
    "search undone": SEARCH.format(""),
    "sort": "document.querySelector('#list th:nth-child(8) button').click()",
    "next page": "document.getElementById('next').click()",
}


def search_tree(nodes: int, draw: random.Random, **texts: str) -> list[Row]:
    """Rows of a tree with at most 3 children a node and 8 steps, equal siblings among them, and its SPRE."""
    made = rows(nodes, **texts)
    children: list[list[int]] = [[] for _ in made]
    for row in made[1:]:
        node = row["node_id"]
        room = [at for at in range(node) if len(children[at]) < 3 and made[at]["depth"] < 8]
        row["parent_id"] = parent = room[-1] if draw.random() < 0.6 else draw.choice(room)
        row["depth"] = made[parent]["depth"] + 1
        children[parent].append(node)
    for row in reversed(made):
        below = [made[child]["spre"] for child in children[row["node_id"]] if made[child]["spre"] is not None]
        row["visits"] = row["valued"] = 1 + sum(made[child]["visits"] for child in children[row["node_id"]])
        answers = bool(row["node_id"]) and not below and not children[row["node_id"]]
        f1 = draw.choice([0.0, 0.0, 0.4, 0.67, 1.0]) if answers and draw.random() < 0.9 else None
        row["f1"], row["em"] = f1, None if f1 is None else float(f1 == 1)
        row["spre"] = sum(below) / len(below) if below else None if f1 is None else f1 * 0.9 ** row["depth"]
        if row["node_id"]:
            action = "malformed" if row["spre"] is None else "query" if row["depth"] % 2 else "evidence"
            row["action"] = action if f1 is None else "answer"
            row["stage"] = "reasoning" if f1 is None else "terminal"
            row["stop_reason"] = None if f1 is None else "answered"
            row["content"] = " ".join(draw.choices(WORDS.split()[:3], k=1) + draw.choices(WORDS.split()[-2:], k=2) * 4)
    return made


def generate(folder: Path, questions: int, nodes: int, trees: Sequence[int] = ()) -> None:
    """A run of that size, or of single `trees` of so many nodes; the same texts each time."""
    draw, words = random.Random(0), WORDS.split()

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(low, high)))

    system = {"role": "system", "content": text(200, 200)}

    def filled(row: Row) -> Row:
        asked = [system, {"role": "user", "content": text(180, 480)}] if row["prompt"] else []
        found = [
            {"id": f"p{draw.randrange(10**6)}", "contents": f"{text(2, 4)}\n{text(80, 120)}", "score": draw.random()}
            for _ in range(draw.randint(3, 5) if row["passages"] else 0)
        ]
        return row | {"prompt": asked, "passages": found, "text": text(20, 60) if asked else ""}

    made = [rows(nodes, question_id=f"q{n}", dataset="generated", text=text(6, 12)) for n in range(questions)]
    made += [search_tree(size, draw, question_id=f"of {size}", text=text(6, 12)) for size in trees]
    write_run(folder, [[filled(row) for row in tree] for tree in made], text="generated")


def written(run: Path) -> tuple[float, float]:
    """Seconds to write the report, and the peak of this process in MiB."""
    started = time.perf_counter()
    write_report(run)
    return time.perf_counter() - started, memory_bytes("VmHWM") / (1 << 20)


def until(condition: Callable[[], bool], started: float, seen: Callable[[], str] = str) -> float:
    """Seconds from the start until it holds."""
    while not condition():
        if time.perf_counter() - started > 60:
            raise TimeoutError(f"the page never got there: {seen()}")
        time.sleep(0.005)
    return time.perf_counter() - started


def first_page(browser: Browser, page: Path, questions: int) -> dict[str, float]:
    """Open the list and use it."""
    started = time.perf_counter()
    browser.open(page)
    status = browser.find_element("id", "status")
    filled = until(lambda: status.text == f"{questions} of {questions} questions", started, lambda: status.text)
    painted, parsed = browser.execute_script(LOADED)
    seconds = {"first paint": painted, "document ready": parsed, "list filled": filled}
    return seconds | {name: browser.execute_async_script(DRAWN, act) for name, act in ACTS.items()}


def question_page(browser: Browser, page: Path) -> dict[str, float]:
    """Open a question and a node of its tree."""
    started = time.perf_counter()
    browser.open(page)
    browser.find_element("css selector", ".node").click()
    opened = until(lambda: browser.find_element("id", "panel-title").text == "Node 0", started)
    until(lambda: browser.execute_script(LOADED)[0] is not None, started)  # a node may be opened before it is painted
    painted, parsed = browser.execute_script(LOADED)
    return {"first paint": painted, "document ready": parsed, "node opened": opened}


def pair_page(browser: Browser, page: Path, pairs: int) -> dict[str, float]:
    """Open the list of all pairs and use it."""
    started = time.perf_counter()
    browser.open(page)
    status = browser.find_element("id", "status")
    seconds = {"pairs listed": until(lambda: status.text == f"{pairs} of {pairs} pairs", started)}
    choice = "const f = document.getElementById('filter'); f.value = 'few'; f.dispatchEvent(new Event('change'))"
    seconds["filter"] = browser.execute_async_script(DRAWN, choice)
    seconds["search"] = browser.execute_async_script(DRAWN, ACTS["search"])
    browser.execute_script(ACTS["search undone"] + ";" + choice.replace("few", ""))
    started = time.perf_counter()
    browser.find_element("css selector", "#list tbody button").click()
    seconds["both texts"] = until(lambda: len(browser.find_elements("css selector", ".opened article")) == 2, started)
    return seconds


def tree_page(browser: Browser, page: Path) -> dict[str, float]:
    """Open a large tree and show all of it."""
    started = time.perf_counter()
    browser.open(page)
    opened = until(lambda: bool(browser.find_elements("css selector", ".node.best")), started)
    whole = browser.execute_async_script(DRAWN, EVERYTHING)
    return {"tree opened": opened, "everything shown": whole}


def measure(table: Table, questions: int, nodes: int, rounds: int, trees: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        apart(generate, run, questions, nodes)
        seconds, peak = apart(written, run, start="spawn")
        report = run / "report"
        sizes = [path.stat().st_size for path in report.rglob("*.*")]
        table.row("write the report", seconds, "s")
        table.row("write the report, peak memory", peak, "MiB")
        table.row("the report on disk", sum(sizes) / (1 << 20), "MiB")
        table.row("its largest file", max(sizes) / 1000, "kB")
        pairs = json.loads((run / "run.json").read_text())["pairs"]["total"]
        large = Path(folder) / "large"
        apart(generate, large, 0, 0, trees)
        apart(written, large, start="spawn")
        pages = sorted((report / "questions").glob("*.html"))  # of a sample of the questions
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        with chromium() as browser:
            for number in range(rounds):
                page = pages[number * (len(pages) - 1) // max(rounds - 1, 1)]
                for name, times in (
                    ("first page", first_page(browser, report / "index.html", len(pages))),
                    ("question", question_page(browser, page)),
                    (f"{pairs:,} pairs", pair_page(browser, report / "pairs.html", pairs)),
                    *(
                        (f"tree of {size:,}", tree_page(browser, large / "report" / "questions" / f"{place:05d}.html"))
                        for place, size in enumerate(trees)
                    ),
                ):
                    for what, value in times.items():
                        found[name][what].append(value)
    for name, times in found.items():
        for what, values in times.items():
            limit = f"<= {BOUNDS[what]}" if what in BOUNDS else ""
            table.row(f"{name}: {what}, worst {max(values):.2f} s", median(values), "s", limit=limit)
    size = f"{questions:,} questions, {len(pages)} of which have a page, {questions * nodes:,} nodes"
    table.note(f"{size}, medians of {rounds} rounds")


def screenshots(run: Path, folder: Path) -> None:
    """What the first page says of a run, and its largest tree with a search on the best path."""
    report = write_report(run).parent
    sizes = {place: len(tree.nodes) for place, tree in enumerate(read_trees(run)) if len(tree.best_path) > 3}
    folder.mkdir(parents=True, exist_ok=True)
    with chromium(width=1400) as browser:
        browser.open(report / "index.html")
        browser.view(width=1400, height=browser.execute_script(OVERVIEW))
        browser.execute_script("document.getElementById('results').scrollIntoView()")
        browser.save_screenshot(str(folder / "overview.png"))
        browser.view(width=1400)
        browser.open(report / "questions" / f"{max(sizes, key=lambda place: sizes[place]):05d}.html")
        browser.find_elements("css selector", ".node.best")[1].click()  # the first step
        browser.save_screenshot(str(folder / "tree.png"))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=3000, help="which have 10 pairs each")
    parser.add_argument("--nodes", type=int, default=30, help="of each question's tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trees", default="400,2000", help="nodes of single trees")
    parser.add_argument("--screenshots", nargs=2, type=Path, metavar=("FOLDER", "RUN"))
    given = parser.parse_args()
    if given.screenshots:
        folder, run = given.screenshots
        screenshots(run, folder)
        return
    table = Table(__doc__)
    measure(table, given.questions, given.nodes, given.rounds, [int(size) for size in given.trees.split(",")])
    table.show(given.json)


if __name__ == "__main__":
    main()
