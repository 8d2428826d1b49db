"""Trees and metrics for a terminal. Foreign text is shown on one line, without control characters."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.text import Text
from rich.tree import Tree as Drawing

from reasonrag.core.table import Table
from reasonrag.core.text import one_line, printable, quoted
from reasonrag.report.trees import QuestionTree
from reasonrag.storage.parquet import Row

_LEGEND = "* path to the best answer  ! malformed  x ended without an answer  ~ cut off"
_STYLES = {"*": "bold green", "!": "red", "x": "yellow", "~": "yellow"}
_DEEPEST = 20  # steps that fit beside each other; deeper ones are counted
_MOST_CHARS = 300  # of a question, an answer or a step
_SPREAD = ("count", "mean", "min", "p25", "median", "p75", "p95", "max")
_USED = ("calls", "prompt_tokens", "completion_tokens", "cost")


def drawing(tree: QuestionTree, *, depth: int | None = None, best: bool = False) -> Group:
    """Render a tree with rich, two lines per node: its action with its scores, then its text; below it, its pairs.

    Lines are cut at the console's width. Colours only repeat the marks.

    Args:
        tree: of one question.
        depth: steps from the question that are shown, at most 20; None for so many.
        best: show the children of the best path's nodes alone:
            that path and its siblings; all without such a path.
    """
    root = tree.root
    golden = " | ".join(root["golden_answers"])
    question = f"{root['question'][:_MOST_CHARS]}  [{root['dataset']} {root['question_id']}]"
    heading = Text(_inert(question), style="bold")
    heading.append(f"\ngold: {_inert(golden)[:_MOST_CHARS]}\n{_scores(root)}", style="not bold")
    path, depth = set(tree.best_path), min(depth or _DEEPEST, _DEEPEST)
    drawn = {0: Drawing(heading)}
    hidden: Counter[int] = Counter()  # the number of nodes below each drawn node
    # The drawn node that a hidden one is counted at.
    above: dict[int, Any] = {}  # of hidden nodes
    for row in tree.nodes[1:]:  # a parent comes before its children
        node, parent = row["node_id"], row["parent_id"]
        if parent in drawn and row["depth"] <= depth and (parent in path or not (best and path)):
            drawn[node] = drawn[parent].add(_node(row, node in path))
        else:
            above[node] = above.get(parent, parent)
            hidden[above[node]] += 1
    for node, count in hidden.items():
        drawn[node].add(Text(f"+{count} nodes", style="dim"))
    return Group(drawn[0], Text(_LEGEND, style="dim"), *_preferences(tree, drawn))


def picture(tree: QuestionTree, *, depth: int | None = None, best: bool = True) -> str:
    """Return a drawing of a tree as an SVG file, which loads nothing; arguments are those of `drawing`."""
    # A fixed width: the same tree gives the same picture on every terminal.
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(drawing(tree, depth=depth, best=best))
    style = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # it names a server
    return console.export_svg(title=f"Search tree{': the best path and its siblings' * best}", code_format=style)


def tables(summary: Mapping[str, Any]) -> Group:
    """Render `run.json` as tables: counts, distributions, calls."""
    distributions = []
    trees, pairs = summary.get("trees", {}), summary.get("pairs", {})
    for name, values in {**trees.get("distributions", {}), **pairs.get("distributions", {})}.items():
        distributions.append((name, *(f"{values[column]:.4g}" if values else "-" for column in _SPREAD)))
    calls = []
    for kind, used in summary.get("calls", {}).items():
        calls.append((kind, *("-" if used.get(column) is None else used[column] for column in _USED)))
    columns = ("calls of", *(column.replace("_", " ") for column in _USED))
    shown = [Table("", ("", "number", "share"), _counts(summary)), Table("", ("", *_SPREAD), distributions)]
    return Group(*(table.terminal() for table in (*shown, Table("", columns, calls))))


def _counts(summary: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Return name, count, and share of the total of its kind."""
    questions, trees, pairs = (summary.get(name, {}) for name in ("questions", "trees", "pairs"))
    rows: list[tuple[str, int, str]] = []

    def add(kind: str, total: int, **groups: Mapping[Any, int]) -> None:
        rows.append((kind, total, ""))
        for group, counts in groups.items():
            for name, count in counts.items():
                rows.append((f"- {group.replace('_', ' ')}: {name}", count, f"{count / total:.1%}" if total else ""))

    of, with_pairs = trees.get("by_dataset", {}), pairs.get("by_dataset", {})
    add("questions", questions.get("total", 0), of=of, with_pairs=with_pairs, failed=questions.get("failed", {}))
    unread = {}
    for reason, count in trees.get("malformed", {}).items():
        unread[f"{reason}, as {quoted(trees.get('unreadable', {}).get(reason, ''))}"] = count
    add("nodes", trees.get("nodes", 0), action=trees.get("by_action", {}), malformed=unread)
    add("answers", trees.get("complete_trajectories", 0))
    add("pairs", pairs.get("total", 0), type=pairs.get("by_type", {}), steps_before=pairs.get("by_depth", {}))
    left_out = pairs.get("left_out", {})
    add("pairs left out", sum(left_out.values()), cause=left_out)
    return rows


def _preferences(tree: QuestionTree, drawn: Collection[int]) -> Iterator[Text]:
    """Yield a line for each pair of nodes that are drawn, the clearest first."""
    for pair in sorted(tree.pairs, key=lambda pair: -pair["margin"]):
        chosen, rejected = pair["chosen_node_id"], pair["rejected_node_id"]
        if chosen in drawn and rejected in drawn:
            rewards = f"{_number(pair['chosen_reward'])} over {_number(pair['rejected_reward'])}"
            yield Text(f"preferred: node {chosen} over node {rejected}, {rewards}")


def _node(row: Row, best: bool) -> Text:
    mark = "*" if best else ""
    if row["action"] == "malformed":
        mark += "!"
    elif row["finish_reason"] == "length":
        mark += "~"
    mark += "x" if row["stop_reason"] == "no_answer" else ""
    # `Text`, not a string: rich would read `[red]` in a string as markup.
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{mark} " if mark else "", style=_STYLES.get(mark[:1], ""))
    text.append(_inert(row["action"]), style=_STYLES.get(mark[:1], "bold"))
    text.append(f"  {_scores(row)}", style="cyan")
    recorded = "  recorded" if row["origin"] == "recorded" else ""
    text.append(f" → {_inert(row['stage'])}  node {row['node_id']}{recorded}", style="dim")
    text.append("\n" if row["f1"] is None else f"\nF1={_number(row['f1'])}  ")
    if grade := row.get("grade"):
        text.append(_inert(f"outcome={_number(grade['value'])} ({grade['reason'][:80]})") + "  ")
    said = f"{row['content']}: {row['text']}" if row["action"] == "malformed" else row["content"]
    text.append(_inert(said)[:_MOST_CHARS])
    return text


def _scores(row: Row) -> str:
    return f"N={row['visits']} Q={_number(row['value'])} SPRE={_number(row['spre'])}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _inert(text: str) -> str:
    return printable(one_line(text))
