"""One question's tree as a page needs it: boxes and lines with their places, and what each node's panel shows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from reasonrag.report.once import Once
from reasonrag.report.reading import TreeWithPairs
from reasonrag.report.tree_layout import Place, children_of, depth_first, layout
from reasonrag.report.visible import shortened
from reasonrag.storage.parquet import Row

_BOX_WIDTH, _BOX_HEIGHT = 272, 62
_COLUMN, _ROW = 304, 74  # from box to box, in SVG units
_MARGIN = 12
_TEXT_COLUMNS = 60  # of the line that quotes a node; the style sheet cuts it at the box, wherever a font needs it


@dataclass(frozen=True, slots=True)
class Box:
    """A node as drawn.

    `state` says why it is faded: "malformed", "no answer" (no trajectory below it has a final answer, so it has no
    reward) or "" (it is not). `edge` is the path from its parent's box, "" at the root.
    """

    id: int
    parent: int | None
    level: int
    x: float
    y: float
    edge: str
    title: str
    figures: str
    quote: str
    state: str
    best: bool
    label: str

    @property
    def classes(self) -> str:
        """For the style sheet: best, dead."""
        return " ".join([*(["best"] if self.best else []), *(["dead"] if self.state else [])])

    @property
    def mark(self) -> str:
        """The same in words."""
        return ", ".join([*(["best path"] if self.best else []), *([self.state] if self.state else [])])


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes in depth-first order, their common size, and the size of the whole, in SVG units."""

    boxes: list[Box]
    width: float
    height: float
    box_width: int = _BOX_WIDTH
    box_height: int = _BOX_HEIGHT


def draw(tree: TreeWithPairs) -> Drawing:
    """Places for all nodes; steps run from left to right."""
    parents = tree.parents
    places = layout(parents)
    best = set(tree.tree.best_path)
    order = depth_first(children_of(parents))
    boxes = [_box(tree.nodes[node], parents[node], places, best=node in best) for node in order]
    return Drawing(
        boxes,
        width=2 * _MARGIN + max(place.column for place in places) * _COLUMN + _BOX_WIDTH,
        height=2 * _MARGIN + max(place.row for place in places) * _ROW + _BOX_HEIGHT,
    )


def _box(row: Row, parent: int | None, places: list[Place], *, best: bool) -> Box:
    node = row["node_id"]
    x, y = _corner(places[node])
    state = "malformed" if row["action"] == "malformed" else "no answer" if row["spre"] is None else ""
    title = f"{node} {row['action'] or 'question'}"
    reached = row["stage"] if row["f1"] is None else f"F1 {_value(row['f1'])}"
    figures = f"{reached} · N {row['visits']} · Q {_value(row['value'])} · SPRE {_value(row['spre'])}"
    quote = row["content"] if parent is not None else row["question"]
    return Box(
        id=node,
        parent=parent,
        level=places[node].column + 1,
        x=x,
        y=y,
        edge="" if parent is None else _edge(_corner(places[parent]), (x, y)),
        title=title,
        figures=figures,
        quote=shortened(quote, _TEXT_COLUMNS),
        state=state,
        best=best,
        label=f"Node {title}, {figures}: {shortened(quote, 3 * _TEXT_COLUMNS)}",
    )


def _corner(place: Place) -> tuple[float, float]:
    return _MARGIN + place.column * _COLUMN, _MARGIN + place.row * _ROW


def _edge(parent: tuple[float, float], child: tuple[float, float]) -> str:
    start, end = parent[0] + _BOX_WIDTH, child[0]
    middle = (start + end) / 2
    above, below = parent[1] + _BOX_HEIGHT / 2, child[1] + _BOX_HEIGHT / 2
    return f"M{start:g} {above:g}C{middle:g} {above:g} {middle:g} {below:g} {end:g} {below:g}"


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def details(tree: TreeWithPairs) -> dict[str, Any]:
    """What the panel shows of each node, as JSON; `messages` and `passages` are kept once and named by their place."""
    messages, passages = Once(), Once()
    pairs = _pairs_by_node(tree)
    nodes = [
        {
            "id": row["node_id"],
            "facts": _facts(row),
            "prompt": [messages.place({"role": m["role"], "content": m["content"]}) for m in row["prompt"]],
            "prefix": row["prefix"],
            "text": row["text"],
            "passages": [
                [passages.place({"id": p["id"], "contents": p["contents"]}), _value(p["score"])]
                for p in row["passages"]
            ],
            "pairs": pairs[row["node_id"]],
        }
        for row in tree.nodes
    ]
    return {"nodes": nodes, "messages": messages.items, "passages": passages.items}


def _facts(row: Row) -> list[tuple[str, str]]:
    facts = {
        "step": row["action"] or "the question",
        "next stage": row["stage"],
        "ended": row["stop_reason"],
        "came from": row["origin"],
        "visits N": row["visits"],
        "visits with a value": row["valued"],
        "value Q": _value(row["value"]),
        "SPRE": _value(row["spre"]),
        "F1 of the answer": None if row["f1"] is None else _value(row["f1"]),
        "exact match": None if row["em"] is None else _value(row["em"]),
        "prompt tokens": row["prompt_tokens"],
        "written tokens": row["completion_tokens"],
        "finish reason": row["finish_reason"],
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _pairs_by_node(tree: TreeWithPairs) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for pair in tree.pairs:
        for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
            told = _why(pair, side, other)
            found[pair[f"{side}_node_id"]].append(
                {"preferred": side == "chosen", "other": pair[f"{other}_node_id"], "told": told}
            )
    return found


def _why(pair: Row, side: str, other: str) -> str:
    """Why one node was preferred: what was compared, which need not be the SPRE of the tree (`pairs --alpha`)."""
    rewards = f"reward {_value(pair[f'{side}_reward'])} against {_value(pair[f'{other}_reward'])}"
    whole = "" if "chosen_type" in pair else f", as whole trajectories that share {pair['depth']} steps"
    return f"{rewards}, margin {_value(pair['margin'])} ({pair['split']}){whole}"
