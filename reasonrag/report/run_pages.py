"""Write the pages of a run: its metrics, and every question with its tree and its pairs."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.settings import dump
from reasonrag.report.site import ListRow, Page, TextPool, open_site
from reasonrag.report.trees import QuestionTree, read_trees
from reasonrag.spre.decisions import content_of
from reasonrag.storage.files import reading
from reasonrag.storage.folder import read_run

_MOST_PAGES = 500  # of a run of more questions, pages are written of a sample
_FACTS = (
    *("node_id", "parent_id", "depth", "origin", "stage", "action", "content", "text", "prefix", "stop_reason"),
    *("finish_reason", "visits", "valued", "value", "spre", "f1", "em", "prompt_tokens", "completion_tokens"),
)
_PAIR_FACTS = (
    *("chosen_node_id", "rejected_node_id", "depth", "margin", "chosen_reward", "rejected_reward"),
    *("chosen_rollouts", "rejected_rollouts", "confidence", "split"),
)


def write_run_pages(run: Path, out: Path) -> Path:
    """Write the pages of a finished run into `out`, see `write_report`."""
    config, summary = read_run(run)
    # Evenly spaced: the first 500 questions of a data set may be of one kind.
    step = math.ceil(((summary.get("questions") or {}).get("finished") or 1) / _MOST_PAGES)

    with reading(run), open_site(out) as site:
        site.write_pages("tree.html.j2", map(_page, islice(read_trees(run), 0, None, step)))
        return site.write_index("run.html.j2", summary=summary, step=step, settings=dump(config))


def _page(tree: QuestionTree) -> Page:
    failures = tokens = 0
    scores: list[float] = []
    searches_to_answer: list[int] = []
    for row, searches in zip(tree.nodes, tree.searches(), strict=True):
        # A step that could not be read, or a path that ended without an answer.
        failures += row["action"] == "malformed" or row["stop_reason"] == "no_answer"
        tokens += (row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0)
        if row["f1"] is not None:
            scores.append(row["f1"])
            searches_to_answer.append(searches)
    root, nodes = tree.root, tree.nodes
    cells = [root["question"], f"{root['dataset']} {root['question_id']}", root["golden_answers"]]
    cells += [len(nodes), max(row["depth"] for row in nodes), len(tree.pairs), failures, tokens or None]
    cells += [fmean(searches_to_answer), fmean(scores), max(scores)] if scores else [None, None, None]
    # Of every node, not of the best one: was a correct answer found at all?
    never_right = not any(row["em"] for row in nodes)
    filters = {"no pairs": not tree.pairs, "failures": failures, "never right": never_right}
    return Page(root, _details(tree), [ListRow(cells, [name for name, applies in filters.items() if applies])])


def _details(tree: QuestionTree) -> dict[str, Any]:
    """Return a tree and its pairs as JSON for the page. Prompts and passages are indices into shared lists."""
    messages, passages = TextPool(), TextPool()
    nodes = []
    for row, drawn in zip(tree.nodes, merged(tree), strict=True):
        node = {name: row[name] for name in _FACTS} | {"drawn": drawn, "prompt": messages.messages(row["prompt"])}
        nodes.append(node | {"passages": passages.passages(row["passages"]), "grade": row.get("grade")})
    return {
        "nodes": nodes,
        "best": tree.best_path,
        "pairs": [{name: pair.get(name) for name in _PAIR_FACTS} for pair in tree.pairs],
        "whole": any("chosen_type" not in pair for pair in tree.pairs),  # pairs of trajectories have no types
        "messages": messages.items,
        "passages": passages.items,
    }


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
