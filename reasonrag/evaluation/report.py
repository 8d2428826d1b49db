"""`metrics.json` to pages: Markdown, pictures, and a table for the terminal. Needs nothing but those figures.

Names of kinds and data sets come from outside: they are shown on one line, without markup. No text of a model is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.plots import Bar, Line, Panel, save_bars, save_panels
from reasonrag.core.text import Rules, one_line, printable
from reasonrag.core.types import Question
from reasonrag.evaluation.metrics import METRICS
from reasonrag.evaluation.summary import failures, summarize
from reasonrag.storage.runs import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from reasonrag.evaluation.run import PolicyResult

Figures = Mapping[str, Any]

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
_BY_KIND = ("em", "retrievals", "steps")
_IN_FULL = {"em": "Exact match", "lasj": "Answers right in meaning", "osr": "Over-search", "usr": "Under-search"}
WHOLE_NUMBERS = ("prompt_tokens", "completion_tokens")
FEW = 10  # resamples of fewer questions than this say little
_MARKUP = re.compile(r"([!-+./:-@\[-`{-~])")  # ASCII punctuation but `,` and `-`: nothing becomes a mark or a link


def write_results(
    results: Sequence[PolicyResult], questions: Sequence[Question], out: Path, *, rules: Rules
) -> dict[str, Any]:
    """Write `metrics.json` of the evaluation and of each policy, `report.md` and plots.

    Returns:
        The contents of the evaluation's `metrics.json`.
    """
    metrics = summarize(results, questions, rules=rules)
    for result in results:
        of_policy = {
            "policy": result.name,
            "content": result.content,
            "seed": result.config.seed,
            "rules": rules,
            "judge": result.judge,
            "settings": metrics["policies"][result.name],
            "failures": failures(result, questions),
            "calls": result.calls,
            "versions": metrics["versions"],
        }
        _write_json(out / result.name / "metrics.json", of_policy)
    write_report(metrics, out)
    _write_json(out / "metrics.json", metrics)  # last: if it is there, everything else is there too
    return metrics


def _write_json(path: Path, metrics: Figures) -> None:
    write_text(path, json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_report(figures: Figures, out: Path) -> list[Path]:
    """Write `report.md` and `plots/`; returns what was written. `figures` is what `metrics.json` holds.

    Plots of an earlier evaluation in the same folder are removed.
    """
    for old in (out / "plots").glob("*.*"):
        old.unlink()
    plots = _plots(figures, out / "plots")
    write_text(out / "report.md", "\n".join(_page(figures, plots)) + "\n")
    return [out / "report.md", *plots]


def summary_table(figures: Figures) -> Table:
    """Policies and settings with the metrics that a person wants to see at the end, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = ("em", "f1", "acc", *_judged(figures), "retrievals", "steps", "format_rate")
    questions = figures["questions"]["total"]
    title = f"{questions} questions of {', '.join(figures['dataset']) or '?'}, 95 % bootstrap intervals"
    table = Table(title=Text(printable(one_line(title))), title_justify="left")
    for heading in ("policy", "setting", "n", *(NAMES[metric] for metric in shown)):
        table.add_column(heading)
    for policy, setting, of in _rows(figures):
        cells = [policy, setting, str(of["questions"]["scored"]), *(_interval(m, of[m]) for m in shown)]
        table.add_row(*(Text(printable(one_line(cell))) for cell in cells))
    return table


def _page(figures: Figures, plots: Sequence[Path]) -> Iterator[str]:
    yield "# Evaluation"
    yield ""
    yield from _what_was_run(figures)
    yield from ["", "## Results", "", "Mean over the questions, with its 95 % bootstrap interval."]
    yield "ACC: a golden answer is contained in the prediction. Searches: RC. Format rate: share of attempts that the"
    yield "format's own checker accepts. A missing answer scores 0; a question that a backend let down is not scored."
    yield ""
    yield from _results(figures)
    if figures["judge"]:
        yield from ["", "## Judge", "", *_judge(figures)]
    if any(of["out_of_form"] for _, _, of in _rows(figures)):
        yield from ["", "## Out of form", "", *_out_of_form(figures)]
    if figures["differences"]:
        yield from ["", "## Differences", ""]
        yield "Policy minus baseline, paired by question, over questions that both finished. **Bold**: the interval"
        yield f"excludes 0, and there are {FEW} questions or more. Intervals are not adjusted for the number of"
        yield "comparisons."
        yield from (f"\n{_plain(told)}." for told in figures["asked_differently"])
        yield ""
        yield from _differences(figures)
    if figures["by_kind"]:
        yield from ["", "## By kind of question", ""]
        yield "Hops: searches that the question needs, as the data set says."
        yield ""
        yield from _by_kind(figures)
    yield from ["", "## Failures", "", *_failures(figures)]
    if plots:
        yield from ["", "## Plots", ""]
        yield from (f"![{plot.stem}](plots/{plot.name})" for plot in plots if plot.suffix == ".svg")


def _what_was_run(figures: Figures) -> Iterator[str]:
    split = figures["split"]
    yield f"- data set: {_cell(', '.join(figures['dataset']) or 'unnamed')}" + (f", {_cell(split)}" if split else "")
    yield f"- questions: {figures['questions']['total']} (checksum {figures['content']['questions']})"
    yield f"- corpus: checksum {_cell(figures['content']['corpus'])}"
    yield f"- seed: {figures['seed']}; rules of the metrics: {figures['rules']}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in figures['versions'].items())}"
    yield ""
    rows = []
    for name, of in figures["content"]["policies"].items():
        asked = [_cell(of[key]) for key in ("policy", "format", "prompts")]
        asked += [of["top_p"], of["max_tokens"], of["passage_order"]]
        rows.append([name, *asked, *_calls(figures["calls"][name], "policy")])
    headings = ["policy", "model", "format", "prompts", "top-p", "max. tokens", "passages", "calls", "tokens", "cost"]
    yield from _table(headings, rows)
    yield ""
    yield "A setting is named by temperature (t), step limit (s) and passages per search (k). Calls and tokens (read /"
    yield "written) are all that lie in the policy's folder, sweeps included."


def _results(figures: Figures) -> Iterator[str]:
    rows = [
        [policy, setting, of["questions"]["scored"], *(_interval(metric, of[metric]) for metric in _shown(figures))]
        for policy, setting, of in _rows(figures)
    ]
    yield from _table(["policy", "setting", "n", *(NAMES[metric] for metric in _shown(figures))], rows)


def _judge(figures: Figures) -> Iterator[str]:
    """Who judged, what its figures are about, and what it did not tell."""
    judge = figures["judge"]
    yield f"Judged by {_cell(judge['model'])} (prompts {judge['prompts']})."
    yield "LasJ: the answer means the same as a golden one; a missing answer does not. OSR: needless searches (the"
    yield "policy knew what they brought) among all searches. USR: false steps among all steps without a search. Both"
    yield "rates are over all known steps of all attempts, right or wrong (HiPRAG, eq. 2). Unknown are verdicts that"
    yield "failed, and steps that say nothing to be judged."
    yield ""
    rows = []
    for policy, setting, of in _rows(figures):
        for metric in _judged(figures):
            found = of["judged"][metric]
            failed = ", ".join(f"{_cell(cause)} {count}" for cause, count in found["failed"].items())
            rows.append([policy, setting, NAMES[metric], found["known"], found["unknown"], failed])
    yield from _table(["policy", "setting", "metric", "verdicts", "unknown", "failed"], rows)
    yield ""
    yield "Calls of the judge; those that ask a policy without a search are among the policy's own."
    yield ""
    rows = [[name, *_calls(of, "judge")] for name, of in figures["calls"].items()]
    yield from _table(["policy", "calls", "tokens", "cost"], rows)


def _out_of_form(figures: Figures) -> Iterator[str]:
    yield "Attempts that are not well-formed, by the gravest reason."
    yield ""
    rows = [
        [policy, setting, _cell(reason), count]
        for policy, setting, of in _rows(figures)
        for reason, count in of["out_of_form"].items()
    ]
    yield from _table(["policy", "setting", "reason", "attempts"], rows)


def _differences(figures: Figures) -> Iterator[str]:
    rows = []
    by_point: dict[tuple[str, str, str, str], dict[str, Figures]] = {}
    for row in figures["differences"]:
        point = (row["policy"], row["setting"], row["baseline"], row["baseline_setting"])
        by_point.setdefault(point, {})[row["metric"]] = row
    for (policy, setting, baseline, other), found in by_point.items():
        against = baseline if other == setting else f"{baseline} at {other}"
        cells = [_difference(metric, found[metric]) for metric in _shown(figures)]
        rows.append([policy, setting, against, found["em"]["n"], *cells])
    yield from _table(["policy", "setting", "baseline", "n", *(NAMES[metric] for metric in _shown(figures))], rows)


def _by_kind(figures: Figures) -> Iterator[str]:
    shown = (*_BY_KIND, *_judged(figures))
    rows = []
    for policy, setting, of in _rows(figures):
        for kind, found in of["by_kind"].items():
            n = found["em"]["n"] if found["em"] else 0
            hops = "" if found["hops"] is None else f"{found['hops']:g}"
            rows.append(
                [policy, setting, _cell(kind), n, hops, *(_interval(metric, found[metric]) for metric in shown)]
            )
    yield from _table(["policy", "setting", "kind", "n", "hops", *(NAMES[metric] for metric in shown)], rows)


def _failures(figures: Figures) -> Iterator[str]:
    rows = []
    for policy, setting, of in _rows(figures):
        rows += [[policy, setting, _cell(cause), count] for cause, count in of["failed"].items()]
        if of["questions"]["not_tried"]:
            rows.append([policy, setting, "not tried: too many had failed", of["questions"]["not_tried"]])
    if not rows:
        yield "None: every question was scored at every setting."
        return
    yield "These questions are not scored; the same command tries them again."
    yield ""
    yield from _table(["policy", "setting", "cause", "questions"], rows)


def _plots(figures: Figures, folder: Path) -> list[Path]:
    plots = save_panels(folder / "sweeps", panels) if (panels := list(_panels(figures))) else []
    for metric in ("em", *_judged(figures)):
        if bars := list(_bars(figures, metric)):
            name = _IN_FULL[metric]
            title = f"{name} at the first setting, 95 % intervals"
            plots += save_bars(folder / metric, bars, title=title, x_label=NAMES[metric])
    return plots


def _panels(figures: Figures) -> Iterator[Panel]:
    """EM over each setting that was swept, the others at their first value (arXiv:2505.14069, Fig. 6 and 7)."""
    swept = {"max_steps": "step limit", "top_k": "passages per search", "temperature": "temperature"}
    for axis, name in swept.items():
        lines = [line for policy in figures["settings"] if (line := _curve(figures, policy, axis))]
        if lines:
            yield Panel(f"EM over {name}", name, "EM", tuple(lines))


def _curve(figures: Figures, policy: str, axis: str) -> Line | None:
    settings = figures["settings"][policy]
    fixed = [name for name in ("temperature", "max_steps", "top_k") if name != axis]
    points = [s for s in settings if all(s[name] == settings[0][name] for name in fixed)]
    found = [(s[axis], figures["policies"][policy][s["name"]]["em"]) for s in points]
    found = sorted((x, em) for x, em in found if em is not None) if len(points) > 1 else []
    if not found:
        return None
    x, ems = zip(*found, strict=True)
    mean, low, high = ([em[name] for em in ems] for name in ("mean", "low", "high"))
    return Line(policy, x, mean, low, high)


def _bars(figures: Figures, metric: str) -> Iterator[Bar]:
    """A metric of each policy at its first setting, over all questions and by kind."""
    for policy, settings in figures["settings"].items():
        of = figures["policies"][policy][settings[0]["name"]]
        for group, found in {"all questions": of, **of["by_kind"]}.items():
            if value := found[metric]:
                yield Bar(policy, group, value["mean"], value["low"], value["high"])


def _rows(figures: Figures) -> Iterator[tuple[str, str, Figures]]:
    for policy, settings in figures["policies"].items():
        for setting, of in settings.items():
            yield policy, setting, of


def _interval(metric: str, found: Figures | None) -> str:
    """A mean and its interval, in words."""
    if found is None:
        return "unknown"
    return "{} [{}, {}]".format(*(_number(metric, found[name]) for name in ("mean", "low", "high")))


def _difference(metric: str, found: Figures) -> str:
    if found["mean"] is None:
        return "unknown"
    sign = "+" if found["mean"] > 0 else ""
    text = sign + _interval(metric, found)
    certain = found["n"] >= FEW and (found["low"] > 0 or found["high"] < 0)
    return f"**{text}**" if certain else text


def _number(metric: str, value: float) -> str:
    text = f"{value:.0f}" if metric in WHOLE_NUMBERS else f"{value:.3f}"
    return text[1:] if text.startswith("-") and not float(text) else text  # no "-0.000"


def _judged(figures: Figures) -> tuple[str, ...]:
    """The metrics that a judge was asked for."""
    return tuple(figures["judge"]["metrics"]) if figures["judge"] else ()


def _shown(figures: Figures) -> tuple[str, ...]:
    """Every metric that there are figures of."""
    return (*METRICS, *_judged(figures))


def _calls(used: Figures, kind: str) -> list[object]:
    """Calls, tokens and cost of one kind of call."""
    calls = used.get(kind, {})
    tokens = f"{calls.get('prompt_tokens', 0)} / {calls.get('completion_tokens', 0)}"
    cost = calls.get("cost")
    return [calls.get("calls", 0), tokens, "" if cost is None else f"{cost:.2f}"]


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A Markdown table. Cells with text from outside have to come as `_cell` makes them."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def _cell(value: object) -> str:
    """Text from outside, for one cell: one line, nothing hidden, no markup."""
    text = printable(one_line(str(value)))
    return _MARKUP.sub(r"\\\1", text[:80])


def _plain(text: str) -> str:
    """A sentence that holds names from outside."""
    return _MARKUP.sub(r"\\\1", printable(one_line(text)))
