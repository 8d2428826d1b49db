"""Write the pages of a run: its figures, every question with its tree, and the list of its pairs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.bootstrap import Difference, intervals
from reasonrag.core.config import Config
from reasonrag.core.settings import dump, identity
from reasonrag.report.site import DataFiles, ListRow, Page, Site, TextPool, list_row, open_site, shortened
from reasonrag.report.stats import RunCounts, histogram
from reasonrag.report.trees import QuestionTree, read_trees, tree_of
from reasonrag.spre.decisions import content_of
from reasonrag.storage.folder import read_run

_MOST_PAGES = 500  # of a run of more questions, pages are written of a sample
_MOST_PAIRS = 100_000  # in the list of pairs, all of which a browser holds; beyond, it is of a sample of the questions
_PAIRS_PER_FILE = 10_000
_TEXTS_PER_FILE = 20  # questions; pairs.js knows it, too
_PAIR_TEXT_CHARS = 120
_STEP_TYPES = ("query", "evidence", "answer", "malformed")  # a malformed step is never chosen
_FACTS = (
    *("node_id", "parent_id", "depth", "origin", "stage", "action", "content", "text", "prefix", "stop_reason"),
    *("finish_reason", "visits", "valued", "value", "spre", "f1", "em", "prompt_tokens", "completion_tokens"),
)
_PAIR_FACTS = (
    *("chosen_node_id", "rejected_node_id", "depth", "margin", "chosen_reward", "rejected_reward"),
    *("chosen_rollouts", "rejected_rollouts", "confidence", "split"),
)
# The metrics by which two runs are compared: the name, and its path in `RunCounts.metrics`.
_COMPARED = {
    "questions finished": ("questions", "finished"),
    "nodes": ("nodes", "total"),
    "complete trajectories": ("answers", "total"),
    "mean F1 of their answers": ("answers", "mean_f1"),
    "preference pairs": ("pairs", "total"),
    "margin, median": ("pairs", "margin", "median"),
    "policy calls": ("calls", "policy", "calls"),
    "completion tokens": ("calls", "policy", "completion_tokens"),
    "cost": ("calls", "policy", "cost"),
    "seconds": ("seconds",),
}


def write_run_pages(run: Path, out: Path, *, questions: Collection[str] = (), other: Path | None = None) -> Path:
    """Write the pages of a finished run into `out`, next to the metrics of an `other` one, see `write_report`."""
    config, summary = read_run(run)
    counts = RunCounts(run)
    for question_id in questions:
        tree_of(run, question_id)  # raises if it is unknown, with the nearest ids
    compared = Compared(other) if other else None
    step = math.ceil(((summary.get("questions") or {}).get("finished") or 1) / _MOST_PAGES)
    pair_step = math.ceil(((summary.get("pairs") or {}).get("total") or 1) / _MOST_PAIRS)
    with open_site(out) as site:
        pairs = PairList(out)

        def pages() -> Iterator[Page]:
            written = 0
            for place, tree in enumerate(read_trees(run)):
                counts.add(tree)
                has_page = place % step == 0 or tree.root["question_id"] in questions
                if place % pair_step == 0:
                    pairs.add(tree, f"questions/{written:05d}.html" if has_page else "")
                there, marks = compared.add(tree) if compared else ([], [])
                if has_page:
                    written += 1
                    yield _page(tree, there, marks)

        site.write_pages("tree.html.j2", pages())
        pairs.write(site, counts.contradictions.contradictory, pair_step)
        metrics = counts.metrics(summary)
        by_type = metrics["pairs"]["by_type"]
        return site.write(
            "index.html",
            "run.html.j2",
            scripts=site.rows.close(),
            config=config,
            settings=dump(config),
            step=step,
            summary=summary,
            metrics=metrics,
            compared=compared and compared.table(config, metrics),
            types=_STEP_TYPES,
            pairs_by_chosen={kind: sum(by_type.get(kind, {}).values()) for kind in _STEP_TYPES[:-1]},
            histograms={
                "rounds": histogram(counts.values["rounds"]),
                "tokens": histogram(counts.values["chosen_tokens"]),
                "margins": histogram(counts.values["margin"]),
            },
        )


class Compared:
    """Another run, to which one is compared: as a whole, and by the questions that both have."""

    def __init__(self, run: Path) -> None:
        """Read the run; raises what `write_report` raises."""
        self.name = run.name
        self.config, summary = read_run(run)
        counts = RunCounts(run)
        self.f1: dict[tuple[str, str], float | None] = {}
        for tree in read_trees(run):
            counts.add(tree)
            self.f1[tree.question] = mean_f1(tree)
        self.metrics = counts.metrics(summary)
        self.both: list[tuple[float, float]] = []  # mean F1 of a question here and there

    def add(self, tree: QuestionTree) -> tuple[list[float | None], list[str]]:
        """Count a question of this run; return the other's mean F1, the difference, and the marks of its row."""
        here, there = mean_f1(tree), self.f1.get(tree.question)
        if here is None or there is None:
            return [there, None], []
        self.both.append((here, there))
        return [there, here - there], ["higher"] * (here > there) + ["lower"] * (here < there)

    def table(self, config: Config, metrics: Any) -> dict[str, Any]:
        """Return both runs' metrics and the settings in which they differ, for the first page."""
        rows = []
        for name, path in _COMPARED.items():
            values = []
            for value in (metrics, self.metrics):
                for key in path:
                    value = (value or {}).get(key)
                values.append(value)
            rows.append((name, *values))
        here, there = identity(config), identity(self.config)
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        f1 = intervals({"f1": Difference(*zip(*self.both, strict=True))}, seed=0)["f1"] if self.both else None
        settings = [(name, str(here.get(name)), str(there.get(name))) for name in names]
        return {"name": self.name, "rows": rows, "settings": settings, "f1": f1}


class PairList:
    """The page of a run's pairs: a list without their texts, which `pairs.js` loads when a pair is opened."""

    def __init__(self, out: Path) -> None:
        self._rows = DataFiles(out, "pairs", per_file=_PAIRS_PER_FILE)
        self._texts = DataFiles(out, "texts", per_file=_TEXTS_PER_FILE, function="registerTexts")
        self._numbers: dict[str, int] = {}  # of rows, by the pair's id
        self._kinds: dict[str, None] = {}

    def add(self, tree: QuestionTree, page: str) -> None:
        """Add the pairs of a question; `page` is "" if it has none."""
        root, texts = tree.root, {}
        for place, pair in enumerate(tree.pairs):
            chosen, rejected = tree.path(pair["chosen_node_id"]), tree.path(pair["rejected_node_id"])
            for node in (*chosen[1:], *rejected[1:]):
                row = tree.nodes[node]
                texts[node] = [row["parent_id"], row["action"], row["content"], row["text"]]
            contents = [shortened(tree.nodes[path[-1]]["content"], _PAIR_TEXT_CHARS) for path in (chosen, rejected)]
            kind = f"{pair['chosen_type']} > {pair['rejected_type']}" if "chosen_type" in pair else "trajectory"
            self._kinds[kind] = None
            cells = [root["question"], f"{root['dataset']} {root['question_id']}", kind, *contents]
            cells += [pair[name] for name in ("depth", "chosen_reward", "rejected_reward", "margin")]
            few = pair.get("chosen_rollouts") == 1 or pair.get("rejected_rollouts") == 1
            self._numbers[pair["pair_id"]] = self._rows.total
            anchor = f"#pair-{place}" if page else ""
            row_of_list = ListRow([*cells, pair.get("confidence")], [kind, pair["split"], *["few"] * few], anchor)
            opened = [self._texts.total, chosen[-1], rejected[-1], pair["depth"]]
            self._rows.add([*list_row(self._rows.total, row_of_list, page), opened])
        if texts:
            self._texts.add(texts)

    def write(self, site: Site, contradictory: Collection[str], step: int) -> None:
        """Write the page; its filters name the types of pairs, and pairs that contradict another one."""
        self._texts.close()
        site.write(
            "pairs.html",
            "pairs.html.j2",
            scripts=self._rows.close(),
            step=step,
            kinds=sorted(self._kinds.keys() - {"trajectory"}),
            contradictory=sorted(self._numbers[pair] for pair in contradictory if pair in self._numbers),
        )


def mean_f1(tree: QuestionTree) -> float | None:
    """Return the mean F1 of a tree's complete trajectories; None without any."""
    scores = [row["f1"] for row in tree.nodes if row["f1"] is not None]
    return fmean(scores) if scores else None


def _page(tree: QuestionTree, there: Sequence[float | None], marks: Sequence[str]) -> Page:
    failures = tokens = 0
    scores: list[float] = []
    searches_to_answer: list[int] = []
    is_right = False
    for row, searches in zip(tree.nodes, tree.searches(), strict=True):
        failures += row["action"] == "malformed" or row["stop_reason"] == "no_answer"
        tokens += (row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0)
        if row["f1"] is not None:
            scores.append(row["f1"])
            searches_to_answer.append(searches)
            is_right = is_right or bool(row["em"])
    root, nodes = tree.root, tree.nodes
    cells = [root["question"], f"{root['dataset']} {root['question_id']}", root["golden_answers"]]
    cells += [len(nodes), max(row["depth"] for row in nodes), len(tree.pairs), failures, tokens or None]
    cells += [fmean(searches_to_answer) if scores else None, mean_f1(tree), max(scores, default=None), *there]
    filters = {"no pairs": not tree.pairs, "failures": failures, "never right": not is_right}
    marks = [*marks, *(name for name, applies in filters.items() if applies)]
    return Page(root, {"nodes": len(nodes), "details": _details(tree)}, [ListRow(cells, marks)])


def _details(tree: QuestionTree) -> dict[str, Any]:
    """Return a tree and its pairs as JSON for the page. Prompts and passages are indices into shared lists."""
    messages, passages = TextPool(), TextPool()
    nodes = []
    for row, drawn in zip(tree.nodes, merged(tree), strict=True):
        node = {name: row[name] for name in _FACTS} | {"drawn": drawn, "prompt": messages.messages(row["prompt"])}
        nodes.append(node | {"passages": passages.passages(row["passages"])})
    pairs = [{name: pair.get(name) for name in _PAIR_FACTS} for pair in tree.pairs]
    whole = any("chosen_type" not in pair for pair in tree.pairs)
    shown = {"nodes": nodes, "best": tree.best_path, "pairs": pairs, "whole": whole}
    return shown | {"messages": messages.items, "passages": passages.items}


def merged(tree: QuestionTree) -> list[int]:
    """Return the node that each one is drawn with: the oldest of the siblings with the same content.

    Children of siblings that are drawn together are siblings, too.
    """
    first: dict[Any, int] = {}
    drawn: list[int] = []
    for row in tree.nodes:
        above = drawn[row["parent_id"]] if drawn else -1
        drawn.append(first.setdefault((above, *content_of(row)), row["node_id"]))
    return drawn
