"""The pages of a big run: how long they take to write, to open and to search, next to what they are bound to.

    python -m benchmarks.report [--questions 1000] [--nodes 30] [--rounds 7]
    python -m benchmarks.report --screenshots docs/images RUN

The run is generated: every node has a prompt of 2 to 4 kB and every search 3 to 5 passages. Each round loads the first
page anew and waits until its list holds every question, then searches, sorts and turns a page; then it loads the page
of another question and opens a node of its tree. Times are seconds of Debian's Chromium without a screen, from the
request to what is seen. The second form takes the pictures that the documentation shows, of a run that is there.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.process import apart, memory_bytes
from benchmarks.table import Table, options
from reasonrag.report import write_report
from reasonrag.report.trees import trees
from tests.browser import Browser, chromium
from tests.report.hostile import Row, rows, write_run

BOUNDS = {"list filled": 2.0, "node opened": 1.0}  # seconds; the others have none
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
const [run, data] = ["run", "data"].map((id) => document.getElementById(id).getBoundingClientRect());
return Math.ceil(data.bottom - run.top);
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


def generate(folder: Path, questions: int, nodes: int) -> None:
    """A run of that size; the same texts each time."""
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

    made = [
        [filled(row) for row in rows(nodes, question_id=f"q{place}", dataset="generated", text=text(6, 12))]
        for place in range(questions)
    ]
    write_run(folder, made, text="generated")


def written(run: Path) -> tuple[float, float]:
    """Seconds to write the report, and the peak of this process in MiB."""
    started = time.perf_counter()
    write_report(run)
    return time.perf_counter() - started, memory_bytes("VmHWM") / (1 << 20)


def until(condition: Callable[[], bool], started: float) -> float:
    """Seconds from the start until it holds."""
    while not condition():
        if time.perf_counter() - started > 60:
            raise TimeoutError("the page never got there")
        time.sleep(0.005)
    return time.perf_counter() - started


def first_page(browser: Browser, page: Path, questions: int) -> dict[str, float]:
    """Open the list and use it."""
    started = time.perf_counter()
    browser.open(page)
    status = browser.find_element("id", "status")
    filled = until(lambda: status.text == f"{questions} of {questions} questions", started)
    painted, parsed = browser.execute_script(LOADED)
    seconds = {"first paint": painted, "document ready": parsed, "list filled": filled}
    return seconds | {name: browser.execute_async_script(DRAWN, act) for name, act in ACTS.items()}


def question_page(browser: Browser, page: Path) -> dict[str, float]:
    """Open a question and a node of its tree."""
    started = time.perf_counter()
    browser.open(page)
    browser.find_element("css selector", ".node").click()
    opened = until(lambda: browser.find_element("id", "panel-title").text == "Node 0", started)
    painted, parsed = browser.execute_script(LOADED)
    return {"first paint": painted, "document ready": parsed, "node opened": opened}


def measure(table: Table, questions: int, nodes: int, rounds: int) -> None:
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
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("first page", "question")}
        with chromium() as browser:
            for number in range(rounds):
                page = report / "questions" / f"{number * (questions - 1) // max(rounds - 1, 1):05d}.html"
                for name, times in (
                    ("first page", first_page(browser, report / "index.html", questions)),
                    ("question", question_page(browser, page)),
                ):
                    for what, value in times.items():
                        found[name][what].append(value)
    for name, times in found.items():
        for what, values in times.items():
            limit = f"<= {BOUNDS[what]}" if what in BOUNDS else ""
            table.row(f"{name}: {what}, worst {max(values):.2f} s", median(values), "s", limit=limit)
    table.note(f"{questions:,} questions, {questions * nodes:,} nodes, medians of {rounds} rounds")


def screenshots(run: Path, folder: Path) -> None:
    """What the first page says of a run, and its smallest tree with 20 nodes and a search on the best path."""
    report = write_report(run).parent
    searched = ((place, tree) for place, tree in enumerate(trees(run)) if len(tree.best_path) > 2)
    sizes = {place: len(tree.nodes) for place, tree in searched if len(tree.nodes) >= 20}
    folder.mkdir(parents=True, exist_ok=True)
    with chromium(width=1400) as browser:
        browser.open(report / "index.html")
        browser.view(width=1400, height=browser.execute_script(OVERVIEW))
        browser.execute_script("document.getElementById('run').scrollIntoView()")
        browser.save_screenshot(str(folder / "overview.png"))
        browser.view(width=1400)
        browser.open(report / "questions" / f"{min(sizes, key=lambda place: sizes[place]):05d}.html")
        browser.find_elements("css selector", ".node.best")[1].click()  # the first step
        browser.save_screenshot(str(folder / "tree.png"))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=30, help="of each question's tree")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--screenshots", nargs=2, type=Path, metavar=("FOLDER", "RUN"))
    given = parser.parse_args()
    if given.screenshots:
        folder, run = given.screenshots
        screenshots(run, folder)
        return
    table = Table(__doc__)
    measure(table, given.questions, given.nodes, given.rounds)
    table.show(given.json)


if __name__ == "__main__":
    main()
