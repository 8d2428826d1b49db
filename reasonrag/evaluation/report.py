"""An evaluation's files: `metrics.json`, the Markdown page and the plots that follow from it.

Names of kinds and data sets come from outside: they are shown on one line, without markup. No text of a model is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.plots import Bar, BarChart, Line, Panel
from reasonrag.core.table import Table, inert_markdown
from reasonrag.core.text import Rules
from reasonrag.core.types import Question
from reasonrag.evaluation.summary import PolicyResult, failures, summarize
from reasonrag.evaluation.tables import Metrics, bold_note, evaluation_tables, measured, results_table
from reasonrag.storage.files import save_charts, write_json, write_text

_AXES = {
    "max_searches": "most retrievals",
    "max_steps": "step limit",
    "top_k": "passages per search",
    "temperature": "temperature",
}


def write_results(
    results: Sequence[PolicyResult], questions: Sequence[Question], out: Path, *, rules: Rules
) -> dict[str, Any]:
    """Write `metrics.json` of the evaluation and of each policy, `report.md` and plots; return the evaluation's."""
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
        write_json(out / result.name / "metrics.json", of_policy)
    write_report(metrics, out)
    write_json(out / "metrics.json", metrics)  # last: if it is there, everything else is there too
    return metrics


def write_report(metrics: Metrics, out: Path) -> list[Path]:
    """Write `report.md` and `plots/`, and remove plots of an earlier evaluation; return the files written."""
    for old in (out / "plots").glob("*.*"):
        old.unlink()
    panels = sweep_panels(metrics)
    plots = save_charts(out / "plots" / "sweeps", panels) if panels else []
    for metric in measured(metrics, "chart"):
        bars = tuple(_bars(metrics, metric.name))
        if bars:
            title = f"{metric.title} at the first setting, 95 % intervals"
            plots += save_charts(out / "plots" / metric.name, [BarChart(title, metric.label, bars)])
    write_text(out / "report.md", "\n".join(_page(metrics, plots)) + "\n")
    return [out / "report.md", *plots]


def summary_table(metrics: Metrics) -> Table:
    """Return the main metrics of every policy and setting, for the terminal."""
    datasets = ", ".join(metrics["dataset"]) or "?"
    title = f"{metrics['questions']['total']} questions of {datasets}, 95 % bootstrap intervals"
    return results_table(metrics, "terminal", title=title)


def _page(metrics: Metrics, plots: Sequence[Path]) -> Iterator[str]:
    tables = evaluation_tables(metrics)
    content, split = metrics["content"], metrics["split"]
    datasets = inert_markdown(", ".join(metrics["dataset"]) or "unnamed")
    yield from ["# Evaluation", ""]
    yield f"- data set: {datasets}" + (f", {inert_markdown(split)}" if split else "")
    yield f"- questions: {metrics['questions']['total']} (checksum {content['questions']})"
    yield f"- corpus: checksum {inert_markdown(content['corpus'])}"
    yield f"- seed: {metrics['seed']}; rules of the metrics: {metrics['rules']}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in metrics['versions'].items())}"
    yield from ["", *tables["policies"].markdown(), ""]
    yield "A setting is named by temperature (t), step limit (s) and passages per search (k)."
    yield "Calls and tokens count everything in the policy's folder, also other settings of a sweep."
    yield from ["", "## Results", "", "Means over the questions, with 95 % bootstrap intervals:", ""]
    for metric in measured(metrics):
        yield f"- {metric.label}: {metric.help}"
    yield from ["", "A missing answer scores 0; a question that failed because of a backend is not scored."]
    yield from ["", *tables["results"].markdown()]
    if metrics["judge"]:
        judge = metrics["judge"]
        yield from ["", "## Judge", ""]
        yield f"Judged by {inert_markdown(judge['model'])} (prompts {judge['prompts']})."
        yield "OSR and USR are over all known steps of all attempts, right or wrong (HiPRAG, eq. 2). A verdict is"
        yield "unknown if the judge failed, or if the step says nothing that can be judged."
        yield from ["", *tables["judge"].markdown()]
    out_of_form = tables["out_of_form"]
    if out_of_form.rows:
        yield from ["", "## Out of form", "", f"{out_of_form.title}.", "", *out_of_form.markdown()]
    if tables["differences"].rows:
        yield from ["", "## Differences", ""]
        yield "Policy minus baseline, paired by question, over questions that both finished."
        yield bold_note(metrics["differences"])
        for warning in metrics["asked_differently"]:
            yield f"\n{inert_markdown(warning)}."
        yield from ["", *tables["differences"].markdown()]
    if tables["kinds"].rows:
        yield from ["", "## By kind of question", ""]
        yield "Hops: searches that a question needs, according to the data set."
        yield from ["", *tables["kinds"].markdown()]
    if tables["searches"].rows:
        yield from ["", f"## {tables['searches'].title}", "", *tables["searches"].markdown()]
    yield from ["", "## Failures", ""]
    if tables["failures"].rows:
        yield "These questions are not scored; the same command tries them again."
        yield from ["", *tables["failures"].markdown()]
    else:
        yield "None: every question was scored at every setting."
    pictures = [plot for plot in plots if plot.suffix == ".svg"]
    if pictures:
        yield from ["", "## Plots", ""]
        for plot in pictures:
            yield f"![{plot.stem}](plots/{plot.name})"


def sweep_panels(metrics: Metrics) -> list[Panel]:
    """Return EM over each setting that was swept, the others at their first value (arXiv:2505.14069, Fig. 6 and 7)."""
    panels = []
    for axis, name in _AXES.items():
        lines = []
        for policy, settings in metrics["settings"].items():
            here, points = settings[0], {}
            fixed = here.keys() & {*_AXES, "choice", "format"} - {axis}  # some are not in older metrics
            on_axis = [setting for setting in settings if all(setting[key] == here[key] for key in fixed)]
            for setting in sorted(on_axis, key=lambda setting: float(setting.get(axis) or 0)):
                em = metrics["policies"][policy][setting["name"]]["em"]
                if em:
                    points[setting.get(axis)] = em
            if len(points) > 1:
                bounds = ([em[bound] for em in points.values()] for bound in ("mean", "low", "high"))
                lines.append(Line(policy, list(points), *bounds))
        if lines:
            panels.append(Panel(f"EM over {name}", name, "EM", tuple(lines)))
    return panels


def _bars(metrics: Metrics, metric: str) -> Iterator[Bar]:
    """Yield a metric of each policy at its first setting, over all questions and by kind."""
    for policy, settings in metrics["policies"].items():
        at_setting = next(iter(settings.values()))
        for group, of_group in {"all questions": at_setting, **at_setting["by_kind"]}.items():
            value = of_group[metric]
            if value:
                yield Bar(policy, group, value["mean"], value["low"], value["high"])
