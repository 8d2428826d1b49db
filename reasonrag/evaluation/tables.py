"""The tables of an evaluation, built from `metrics.json`; the report, the terminal and the HTML pages print them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from reasonrag.core.bootstrap import FALSE_DISCOVERIES
from reasonrag.core.table import Bold, Table
from reasonrag.evaluation.metrics import METRICS, Metric, Place

Metrics = Mapping[str, Any]

FEW = 10  # an interval over fewer questions than this is hardly informative


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
    """Return whether a difference has a sign: at most 5 % of the certain differences may be chance.

    It needs `FEW` questions or more. A file of an earlier version has no adjusted p-value: there the interval has to
    exclude 0.
    """
    if difference is None or difference["mean"] is None or difference["n"] < FEW:
        return False
    if "p_adjusted" in difference:
        return bool(difference["p_adjusted"] <= FALSE_DISCOVERIES)
    return bool(difference["low"] > 0 or difference["high"] < 0)


def bold_note(differences: Iterable[Metrics]) -> str:
    """Return a sentence on which of these differences, the only ones of a page, are bold."""
    tests = sum("p_adjusted" in difference for difference in differences)
    if not tests:  # written by an earlier version
        return f"**Bold**: the interval excludes 0, over {FEW} questions or more; not adjusted for many comparisons."
    share = f"{100 * FALSE_DISCOVERIES:g} %"
    return (
        f"**Bold**: certain, adjusted for {tests} comparisons so that at most {share} of the bold ones are expected to "
        f"be chance (Benjamini and Hochberg, 1995), and over {FEW} questions or more."
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
        baseline_setting = difference.get("baseline_setting", setting)
        if baseline_setting != setting:
            baseline += f" at {baseline_setting}"
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
    """Return all tables of an evaluation, given its `metrics.json`; skip a table without rows."""
    shown = measured(metrics)
    kinds: list[list[object]] = []
    searches: list[list[str]] = []
    verdicts: list[list[str]] = []
    out_of_form: list[list[str]] = []
    failures: list[list[str]] = []
    for policy, setting, at_setting in points(metrics):
        point = (policy, setting)
        for kind, of_kind in at_setting["by_kind"].items():
            count = of_kind["em"]["n"] if of_kind["em"] else 0
            hops = "" if of_kind["hops"] is None else f"{of_kind['hops']:g}"
            kinds.append([kind, *point, count, hops, *_means(of_kind, shown)])
        for dataset, ends in at_setting.get("searches", {}).items():  # not in files of earlier versions
            searches += _search_rows(dataset, point, ends)
        for name in metrics["judge"]["metrics"] if metrics["judge"] else ():
            counts = at_setting["judged"][name]
            failed = ", ".join(f"{cause} {count}" for cause, count in counts["failed"].items()) or "none"
            verdicts.append([*point, METRICS[name].label, f"{counts['known']:,}", f"{counts['unknown']:,}", failed])
        for reason, count in at_setting["out_of_form"].items():
            out_of_form.append([*point, reason, f"{count:,}"])
        causes = dict(at_setting["failed"])
        if at_setting["questions"]["not_tried"]:
            causes["not tried: too many had failed"] = at_setting["questions"]["not_tried"]
        for cause, count in causes.items():
            failures.append([*point, cause, f"{count:,}"])
    kinds.sort(key=lambda row: str(row[0]))  # brings the policies of a kind together
    at = ["policy", "setting"]
    return {
        "results": results_table(metrics),
        "differences": differences_table(metrics),
        "kinds": Table("By kind of question", ["kind", *at, "n", "hops", *_labels(shown)], kinds, heads=3),
        "searches": Table(
            "Searches of right and of wrong attempts, by ACC",  # Search-P1, Table 7 and Fig. 6b
            ["data set", *at, "attempts", "n", "searches", "none", "1", "2", "3 or more"],
            searches,
            heads=4,
        ),
        "judge": Table(
            "Verdicts of the judge; a failed one is unknown, and is not a score",
            [*at, "metric", "verdicts", "unknown", "failed, by cause"],
            verdicts,
            heads=3,
        ),
        "policies": _policies_table(metrics),
        "out_of_form": Table(
            "Attempts that are not well-formed, by the gravest reason",
            [*at, "reason", "attempts"],
            out_of_form,
            heads=3,
        ),
        "failures": Table("Questions set aside, by cause", [*at, "cause", "questions"], failures, heads=3),
    }


def _search_rows(dataset: str, point: tuple[str, str], ends: Metrics) -> Iterator[list[str]]:
    """Yield the number of searches in correct and incorrect attempts, given their counts by that number."""
    for end, by_searches in ends.items():
        attempts = sum(by_searches.values())
        if attempts:
            mean = sum(int(searches) * count for searches, count in by_searches.items()) / attempts
            few = [by_searches.get(searches, 0) for searches in "012"]
            shares = [f"{count / attempts:.1%}" for count in (*few, attempts - sum(few))]
            yield [dataset, *point, end, str(attempts), f"{mean:.2f}", *shares]


def _policies_table(metrics: Metrics) -> Table:
    """Return a column per policy: its prompt settings, and its calls by kind."""
    policies = metrics["content"]["policies"]
    rows = []
    for name in dict.fromkeys(name for settings in policies.values() for name in settings):
        cells = [str(settings.get(name, "–")) for settings in policies.values()]
        rows.append([name.replace("_", " "), *cells])
    for kind in dict.fromkeys(kind for policy in policies for kind in metrics["calls"][policy]):
        cells = [_calls_text(metrics["calls"][policy].get(kind, {})) for policy in policies]
        rows.append([f"calls: {kind}", *cells])
    return Table("Policies", ["", *policies], rows)


def _calls_text(calls: Metrics) -> str:
    """Return calls, tokens and cost of one kind of call, as far as they are known."""
    words = [f"{calls.get('calls', 0):,}"]
    if calls.get("prompt_tokens") is not None:
        words.append(f"tokens read {calls['prompt_tokens']:,}, written {calls['completion_tokens']:,}")
    if calls.get("cost") is not None:
        words.append(f"cost {calls['cost']:.2f}")
    return "; ".join(words)


def _means(intervals: Metrics, shown: Iterable[Metric]) -> list[str]:
    return [interval_text(intervals.get(metric.name), digits=metric.digits) for metric in shown]


def _labels(shown: Iterable[Metric]) -> list[str]:
    return [metric.label for metric in shown]
