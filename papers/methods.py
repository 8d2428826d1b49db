"""Set the methods of an evaluation beside what the papers print of them: `python -m papers.methods REPORT`.

REPORT is the folder of `reasonrag eval --policy rag=MODEL --format rag=python:papers.baselines:RAG ...`. Prints a
Markdown table of data sets and methods; and, if a model is evaluated in both Direct and RAG, which questions are
answered with a search and without one (When-to-search, sec. 4.1 and Fig. 4).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from papers.baselines import BASELINES
from reasonrag.core.bootstrap import group_intervals
from reasonrag.core.table import Table
from reasonrag.evaluation.tables import interval_text
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import trajectory_schema

METRICS = {"em": "EM", "f1": "F1", "acc": "ACC", "lasj": "LasJ", "retrievals": "searches"}
# Whether the answer is right without a search, and with one.
SPLIT = {"both": (True, True), "only with": (False, True), "only without": (True, False), "neither": (False, False)}
_NAMES = {f"python:{format.__module__}:{format.__name__}": name for name, format in BASELINES.items()}


def methods(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each policy with its method, and its first setting."""
    for policy, settings in metrics["settings"].items():
        format = metrics["content"]["policies"][policy]["format"]
        yield policy, _NAMES.get(format, format), settings[0]["name"]


def methods_table(metrics: Mapping[str, Any]) -> Table:
    """Return data sets times methods, and under each method what the papers print of it, as published."""
    shown = [name for name in METRICS if name in metrics]
    with Path(__file__).with_name("methods.csv").open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    rows = []
    for dataset in metrics["dataset"]:
        for policy, method, setting in methods(metrics):
            at_setting = metrics["policies"][policy][setting]
            means = at_setting["by_dataset"][dataset] if len(metrics["dataset"]) > 1 else at_setting
            n = str(means["em"]["n"] if means["em"] else 0)
            rows.append([dataset, method, policy, n, *(interval_text(means[name]) for name in shown)])
            printed: dict[str, dict[str, str]] = {}
            for line in published:
                if line["format"] == method and line.get(dataset):
                    names = ", ".join(filter(None, (line["method"], line["model"])))
                    value = float(line[dataset]) / float(line["scale"])
                    printed.setdefault(f"{line['paper']}, {line['table']}: {names}", {})[line["metric"]] = (
                        f"{value:.3f}"
                    )
            for source, values in printed.items():
                rows.append([dataset, method, source, "", *(values.get(name, "") for name in shown)])
    columns = ["data set", "method", "policy, or paper", "n", *(METRICS[name] for name in shown)]
    return Table("Data sets and methods, and what the papers print of them", columns, rows, heads=3)


def split_table(report: Path, metrics: Mapping[str, Any]) -> Table:
    """Return the shares of the questions that are right with and without a search, by kind of question."""
    by_model: dict[str, dict[str, tuple[str, str]]] = {}  # policy and setting of each method, by model
    for policy, method, setting in methods(metrics):
        model = metrics["content"]["policies"][policy]["policy"]
        by_model.setdefault(model, {})[method] = (policy, setting)
    rows = []
    for model, policies in by_model.items():
        if {"direct", "rag"} <= policies.keys():
            correct = "lasj" if "lasj" in metrics else "em"
            is_right: dict[tuple[str, str], dict[str, bool | None]] = {}
            groups: dict[str, list[int]] = {"all": []}
            for method in ("direct", "rag"):
                policy, setting = policies[method]
                for row in read_shards(report / policy / "trajectories", setting, trajectory_schema()):
                    question = (row["dataset"], row["question_id"])
                    if question not in is_right:
                        groups["all"].append(len(is_right))
                        groups.setdefault(row["kind"] or "other", []).append(len(is_right))
                    value = row[correct]
                    is_right.setdefault(question, {})[method] = None if value is None else value == 1
            pairs = [(of.get("direct"), of.get("rag")) for of in is_right.values()]
            shares = {
                part: [None if None in pair else pair == wanted for pair in pairs] for part, wanted in SPLIT.items()
            }
            for group, intervals in group_intervals(shares, groups, seed=metrics["seed"]).items():
                rows.append([group, model, *(interval_text(intervals[part]) for part in SPLIT)])
    return Table(
        "Right with and without a search: shares of the questions", ["questions", "model", *SPLIT], rows, heads=2
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    figures = require_json(folder / "metrics.json")
    for table in (methods_table(figures), split_table(folder, figures)):
        if table.rows:
            print(f"## {table.title}\n", *table.markdown(), sep="\n", end="\n\n")
