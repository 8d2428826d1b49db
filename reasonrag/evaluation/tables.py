"""The tables of an evaluation, built from `metrics.json`, and its Markdown page and curves.

The report, the terminal and the HTML pages print these tables. Names of kinds and data sets come from
outside: they are shown on one line, without markup. No text of a model is shown.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.bootstrap import FALSE_DISCOVERIES
from reasonrag.core.plots import Line, Panel
from reasonrag.core.table import Bold, Table, inert_markdown
from reasonrag.evaluation.metrics import METRICS, Metric, Place
from reasonrag.storage.files import save_charts, write_text

Metrics = Mapping[str, Any]

FEW = 10  # an interval over fewer questions than this is hardly informative
_AXES = {
    "max_searches": "most retrievals",
    "max_steps": "step limit",
    "top_k": "passages per search",
    "temperature": "temperature",
}
_FIXED = {*_AXES, "choice"}


def interval_text(interval: Metrics | None, *, digits: int = 3, scale: float = 1.0, signed: bool = False) -> str:
    """Return a mean with its bootstrap interval, or "unknown" if nothing was measured.

    >>> interval_text({"mean": 0.5, "low": 0.25, "high": 0.75})
    '0.500 [0.250, 0.750]'
    >>> interval_text({"mean": 0.05, "low": -0.01, "high": 0.11}, digits=1, scale=100, signed=True)
    '+5.0 [-1.0, +11.0]'
    """
    if interval is None or interval["mean"] is None:
        return "unknown"
    sign = "+" if signed else ""
    # Adding 0.0 turns a negative zero into a positive one.
    mean, low, high = (f"{scale * interval[name] + 0.0:{sign},.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def is_certain(difference: Metrics | None) -> bool:
    """Return whether a difference has a sign: over `FEW` questions, and at most 5 % of the certain ones are chance."""
    if difference is None or difference["mean"] is None or difference["n"] < FEW:
        return False
    return bool(difference.get("p_adjusted", 1.0) <= FALSE_DISCOVERIES)


def bold_note(differences: Iterable[Metrics]) -> str:
    """Return a sentence on which of these differences, the only ones of a page, are bold."""
    tests = sum("p_adjusted" in difference for difference in differences)
    return (
        f"**Bold**: certain, adjusted for {tests} comparisons so that at most {100 * FALSE_DISCOVERIES:g} % of the "
        f"bold ones are expected to be chance (Benjamini and Hochberg, 1995), and over {FEW} questions or more."
    )


def points(metrics: Metrics) -> Iterator[tuple[str, str, Metrics]]:
    """Yield every policy with each of its settings and the metrics there."""
    for policy, settings in metrics["policies"].items():
        for setting, at_setting in settings.items():
            yield policy, setting, at_setting


def measured(metrics: Metrics, place: Place | None = None) -> list[Metric]:
    """Return the metrics that were computed and that a place shows (None: all), in the order of the registry."""
    known = {name for _, _, at_setting in points(metrics) for name in at_setting}
    return [metric for metric in METRICS.values() if metric.name in known and (not place or place in metric.shown_in)]


def results_table(
    metrics: Metrics, place: Place | None = None, policies: Collection[str] | None = None, *, title: str = ""
) -> Table:
    """Return the means of each policy at each setting, or of some policies, for a place."""
    shown = measured(metrics, place)
    rows = []
    for policy, setting, at_setting in points(metrics):
        if policies is None or policy in policies:
            rows.append([policy, setting, at_setting["questions"]["scored"], *_means(at_setting, shown)])
    title = title or "Means over the questions, with their 95 % bootstrap intervals"
    return Table(title, ["policy", "setting", "n", *_labels(shown)], rows, heads=2)


def differences_table(metrics: Metrics, place: Place | None = None, policies: Collection[str] | None = None) -> Table:
    """Return the paired differences from the baseline; arguments are those of `results_table`."""
    shown = measured(metrics, place)
    by_point: dict[tuple[str, str, str], dict[str, Metrics]] = {}
    for difference in metrics["differences"]:
        policy, setting, baseline = difference["policy"], difference["setting"], difference["baseline"]
        # A policy with a top-k of its own has other settings than the baseline.
        if difference["baseline_setting"] != setting:
            baseline += f" at {difference['baseline_setting']}"
        if policies is None or policy in policies:
            by_point.setdefault((policy, setting, baseline), {})[difference["metric"]] = difference
    rows = []
    for point, by_metric in by_point.items():
        cells = []
        for metric in shown:
            difference = by_metric.get(metric.name)
            text = interval_text(difference, digits=metric.digits, signed=True)
            cells.append(Bold(text) if is_certain(difference) else text)
        rows.append([*point, by_metric["em"]["n"], *cells])
    columns = ["policy", "setting", "baseline", "n", *_labels(shown)]
    return Table("Policy minus baseline, paired by question", columns, rows, heads=3)


def evaluation_tables(metrics: Metrics) -> dict[str, Table]:
    """Return all tables of an evaluation, given its `metrics.json`; those without rows are not to be shown."""
    shown = measured(metrics)
    rows: defaultdict[str, list[list[object]]] = defaultdict(list)
    for policy, setting, at_setting in points(metrics):
        point = (policy, setting)
        for kind, of_kind in at_setting["by_kind"].items():
            count = of_kind["em"]["n"] if of_kind["em"] else 0
            rows["kinds"].append([kind, *point, count, *_means(of_kind, shown)])
        for name in metrics["judge"]["metrics"] if metrics["judge"] else ():
            counts = at_setting["judged"][name]
            failed = ", ".join(f"{cause} {count}" for cause, count in counts["failed"].items()) or "none"
            verdicts = (f"{counts['known']:,}", f"{counts['unknown']:,}")
            rows["judge"].append([*point, METRICS[name].label, *verdicts, failed])
        for reason, count in at_setting["out_of_form"].items():
            rows["out_of_form"].append([*point, reason, f"{count:,}"])
        causes = dict(at_setting["failed"])
        if at_setting["questions"]["not_tried"]:
            causes["not tried: too many had failed"] = at_setting["questions"]["not_tried"]
        for cause, count in causes.items():
            rows["failures"].append([*point, cause, f"{count:,}"])
    heads = {
        "judge": (
            "Verdicts of the judge; a failed one is unknown, and is not a score",
            ["metric", "verdicts", "unknown", "failed, by cause"],
        ),
        "out_of_form": ("Attempts that are not well-formed, by the gravest reason", ["reason", "attempts"]),
        "failures": ("Questions set aside, by cause", ["cause", "questions"]),
    }
    kinds = sorted(rows["kinds"], key=lambda row: str(row[0]))  # brings the policies of a kind together
    tables = {"results": results_table(metrics), "differences": differences_table(metrics)}
    tables["kinds"] = Table("By kind of question", ["kind", "policy", "setting", "n", *_labels(shown)], kinds, heads=3)
    for name, (title, columns) in heads.items():
        tables[name] = Table(title, ["policy", "setting", *columns], rows[name], heads=3)
    return tables | {"policies": _policies_table(metrics)}


def _policies_table(metrics: Metrics) -> Table:
    """Return a column per policy: its prompt settings, and the number of its calls by kind."""
    policies = metrics["content"]["policies"]
    columns = []
    for name, settings in policies.items():
        calls = {f"calls: {kind}": f"{used['calls']:,}" for kind, used in metrics["calls"][name].items()}
        columns.append(settings | calls)
    facts = dict.fromkeys(itertools.chain.from_iterable(columns))
    rows = [[fact.replace("_", " "), *(str(column.get(fact, "–")) for column in columns)] for fact in facts]
    return Table("Policies", ["", *policies], rows)


def _means(intervals: Metrics, shown: Iterable[Metric]) -> list[str]:
    return [interval_text(intervals.get(metric.name), digits=metric.digits) for metric in shown]


def _labels(shown: Iterable[Metric]) -> list[str]:
    return [metric.label for metric in shown]


def summary_table(metrics: Metrics) -> Table:
    """Return the main metrics of every policy and setting, for the terminal."""
    datasets = ", ".join(metrics["dataset"]) or "?"
    title = f"{metrics['questions']['total']} questions of {datasets}, 95 % bootstrap intervals"
    return results_table(metrics, "terminal", title=title)


def write_report(metrics: Metrics, out: Path) -> list[Path]:
    """Write `report.md` and `plots/`, and remove plots of an earlier evaluation; return the files written."""
    for earlier in (out / "plots").glob("*.*"):
        earlier.unlink()
    panels = sweep_panels(metrics)
    plots = save_charts(out / "plots" / "sweeps", panels) if panels else []
    write_text(out / "report.md", "\n".join(_page(metrics, plots)) + "\n")
    return [out / "report.md", *plots]


def _page(metrics: Metrics, plots: Sequence[Path]) -> Iterator[str]:
    judge = metrics["judge"] or {"model": "", "prompts": ""}
    judged_by = f"by {inert_markdown(judge['model'])} (prompts {judge['prompts']})" if judge["model"] else "by no model"
    notes = {
        "policies": "A setting is named by temperature (t), step limit (s) and passages per search (k). Calls "
        "count everything in the policy's folder, also other settings of a sweep.",
        "results": "A missing answer scores 0; a question that failed because of a backend is not scored.",
        "judge": f"Judged {judged_by}. OSR and USR "
        "are over all known steps of all attempts, right or wrong (HiPRAG, eq. 2). A verdict is unknown if the judge "
        "failed, or if the step says nothing that can be judged.",
        "differences": " ".join(
            [bold_note(metrics["differences"]), *(f"{inert_markdown(text)}." for text in metrics["asked_differently"])]
        ),
        "out_of_form": " ".join(f"{inert_markdown(text)}." for text in metrics.get("lost_to_form", ())),
        "failures": "These questions are not scored; the same command tries them again.",
    }
    datasets = inert_markdown(", ".join(metrics["dataset"]) or "unnamed")
    split = f", {inert_markdown(metrics['split'])}" if metrics["split"] else ""
    yield from ["# Evaluation", "", f"- data set: {datasets}{split}"]
    yield f"- questions: {metrics['questions']['total']} (checksum {metrics['content']['questions']})"
    yield f"- corpus: checksum {inert_markdown(metrics['content']['corpus'])}"
    yield f"- seed: {metrics['seed']}; rules of the metrics: {metrics['rules']}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in metrics['versions'].items())}"
    for metric in measured(metrics):
        yield f"- {metric.label}: {metric.help}"
    tables = evaluation_tables(metrics)
    for name in ("policies", "results", "judge", "out_of_form", "differences", "kinds", "failures"):
        # A section without rows is left out.
        if tables[name].rows:
            yield from ["", f"## {tables[name].title}", ""]
            if notes.get(name):
                yield from [notes[name], ""]
            yield from tables[name].markdown()
    if plots:
        yield from ["", "## Sweeps", "", "![sweeps](plots/sweeps.svg)"]


def sweep_panels(metrics: Metrics) -> list[Panel]:
    """Return EM over each setting that was swept, the others at their first value (arXiv:2505.14069, Fig. 6 and 7)."""
    panels = []
    for axis, name in _AXES.items():
        # A curve needs two points that differ in this setting alone.
        lines = []
        for policy, settings in metrics["settings"].items():
            first, points = settings[0], {}
            on_axis = [setting for setting in settings if all(setting[key] == first[key] for key in _FIXED - {axis})]
            for setting in sorted(on_axis, key=lambda setting: float(setting[axis] or 0)):
                if em := metrics["policies"][policy][setting["name"]]["em"]:
                    points[setting[axis]] = em
            if len(points) > 1:
                bounds = ([em[bound] for em in points.values()] for bound in ("mean", "low", "high"))
                lines.append(Line(policy, list(points), *bounds))
        if lines:
            panels.append(Panel(f"EM over {name}", name, "EM", tuple(lines)))
    return panels
