"""`metrics.json` of an evaluation to tables and pictures: metrics and differences with intervals, kinds, the judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reasonrag.evaluation.report import FEW, NAMES, WHOLE_NUMBERS
from reasonrag.report.charts import Chart, interval_chart

Figures = Mapping[str, Any]

_DRAWN = {"em": "Exact match", "f1": "Token F1", "lasj": "Answers right in meaning (LasJ)"}


class Certain(str):
    """The cell of a difference whose interval excludes 0."""

    certain = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first `heads` of each row name it."""

    caption: str
    headings: list[str]
    rows: list[list[str]]
    heads: int


def tables(figures: Figures) -> dict[str, Table]:
    """What the first page tells: results, differences, kinds of question, the judge, policies, failures."""
    metrics = _metrics(figures)
    names = [NAMES[metric] for metric in metrics]
    points, judged = ["policy", "setting"], ["metric", "known", "unknown", "failed, by cause"]
    policies = list(figures["content"]["policies"])
    return {
        name: Table(*of)
        for name, of in {
            "results": (
                "Means over the questions, with their 95 % bootstrap intervals",
                [*points, "n", *names],
                _results(figures, metrics),
                2,
            ),
            "differences": (
                "Policy less baseline, paired by question",
                [*points, "baseline", "n", *names],
                _differences(figures, metrics),
                3,
            ),
            "kinds": ("By kind of question", ["kind", *points, "n", *names], _kinds(figures, metrics), 3),
            "judge": ("Verdicts; one that failed is unknown, and no score", [*points, *judged], _judged(figures), 3),
            "policies": ("Policies", ["", *policies], _policies(figures), 1),
            "failures": ("Questions set aside, by cause", [*points, "cause", "questions"], _failures(figures), 3),
        }.items()
    }


def pictures(figures: Figures) -> list[Chart]:
    """The metrics in [0, 1] that say how good policies are, each at all settings."""
    drawn = []
    for metric, title in _DRAWN.items():
        found = [
            (label(figures, policy, setting), of[metric]["low"], of[metric]["mean"], of[metric]["high"])
            for policy, setting, of in _points(figures)
            if of.get(metric)
        ]
        if found:
            drawn.append(interval_chart(title, f"interval-{metric}", found))
    return drawn


def label(figures: Figures, policy: str, setting: str) -> str:
    """How a policy at a setting is called where there is little room."""
    return policy if len(figures["policies"][policy]) == 1 else f"{policy} {setting}"


def _points(figures: Figures) -> Iterator[tuple[str, str, Figures]]:
    for policy, settings in figures["policies"].items():
        for setting, of in settings.items():
            yield policy, setting, of


def _metrics(figures: Figures) -> list[str]:
    """Every metric that there are figures of."""
    told = {metric for _, _, of in _points(figures) for metric in of}
    return [metric for metric in NAMES if metric in told]


def _results(figures: Figures, metrics: Sequence[str]) -> list[list[str]]:
    return [
        [policy, setting, str(of["questions"]["scored"]), *(_interval(metric, of.get(metric)) for metric in metrics)]
        for policy, setting, of in _points(figures)
    ]


def _kinds(figures: Figures, metrics: Sequence[str]) -> list[list[str]]:
    rows = [
        [kind, policy, setting, str(of["questions"]), *(_interval(metric, of.get(metric)) for metric in metrics)]
        for policy, setting, whole in _points(figures)
        for kind, of in whole["by_kind"].items()
    ]
    return sorted(rows, key=lambda row: row[0])  # policies next to each other


def _interval(metric: str, found: Figures | None) -> str:
    """A mean and its interval, in words."""
    if not found or found["mean"] is None:
        return "unknown"
    mean, low, high = (_number(metric, found[name]) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _number(metric: str, value: float) -> str:
    text = f"{value:,.0f}" if metric in WHOLE_NUMBERS else f"{value:.3f}"
    return text if text.strip("-0.") else text.removeprefix("-")  # no "-0.000"


def _differences(figures: Figures, metrics: Sequence[str]) -> list[list[str]]:
    by_point: dict[tuple[str, str, str], dict[str, Figures]] = {}
    for row in figures["differences"]:
        baseline = row["baseline"]
        if row["baseline_setting"] != row["setting"]:
            baseline += f" at {row['baseline_setting']}"
        by_point.setdefault((row["policy"], row["setting"], baseline), {})[row["metric"]] = row
    return [
        [*point, str(found["em"]["n"]), *(_difference(metric, found.get(metric)) for metric in metrics)]
        for point, found in by_point.items()
    ]


def _difference(metric: str, found: Figures | None) -> str:
    text = _interval(metric, found)
    if not found or found["mean"] is None:
        return text
    text = f"+{text}" if found["mean"] > 0 else text
    return Certain(text) if found["n"] >= FEW and (found["low"] > 0 or found["high"] < 0) else text


def _judged(figures: Figures) -> list[list[str]]:
    rows = []
    for policy, setting, of in _points(figures):
        for metric in figures["judge"]["metrics"] if figures["judge"] else ():
            found = of["judged"][metric]
            failed = ", ".join(f"{cause} {count}" for cause, count in found["failed"].items()) or "none"
            rows.append(
                [policy, setting, NAMES.get(metric, metric), f"{found['known']}", f"{found['unknown']}", failed]
            )
    return rows


def _policies(figures: Figures) -> list[list[str]]:
    """A column a policy: how it was asked, and what that took."""
    policies = figures["content"]["policies"]
    used = [figures["calls"][policy] for policy in policies]
    names = dict.fromkeys(name for of in policies.values() for name in of)
    kinds = dict.fromkeys(kind for calls in used for kind in calls)
    return [
        *([name.replace("_", " "), *(str(of.get(name, "–")) for of in policies.values())] for name in names),
        *([f"calls: {kind}", *(_used(calls.get(kind, {})) for calls in used)] for kind in kinds),
    ]


def _used(calls: Figures) -> str:
    """Calls, tokens and cost of one kind of call, as far as they are known."""
    words = [f"{calls.get('calls', 0):,}"]
    if calls.get("prompt_tokens") is not None:
        words.append(f"tokens read {calls['prompt_tokens']:,}, written {calls['completion_tokens']:,}")
    if calls.get("cost") is not None:
        words.append(f"cost {calls['cost']:.2f}")
    return "; ".join(words)


def _failures(figures: Figures) -> list[list[str]]:
    rows = []
    for policy, setting, of in _points(figures):
        causes = dict(of["failed"])
        if of["questions"]["not_tried"]:
            causes["not tried: too many had failed"] = of["questions"]["not_tried"]
        rows += [[policy, setting, cause, f"{count:,}"] for cause, count in causes.items()]
    return rows
