"""Write the pages of a run: its settings, its metrics, and every question with its tree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.settings import dump
from reasonrag.pipeline.pair_tables import repeated_questions
from reasonrag.report.site import ListRow, Page, TextPool, open_site, render, shortened
from reasonrag.report.stats import RunCounts, margin_histogram, whole_number_histogram
from reasonrag.report.trees import QuestionTree, read_trees, tree_of
from reasonrag.storage.parquet import Row
from reasonrag.storage.runs import read_run

_MOST_PAGES = 500  # of a run of more questions, pages are written of a sample
_BOX_WIDTH, _BOX_HEIGHT = 272, 62
_COLUMN_WIDTH, _ROW_HEIGHT = 304, 74  # from box to box, in SVG units
_MARGIN = 12
_QUOTE_COLUMNS = 60  # the style sheet cuts the quoted line at the box, wherever a font needs it
_PICTURE_QUOTE_COLUMNS = 40  # nothing cuts it in a picture
_STEP_TYPES = ("query", "evidence", "answer", "malformed")  # a malformed step is never chosen


@dataclass(frozen=True, slots=True)
class Position:
    """The cell of a node: `column` is its depth; two nodes of one column are at least 1 apart in `row`."""

    column: int
    row: float


@dataclass(frozen=True, slots=True)
class Box:
    """A node as drawn.

    Attributes:
        edge: SVG path from its parent's box; "" at the root.
        state: why it is faded: "malformed", "no answer" (no trajectory below it has a final answer, so it has no
            reward), or "" if it is not faded.
        label: what a screen reader says.
    """

    id: int
    parent: int | None
    level: int
    x: float
    y: float
    edge: str
    title: str
    metrics: str
    quote: str
    state: str
    best: bool
    label: str

    @property
    def classes(self) -> str:
        """Classes for the style sheet: "best", "dead", both, or none."""
        return " ".join([*(["best"] if self.best else []), *(["dead"] if self.state else [])])

    @property
    def mark(self) -> str:
        """The meaning of `classes` in words, so that it does not depend on colours and lines alone."""
        return ", ".join([*(["best path"] if self.best else []), *([self.state] if self.state else [])])


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes in depth-first order, their common size, and the size of the whole, in SVG units."""

    boxes: list[Box]
    width: float
    height: float
    box_width: int = _BOX_WIDTH
    box_height: int = _BOX_HEIGHT


def write_run_pages(run: Path, out: Path, *, questions: Collection[str] = ()) -> Path:
    """Write the pages of a finished run into `out`, see `write_report`."""
    config, summary = read_run(run)
    counts = RunCounts(repeated_questions(run))
    for question_id in questions:
        tree_of(run, question_id)  # raises if it is unknown, with the nearest ids
    finished = (summary.get("questions") or {}).get("finished") or 1
    step = math.ceil(finished / _MOST_PAGES)

    def pages() -> Iterator[Page]:
        for number, tree in enumerate(read_trees(run, summary)):
            counts.add(tree)
            if number % step == 0 or tree.root["question_id"] in questions:
                yield _page(tree)

    with open_site(out, folder="questions", scripts=("tree.js",)) as site:
        site.write_pages("question.html.j2", pages())
        metrics = counts.metrics(summary)
        by_type = metrics["pairs"]["by_type"]
        return site.write_index(
            "index.html.j2",
            config=config,
            settings=dump(config),
            step=step,
            summary=summary,
            metrics=metrics,
            types=_STEP_TYPES,
            pairs_by_chosen={kind: sum(by_type.get(kind, {}).values()) for kind in _STEP_TYPES[:-1]},
            histograms={
                "rounds": whole_number_histogram(counts.values["rounds"]),
                "tokens": whole_number_histogram(counts.values["chosen_tokens"]),
                "margins": margin_histogram(counts.values["margin"]),
            },
        )


def tree_picture(tree: QuestionTree) -> str:
    """Return the drawing of a tree as an SVG file, which needs no page around it."""
    return render("tree.svg.j2", drawing=_draw(tree, _PICTURE_QUOTE_COLUMNS))


def _page(tree: QuestionTree) -> Page:
    best_f1 = max((row["f1"] for row in tree.nodes if row["f1"] is not None), default=None)
    depth = max(row["depth"] for row in tree.nodes)
    columns = [tree.root[name] for name in ("dataset", "question_id", "question", "golden_answers")]
    cells = [*columns, len(tree.nodes), depth, len(tree.pairs), best_f1]
    return Page(tree.root, {"drawing": _draw(tree), "details": _details(tree)}, [ListRow(cells)])


def _draw(tree: QuestionTree, quote_columns: int = _QUOTE_COLUMNS) -> Drawing:
    """Place all nodes of a tree; steps run from left to right."""
    positions = layout(tree.children)
    best = set(tree.best_path)
    boxes = [_box(tree.nodes[node], positions, quote_columns, node in best) for node in depth_first(tree.children)]
    return Drawing(
        boxes,
        width=2 * _MARGIN + max(position.column for position in positions) * _COLUMN_WIDTH + _BOX_WIDTH,
        height=2 * _MARGIN + max(position.row for position in positions) * _ROW_HEIGHT + _BOX_HEIGHT,
    )


def layout(children: Sequence[Sequence[int]]) -> list[Position]:
    """Give the leaves, depth first, the rows 0, 1, 2, ... and centre each parent between its outer children.

    The subtrees of siblings fill row intervals that do not meet, and a parent stays within its subtree's interval, so
    nothing overlaps.

    Args:
        children: `[N]` the children of each node, all with higher numbers than their parent; node 0 is the root.

    >>> [(position.column, position.row) for position in layout([[1, 2], [3, 4], [], [], []])]
    [(0, 1.25), (1, 0.5), (1, 2.0), (2, 0.0), (2, 1.0)]
    """
    columns = [0] * len(children)
    for node, below in enumerate(children):
        for child in below:
            columns[child] = columns[node] + 1
    rows = [0.0] * len(children)
    leaves = [node for node in depth_first(children) if not children[node]]
    for row, leaf in enumerate(leaves):
        rows[leaf] = float(row)
    for node in reversed(range(len(children))):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return [Position(column, row) for column, row in zip(columns, rows, strict=True)]


def depth_first(children: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes in reading order, from the root. Without recursion: trees may be of any depth."""
    order: list[int] = []
    waiting = [0] if children else []
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting.extend(reversed(children[node]))
    return order


def _box(row: Row, positions: Sequence[Position], quote_columns: int, best: bool) -> Box:
    node = row["node_id"]
    parent = None if row["parent_id"] < 0 else row["parent_id"]
    x, y = _corner(positions[node])
    state = "malformed" if row["action"] == "malformed" else "no answer" if row["spre"] is None else ""
    title = f"{node} {row['action'] or 'question'}"
    stage_or_f1 = row["stage"] if row["f1"] is None else f"F1 {_value(row['f1'])}"
    metrics = f"{stage_or_f1} · N {row['visits']} · Q {_value(row['value'])} · SPRE {_value(row['spre'])}"
    quote = row["question"] if parent is None else row["content"]
    return Box(
        id=node,
        parent=parent,
        level=positions[node].column + 1,
        x=x,
        y=y,
        edge="" if parent is None else _edge(_corner(positions[parent]), (x, y)),
        title=title,
        metrics=metrics,
        quote=shortened(quote, quote_columns),
        state=state,
        best=best,
        label=f"Node {title}, {metrics}: {shortened(quote, 3 * _QUOTE_COLUMNS)}",
    )


def _corner(position: Position) -> tuple[float, float]:
    return _MARGIN + position.column * _COLUMN_WIDTH, _MARGIN + position.row * _ROW_HEIGHT


def _edge(parent: tuple[float, float], child: tuple[float, float]) -> str:
    """A curve from the middle of the parent's right side to the middle of the child's left side."""
    start, end = parent[0] + _BOX_WIDTH, child[0]
    middle = (start + end) / 2
    parent_y, child_y = parent[1] + _BOX_HEIGHT / 2, child[1] + _BOX_HEIGHT / 2
    return f"M{start:g} {parent_y:g}C{middle:g} {parent_y:g} {middle:g} {child_y:g} {end:g} {child_y:g}"


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _details(tree: QuestionTree) -> dict[str, Any]:
    """Return what the panel shows of each node, as JSON. Prompts and passages are indices into shared lists."""
    messages, passages = TextPool(), TextPool()
    pairs = _pairs_by_node(tree)
    nodes = []
    for row in tree.nodes:
        searched = [[passages.passage(passage), _value(passage["score"])] for passage in row["passages"]]
        node = {"id": row["node_id"], "facts": _facts(row), "prompt": messages.messages(row["prompt"])}
        node |= {"prefix": row["prefix"], "text": row["text"], "passages": searched, "pairs": pairs[row["node_id"]]}
        nodes.append(node)
    return {"nodes": nodes, "messages": messages.items, "passages": passages.items}


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = {
        "step": row["action"] or "the question",
        "next stage": row["stage"],
        "ended": row["stop_reason"],
        "origin": row["origin"],
        "visits N": row["visits"],
        "visits with a value": row["valued"],
        "value Q": _value(row["value"]),
        "SPRE": _value(row["spre"]),
        "F1 of the answer": None if row["f1"] is None else _value(row["f1"]),
        "exact match": None if row["em"] is None else _value(row["em"]),
        "prompt tokens": row["prompt_tokens"],
        "completion tokens": row["completion_tokens"],
        "finish reason": row["finish_reason"],
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _pairs_by_node(tree: QuestionTree) -> dict[int, list[Row]]:
    """Every pair twice: at its chosen and at its rejected node."""
    pairs_by_node: dict[int, list[Row]] = defaultdict(list)
    for pair in tree.pairs:
        for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
            entry = {"preferred": side == "chosen", "other": pair[f"{other}_node_id"]}
            pairs_by_node[pair[f"{side}_node_id"]].append(entry | {"reason": _why(pair, side, other)})
    return pairs_by_node


def _why(pair: Row, side: str, other: str) -> str:
    """Say why one node was preferred: the compared rewards, which may differ from the tree's SPRE (`pairs --alpha`)."""
    rewards = f"reward {_value(pair[f'{side}_reward'])} against {_value(pair[f'{other}_reward'])}"
    whole = "" if "chosen_type" in pair else f", as whole trajectories that share {pair['depth']} steps"
    return f"{rewards}, margin {_value(pair['margin'])} ({pair['split']}){whole}"
