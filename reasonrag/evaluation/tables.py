"""The tables of an evaluation, built once from `metrics.json`: Markdown, terminal and HTML pages only render them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reasonrag.core.bootstrap import FALSE_DISCOVERIES
from reasonrag.core.table import Bold, Table

Metrics = Mapping[str, Any]

NAMES = {
    "em": "EM",
    "f1": "F1",
    "acc": "ACC",
    "retrievals": "searches",
    "steps": "steps",
    "forced": "forced answers",
    "format_rate": "format rate",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "written tokens",
    "lasj": "LasJ",
    "osr": "OSR",
    "usr": "USR",
}
FEW = 10  # an interval over fewer questions than this says little
_WHOLE_NUMBERS = ("prompt_tokens", "completion_tokens")


def interval_text(interval: Metrics | None, *, digits: int = 3, scale: float = 1.0, signed: bool = False) -> str:
    """Return a mean with its bootstrap interval, or "unknown".

    Args:
        interval: `mean`, `low` and `high`; None, or a mean of None, if nothing was measured.
        digits: digits after the point.
        scale: factor of all three numbers, such as 100 for percentage points.
        signed: show the sign of positive numbers too, as differences have it.

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
    """Return whether a difference has a sign: at most 5 % of those that are called certain may be chance.

    It needs `FEW` questions or more. A file of an earlier version says nothing about chance: there the interval has to
    exclude 0.
    """
    if difference is None or difference["mean"] is None or difference["n"] < FEW:
        return False
    if "p_adjusted" in difference:
        return bool(difference["p_adjusted"] <= FALSE_DISCOVERIES)
    return bool(difference["low"] > 0 or difference["high"] < 0)


def bold_note(differences: Iterable[Metrics]) -> str:
    """Say which of these differences are bold, all that a page shows."""
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


def methods(metrics: Metrics) -> Iterator[tuple[str, str, str]]:
    """Yield every policy with each of its formats, and the name of the first setting in that format."""
    for policy, settings in metrics["settings"].items():
        own = metrics["content"]["policies"][policy].get("format", "")
        first: dict[str, str] = {}
        for setting in settings:
            first.setdefault(setting.get("format") or own, setting["name"])
        for format, name in first.items():
            yield policy, format, name


def measured(metrics: Metrics) -> list[str]:
    """Return the metrics that were computed, in the order of tables."""
    known = {metric for _, _, at_setting in points(metrics) for metric in at_setting}
    return [metric for metric in NAMES if metric in known]


def evaluation_tables(metrics: Metrics) -> dict[str, Table]:
    """Return all tables of an evaluation, given its `metrics.json`; one without rows has nothing to say."""
    shown = measured(metrics)
    return {
        "results": results_table(metrics, shown),
        "differences": differences_table(metrics, shown),
        "kinds": _kinds_table(metrics, shown),
        "searches": _searches_table(metrics),
        "judge": _judge_table(metrics),
        "policies": _policies_table(metrics),
        "out_of_form": _counts_table(
            metrics,
            "Attempts that are not well-formed, by the gravest reason",
            ("reason", "attempts"),
            lambda at_setting: at_setting["out_of_form"],
        ),
        "failures": _counts_table(metrics, "Questions set aside, by cause", ("cause", "questions"), _causes),
    }


def results_table(metrics: Metrics, shown: Sequence[str], policies: Collection[str] | None = None) -> Table:
    """Return the means of each policy at each setting, or of some policies; `shown` are metrics of `NAMES`."""
    rows = []
    for policy, setting, at_setting in points(metrics):
        if policies is None or policy in policies:
            rows.append([policy, setting, str(at_setting["questions"]["scored"]), *_means(at_setting, shown)])
    caption = "Means over the questions, with their 95 % bootstrap intervals"
    return Table(caption, ["policy", "setting", "n", *(NAMES[metric] for metric in shown)], rows, heads=2)


def differences_table(metrics: Metrics, shown: Sequence[str], policies: Collection[str] | None = None) -> Table:
    """Return the paired differences from the baseline; arguments are those of `results_table`."""
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
        differences = [_difference(metric, by_metric.get(metric)) for metric in shown]
        rows.append([*point, str(by_metric["em"]["n"]), *differences])
    headings = ["policy", "setting", "baseline", "n", *(NAMES[metric] for metric in shown)]
    return Table("Policy minus baseline, paired by question", headings, rows, heads=3)


def _kinds_table(metrics: Metrics, shown: Sequence[str]) -> Table:
    rows = []
    for policy, setting, at_setting in points(metrics):
        for kind, of_kind in at_setting["by_kind"].items():
            count = of_kind["em"]["n"] if of_kind["em"] else 0
            hops = "" if of_kind["hops"] is None else f"{of_kind['hops']:g}"
            rows.append([kind, policy, setting, str(count), hops, *_means(of_kind, shown)])
    rows.sort(key=lambda row: row[0])  # brings the policies of a kind together
    headings = ["kind", "policy", "setting", "n", "hops", *(NAMES[metric] for metric in shown)]
    return Table("By kind of question", headings, rows, heads=3)


def _searches_table(metrics: Metrics) -> Table:
    """Return how many searches right and wrong attempts made (Search-P1, Table 7 and Fig. 6b)."""
    rows = []
    for policy, setting, at_setting in points(metrics):
        for dataset, ends in at_setting.get("searches", {}).items():  # not in files of earlier versions
            for end, found in ends.items():
                if attempts := sum(found.values()):
                    mean = sum(int(searches) * count for searches, count in found.items()) / attempts
                    few = [found.get(searches, 0) for searches in "012"]
                    shares = [f"{count / attempts:.1%}" for count in (*few, attempts - sum(few))]
                    rows.append([dataset, policy, setting, end, str(attempts), f"{mean:.2f}", *shares])
    headings = ["data set", "policy", "setting", "attempts", "n", "searches", "none", "1", "2", "3 or more"]
    return Table("Searches of right and of wrong attempts, by ACC", headings, rows, heads=4)


def _judge_table(metrics: Metrics) -> Table:
    rows = []
    for policy, setting, at_setting in points(metrics):
        for metric in metrics["judge"]["metrics"] if metrics["judge"] else ():
            verdicts = at_setting["judged"][metric]
            failed = ", ".join(f"{cause} {count}" for cause, count in verdicts["failed"].items()) or "none"
            name = NAMES.get(metric, metric)
            rows.append([policy, setting, name, f"{verdicts['known']:,}", f"{verdicts['unknown']:,}", failed])
    headings = ["policy", "setting", "metric", "verdicts", "unknown", "failed, by cause"]
    return Table("Verdicts of the judge; a failed one is unknown, and is not a score", headings, rows, heads=3)


def _policies_table(metrics: Metrics) -> Table:
    """Return a column per policy: how it was asked, and which calls that took."""
    policies = metrics["content"]["policies"]
    calls = [metrics["calls"][policy] for policy in policies]
    rows = []
    for name in dict.fromkeys(name for asked in policies.values() for name in asked):
        values = [str(asked.get(name, "–")) for asked in policies.values()]
        rows.append([name.replace("_", " "), *values])
    for kind in dict.fromkeys(kind for of_policy in calls for kind in of_policy):
        values = [_calls_text(of_policy.get(kind, {})) for of_policy in calls]
        rows.append([f"calls: {kind}", *values])
    return Table("Policies", ["", *policies], rows, heads=1)


def _calls_text(calls: Metrics) -> str:
    """Return calls, tokens and cost of one kind of call, as far as they are known."""
    words = [f"{calls.get('calls', 0):,}"]
    if calls.get("prompt_tokens") is not None:
        words.append(f"tokens read {calls['prompt_tokens']:,}, written {calls['completion_tokens']:,}")
    if calls.get("cost") is not None:
        words.append(f"cost {calls['cost']:.2f}")
    return "; ".join(words)


def _counts_table(
    metrics: Metrics, caption: str, columns: tuple[str, str], counts_of: Callable[[Metrics], Mapping[str, int]]
) -> Table:
    """Return a row per policy, setting and cause, with what `counts_of` finds in the metrics of the setting."""
    rows = []
    for policy, setting, at_setting in points(metrics):
        for cause, count in counts_of(at_setting).items():
            rows.append([policy, setting, cause, f"{count:,}"])
    return Table(caption, ["policy", "setting", *columns], rows, heads=3)


def _causes(at_setting: Metrics) -> Mapping[str, int]:
    causes = dict(at_setting["failed"])
    if at_setting["questions"]["not_tried"]:
        causes["not tried: too many had failed"] = at_setting["questions"]["not_tried"]
    return causes


def _means(intervals: Metrics, shown: Sequence[str]) -> list[str]:
    return [interval_text(intervals.get(metric), digits=0 if metric in _WHOLE_NUMBERS else 3) for metric in shown]


def _difference(metric: str, interval: Metrics | None) -> str:
    text = interval_text(interval, digits=0 if metric in _WHOLE_NUMBERS else 3, signed=True)
    return Bold(text) if is_certain(interval) else text
