"""The results of a comparison as a page, JSON and a picture. Every sentence follows from the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.comparison import BASE, Paper
from papers.measures import METRICS, Results, sign, write_values
from papers.results import Evaluated, families
from reasonrag.core.plots import Line, Panel
from reasonrag.core.table import Table
from reasonrag.evaluation.tables import bold_note, interval_text, is_certain
from reasonrag.storage.files import save_charts, write_json, write_text
from tools.pages import made

_COVERAGE = "../evaluation.md#several-training-seeds"
_OVER_SEEDS = (
    "Intervals are 95 % intervals over questions and seeds: questions are resampled (bootstrap), and the spread of the",
    "seeds' means is added as a random effect (Student's t, Satterthwaite), because so few seeds cannot be resampled.",
    "They are slightly wide where seeds agree, and slightly narrow where the seed matters more than the question.",
)


def write(paper: Paper, results: Results, rows: Evaluated, folder: Path) -> Path:
    """Write `PAGE.md`, `.json`, `.svg`, `.png` and `.values.csv.gz` into a folder; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_values(folder / f"{paper.page}.values.csv.gz", rows, paper.metrics)
    return write_page(paper, results, folder)


def write_page(paper: Paper, results: Results, folder: Path) -> Path:
    """Write what follows from the results: all but the values. Return the page."""
    charts = [*_frontiers(paper, results), *(_panels(paper, results) if paper.curves else ())]
    if spent := results.get("by_cost"):  # not in results of earlier versions
        by_line: dict[str, list[list[float]]] = {}
        for name, points in spent.items():  # a later round ends where the one before it did, and goes on
            line = by_line.setdefault(_line(paper, name), [])
            line += points[-1:] if line else points
        lines = (Line(name, *zip(*points, strict=True)) for name, points in by_line.items())
        charts.append(Panel("EM by what it has cost, trees included", "CPU seconds", "EM", tuple(lines)))
    charts += _by_calls(paper, results)
    save_charts(folder / paper.page, charts)
    write_json(folder / f"{paper.page}.json", results, indent=1)
    write_text(folder / f"{paper.page}.md", "\n".join(page(paper, results)) + "\n")
    return folder / f"{paper.page}.md"


def page(paper: Paper, results: Results) -> Iterator[str]:
    """Yield the lines of the Markdown page in `docs/results/` that compares our results with the paper's."""
    yield from _head(paper, results)
    yield from ["", "## Findings", "", *_against(paper, results, BASE)]
    if paper.in_demo_world:
        yield from _signs(results)
    else:  # no paper's signs to compare with
        for origin in dict.fromkeys(second for _, second in paper.pairs if second != BASE):
            yield from _against(paper, results, origin)
    for setting, found in results["settings"].items():
        yield from ["", f"## {setting[0].upper()}{setting[1:]}", "", *_variants(paper, found)]
        if not found["differences"]:
            continue
        yield from ["", "First minus second, paired by question over the seeds that both have; shares in points."]
        between, to_base = families(paper, found["differences"])
        apart = f" Differences to `{BASE}`, sure beforehand, are adjusted apart ({len(to_base)})."
        yield bold_note(between or to_base) + (apart if between and to_base else "")
        yield from ["", *_differences(paper, found)]
    if paper.in_demo_world:
        yield from _compared(paper, results)
    if paper.by_kind:
        yield from ["", "## By kind of question", ""]
        if paper.in_demo_world:
            yield "`known` facts are in the policy's weights: they need no search."
        if "early" in paper.by_kind:
            yield "Hops: searches that a question needs. Needless: searches beyond the hops. Early: share of attempts"
            yield "that answered with fewer searches than hops."
        yield from ["", *_by_kind(paper, results)]
    for first, second in paper.pairs_by_kind:
        yield from ["", f"`{first}` minus `{second}`:", "", *_difference_by_kind(paper, results, first, second)]
    yield from ["", "## Runs", "", *_cost(results), *_commands(results)]


def _compared(paper: Paper, results: Results) -> Iterator[str]:
    yield from ["", "## Compared with the paper", ""]
    yield "The paper's models are large and answer real questions; ours has about a million parameters and answers"
    yield "questions of an invented world. Signs can be compared, sizes cannot. Paper: the difference of its averages"
    yield "in its own units, and on how many of its data sets the difference has that sign. `agree` or `disagree`: ours"
    yield "is bold, so certain; `undecided`: it is not; `no sign`: the paper's difference is 0; `unknown`: there is"
    yield "nothing to measure, such as a rate over steps that a policy never takes; `not run`: see the list at the top."
    yield from ["", *_comparisons(results), "", *(f"- {note}" for note in _notes(paper, results))]


def _head(paper: Paper, results: Results) -> Iterator[str]:
    values = f"{paper.page}.values.csv.gz"
    variants = [variant for found in results["settings"].values() for variant in found["variants"].values()]
    questions = max((variant["questions"] for variant in variants), default=0)
    by_seed = max((max(variant["questions_by_seed"]) for variant in variants), default=0)
    yield f"# {paper.title}"
    yield ""
    yield f"Made by {made(results['commit'], f'{paper.page}.md')}."
    yield f"Run on {results['date']} as `{results['command']}`;"
    yield f"{', '.join(f'{name} {version}' for name, version in results['versions'].items())}."
    yield ""
    each = f", {by_seed} with each seed" if 0 < by_seed < questions else ""
    where = "an invented world" if paper.in_demo_world else "HotpotQA, 2WikiMultiHopQA, MuSiQue, NQ and PopQA"
    yield f"{questions} held-out questions of {where}{each}."
    if shared := results.get("shared_with_training"):
        named, answers = shared["questions"] or "None", shared["answers"]
        yield f"{named} of them name an entity that a training question names; {answers} have one as an answer."
    yield paper.described_method(results["steps"])
    rates = "OSR and USR" if paper.in_demo_world else "steps parsed"
    if _has_seeds(variants) or not variants:
        yield f"Means are over all attempts, of all questions and seeds, and {rates} over all their steps. Each seed is"
        yield "shown too."
    else:
        yield f"Means are over all questions, and {rates} over all their steps, with one seed."
    if results["seeds"] > 1:
        yield from _OVER_SEEDS
        if results["seeds"] == 2:
            yield "**Two seeds are too few for that**: where seeds differ, such an interval holds the truth in .87 to"
            yield f".90 of simulations, not in .95 ([table]({_COVERAGE}))."
    else:
        yield "Intervals are 95 % bootstrap intervals over questions. One seed says nothing about other seeds: where"
        yield f"seeds differ, such an interval holds the truth in .29 to .84 of simulations ([table]({_COVERAGE}))."
    yield f"They are computed from [{values}]({values}); `python -m tools.recompute` repeats that."
    yield ""
    yield f"- `{BASE}`: `{paper.policy}`, before training"
    present = {name for found in results["settings"].values() for name in found["variants"]}
    for variant in paper.variants:
        if not variant.table or variant.name in present:
            yield f"- `{variant.name}`: {variant.meaning}"
    if results["missing"]:
        missing = []
        for name, seeds in results["missing"].items():
            missing.append(f"`{name}` with seed {', '.join(map(str, seeds))}")
        yield from ["", f"**Not run**: {'; '.join(missing)}. The command above was stopped before these, or told"]
        yield "to leave them out (`--only`); repeated, it runs them. Rows that need them say `not run`."
    yield from ["", f"![{METRICS[paper.metrics[0]].label} against searches]({paper.page}.svg)", ""]
    yield "A point is a policy, and a line joins the rounds of a rule: higher is better, further left is cheaper."
    if paper.curves:
        yield "Curves are means over the seeds; those of rollouts are also means over the last five steps."


def _against(paper: Paper, results: Results, origin: str) -> Iterator[str]:
    """Yield how the main metric of each variant compares with one that it was trained from."""
    main = paper.metrics[0]
    words = {1: "higher", -1: "lower", 0: "too close to tell", None: "unknown"}
    for setting, found in results["settings"].items():
        by_sign: dict[int | None, list[str]] = {}
        for first, second in paper.pairs:
            ours = found["differences"].get(f"{first} - {second}")
            if second == origin and ours:
                interval = ours["all"][main]
                by_sign.setdefault(sign(interval), []).append(f"`{first}` ({_difference(main, interval)})")
        if by_sign:
            parts = "; ".join(f"{words[way]} with {', '.join(names)}" for way, names in by_sign.items())
            yield f"- {setting}: {METRICS[main].label}, compared with `{origin}`, is {parts}."


def _signs(results: Results) -> Iterator[str]:
    """Yield how many of the paper's signs came out, and which did not."""
    rows = results["comparisons"]
    if not rows:
        yield "There is no row of the paper to compare with."
        return
    for setting in results["settings"]:
        counts = Counter(row["verdicts"][setting] for row in rows)
        left_out = counts.pop("not run", 0)
        summary = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none compared"
        others = f"; {left_out} more are of variants that this run leaves out" if left_out else ""
        yield f"- {setting}: of {len(rows) - left_out} rows of the paper, {summary}{others}."
    for outcome, heading in (("disagree", "Against the paper's sign"), ("undecided", "Too close to tell")):
        for setting in results["settings"]:
            named: dict[str, None] = {}  # an ordered set: several rows of the paper may stand for one difference
            for row in rows:
                if row["verdicts"][setting] == outcome:
                    named[f"{METRICS[row['metric']].label} of `{row['first']}` - `{row['second']}`"] = None
            if named:
                yield f"- {heading}, {setting}: {'; '.join(named)}."


def _variants(paper: Paper, found: Results) -> Iterator[str]:
    main = paper.metrics[0]
    rows = []
    several = _has_seeds(found["variants"].values())
    for name, variant in found["variants"].items():
        by_seed = ", ".join("?" if value is None else f"{value:.3f}" for value in variant["by_seed"][main])
        rows.append([f"`{name}`", *_means(variant["all"], paper.metrics), *([by_seed] if several else [])])
    last = [f"{METRICS[main].label} by seed"] if several else []
    return Table("", ["policy", *_labels(paper.metrics), *last], rows).markdown(str)


def _differences(paper: Paper, found: Results) -> Iterator[str]:
    main = paper.metrics[0]
    digits, scale = (1, 100) if METRICS[main].share else (3, 1)
    rows = []
    several = _has_seeds(found["differences"].values())
    for name, difference in found["differences"].items():
        first, second = name.split(" - ")
        seeds = difference["by_seed"][main]
        by_seed = ", ".join("?" if value is None else f"{scale * value:+.{digits}f}" for value in seeds)
        cells = [f"`{first}` - `{second}`", *_changes(difference["all"], paper.metrics)]
        if several:
            cells = [cells[0], str(len(difference["seeds"])), *cells[1:], by_seed]
        rows.append(cells)
    labels = _labels(paper.metrics)
    headings = ["seeds", *labels, f"{METRICS[main].label} by seed"] if several else labels
    return Table("", ["difference", *headings], rows).markdown(str)


def _has_seeds(rows: Iterable[Results]) -> bool:
    """Return whether a variant, or a difference, is of several seeds."""
    return any(len(means) > 1 for row in rows for means in row["by_seed"].values())


def _difference(metric: str, interval: Mapping[str, Any] | None) -> str:
    """Return a difference with its interval, in points if it is one of shares; bold if it is certain."""
    in_points = METRICS[metric].share
    text = interval_text(interval, digits=1 if in_points else 3, scale=100 if in_points else 1, signed=True)
    return f"**{text}**" if is_certain(interval) else text


def _comparisons(results: Results) -> Iterator[str]:
    rows = []
    for row in results["comparisons"]:
        sets = "" if row["sets"] is None else " ({} of {})".format(*row["sets"])
        cells = [f"`{row['first']}` - `{row['second']}`", METRICS[row["metric"]].label, row["source"]]
        cells.append(row["shown"] + sets)
        for setting, found in results["settings"].items():
            ours = found["differences"].get(f"{row['first']} - {row['second']}")
            cells.append("" if ours is None else _difference(row["metric"], ours["all"][row["metric"]]))
            cells.append(row["verdicts"][setting])
        rows.append(cells)
    headings = ["difference", "metric", "the paper's rows", "paper"]
    for setting in results["settings"]:
        headings += [setting, "sign"]
    return Table("", headings, rows).markdown(str)


def _notes(paper: Paper, results: Results) -> Iterator[str]:
    """Yield what a reader has to know about the paper's rows, and ours."""
    rows = results["comparisons"]
    if ppo := sum("PPO" in row["source"] and "ppo" not in (row["first"], row["second"]) for row in rows):
        yield f"{ppo} of these {len(rows)} rows are of policies that the paper trained with PPO; ours train with GRPO."
    yield from paper.notes


def _by_kind(paper: Paper, results: Results) -> Iterator[str]:
    shown = [metric for metric in paper.metrics if metric in paper.by_kind]
    with_hops = any(found.get("hops") for found in results["settings"].values())
    rows = []
    for setting, found in results["settings"].items():
        kinds = dict.fromkeys(kind for variant in found["variants"].values() for kind in variant["by_kind"])
        for kind in kinds:
            hops = [f"{found['hops'][kind]:g}" if kind in found["hops"] else ""] if with_hops else []
            for name, variant in found["variants"].items():
                if metrics := variant["by_kind"].get(kind):
                    main = metrics[paper.metrics[0]]
                    rows.append([setting, kind, *hops, main["n"] if main else 0, f"`{name}`", *_means(metrics, shown)])
    headings = ["setting", "kind", *(["hops"] if with_hops else []), "n", "policy"]
    return Table("", [*headings, *_labels(shown)], rows).markdown(str)


def _difference_by_kind(paper: Paper, results: Results, first: str, second: str) -> Iterator[str]:
    shown = [metric for metric in paper.metrics if metric in paper.by_kind]
    rows = []
    for setting, found in results["settings"].items():
        difference = found["differences"].get(f"{first} - {second}")
        if difference:
            for kind, metrics in {"all": difference["all"], **difference["by_kind"]}.items():
                rows.append([setting, kind, *_changes(metrics, shown)])
    return Table("", ["setting", "kind", *_labels(shown)], rows).markdown(str)


def _cost(results: Results) -> Iterator[str]:
    if results.get("trees"):
        rows = []
        for name, trees in results["trees"].items():
            rows.append([f"`{name}`", *(f"{trees[key]:.0f}" for key in ("policy_calls", "judge_calls", "pairs"))])
        yield from [*Table("", ["trees", "policy calls", "judge calls", "pairs"], rows).markdown(str), ""]
    calls = results.get("by_calls", {})
    columns = {
        "calls": "calls so far",
        "examples": "examples",
        "steps": "steps",
        "seconds": "seconds",
        "best": "best held-out at step, by seed",
    }
    spent = {name: cost | {"calls": calls[name]} if calls else cost for name, cost in results["training"].items()}
    shown = [key for key in columns if any(key in cost for cost in spent.values())]
    rows = []
    for name, cost in spent.items():
        cells = {key: f"{cost[key]:.0f}" for key in shown if key in cost and key != "best"}
        cells["best"] = ", ".join("none" if step is None else str(step) for step in cost.get("best", ()))
        rows.append([f"`{name}`", *(cells.get(key, "") for key in shown)])
    yield from Table("", ["training", *(columns[key] for key in shown)], rows).markdown(str)
    yield from ["", "Means over the seeds."]


def _commands(results: Results) -> Iterator[str]:
    """Yield the commands of the first seed: the others differ only in their seed and folder."""
    first = [line for line in results["commands"] if "OUT/seed-0/" in line]
    others = len(results["commands"]) - len(first)
    if first:
        more = f"; {others} more are the same with other seeds" if others else ""
        yield from ["", f"Commands with seed 0{more}:", "", "```", *first, "```"]


def _panels(paper: Paper, results: Results) -> Iterator[Panel]:
    for key, curves in results["curves"].items():
        lines = []
        for name, points in curves.items():
            lines.append(Line(name, [float(step) for step, _ in points], [value for _, value in points]))
        if lines:
            yield Panel(paper.curves[key], "optimizer step", "", tuple(lines))
    if not any(results["curves"].values()):
        yield Panel("no training run is done", "optimizer step", "", ())


def _frontiers(paper: Paper, results: Results) -> Iterator[Panel]:
    """Yield the main metric against searches for each decoding; the rounds of a rule are points of one line."""
    main = paper.metrics[0]
    for setting, found in results["settings"].items():
        points: dict[str, list[tuple[float, float]]] = {}
        for name, variant in found["variants"].items():
            searches, value = variant["all"].get("retrievals"), variant["all"][main]
            # Next to the policy before training, rules and rounds would all look alike.
            if searches and value and not (paper.kind in ("rounds", "reasonrag") and name == BASE):
                points.setdefault(_line(paper, name), []).append((searches["mean"], value["mean"]))
        lines = (Line(name, *zip(*line, strict=True)) for name, line in points.items())
        yield Panel(setting, "searches a question", METRICS[main].label, tuple(lines))


def _by_calls(paper: Paper, results: Results) -> Iterator[Panel]:
    """Yield the main metric and the searches of each decoding by the calls of the training, round after round."""
    if not (calls := results.get("by_calls")):
        return
    for setting, found in results["settings"].items():
        for metric in (paper.metrics[0], "retrievals"):
            start, points = found["variants"][BASE]["all"][metric]["mean"], dict[str, list[tuple[float, float]]]()
            for name, spent in calls.items():
                line = points.setdefault(_line(paper, name), [(0.0, start)])
                line.append((spent / 1000, found["variants"][name]["all"][metric]["mean"]))
            lines = tuple(Line(name, *zip(*line, strict=True)) for name, line in points.items())
            yield Panel(f"{METRICS[metric].label}, {setting}", "thousand calls of the policy", "", lines)


def _line(paper: Paper, name: str) -> str:
    """Return the line of a picture on which a variant is: `dpo` has `dpo-2`, the next round of it."""
    return re.sub(r"-\d$", "", name) if paper.kind in ("rounds", "reasonrag", "real") else name


def _means(intervals: Results, metrics: Sequence[str]) -> list[str]:
    return [interval_text(intervals[metric]) for metric in metrics]


def _changes(differences: Results, metrics: Sequence[str]) -> list[str]:
    return [_difference(metric, differences[metric]) for metric in metrics]


def _labels(metrics: Sequence[str]) -> list[str]:
    return [METRICS[metric].label for metric in metrics]
