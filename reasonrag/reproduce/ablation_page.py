"""The figures of a paper's ablations as a page, JSON and curves. Every sentence follows from the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from reasonrag.core.plots import Line, Panel, save_panels
from reasonrag.reproduce.ablation import BASE, Paper
from reasonrag.reproduce.figures import Figures
from reasonrag.reproduce.markdown import bold, interval_text, points_text, table
from reasonrag.reproduce.measures import METRICS, sign
from reasonrag.storage.files import write_json, write_text

_BY_KIND = ("em", "acc", "osr", "usr", "retrievals")


def write(paper: Paper, figures: Figures, results: Path) -> Path:
    """Write `PAPER.md`, `.json`, `.svg` and `.png` into a folder; returns the page."""
    results.mkdir(parents=True, exist_ok=True)
    save_panels(results / paper.name, list(_panels(paper, figures)))
    write_json(results / f"{paper.name}.json", figures, indent=1)
    write_text(results / f"{paper.name}.md", "\n".join(page(paper, figures)) + "\n")
    return results / f"{paper.name}.md"


def page(paper: Paper, figures: Figures) -> Iterator[str]:
    """The lines of the page."""
    yield from _head(paper, figures)
    yield from ["", "## What came out", "", *_against_base(paper, figures), *_outcome(figures)]
    for setting, found in figures["settings"].items():
        yield from ["", f"## {setting[0].upper()}{setting[1:]}", ""]
        yield from _variants(paper, found)
        yield from ["", "First minus second, paired by question over the seeds that both have; shares in points."]
        yield from ["**Bold**: the interval excludes 0.", "", *_differences(paper, found)]
    yield from ["", "## Beside the paper", ""]
    yield "The paper's models are large and answer real questions, ours has about a million parameters and answers"
    yield "those of an invented world: signs can be compared, sizes cannot. Paper: the difference of its averages in"
    yield "its own units, and on how many of its data sets the difference has that sign. `agree` or `disagree` where"
    yield "our interval excludes 0, `undecided` where it holds 0, `no sign` where the paper's is 0, `unknown` where"
    yield "there is nothing to measure, `missing` where it was not run."
    yield ""
    yield from _comparisons(paper, figures)
    if paper.notes:
        yield from ["", *(f"- {note}" for note in paper.notes)]
    yield from ["", "## By kind of question", ""]
    yield "`known` facts are in the policy's weights: they need no search."
    yield ""
    yield from _by_kind(paper, figures)
    yield from ["", "## What was run", "", *_cost(figures), "", *_commands(figures)]


def _head(paper: Paper, figures: Figures) -> Iterator[str]:
    counts = [of["questions"] for found in figures["settings"].values() for of in found["variants"].values()]
    yield f"# {paper.title}"
    yield ""
    yield f"Made on {figures['date']} by `{figures['command']}`;"
    yield f"{', '.join(f'{name} {version}' for name, version in figures['versions'].items())}."
    yield ""
    yield f"{max(counts, default=0)} held-out questions of an invented world, about entities that no training question"
    yield f"touches. Every variant is trained by `rl train --preset {paper.preset}` for {figures['steps']} optimizer"
    yield f"steps from `{paper.policy}`, and its last policy is evaluated, whatever became of it. A question's value is"
    yield "its mean over the seeds; OSR and USR are over all steps of all questions and seeds. Intervals are 95 %"
    yield "bootstrap intervals over questions: they say nothing of other seeds, whose own figures stand beside."
    yield ""
    yield f"- `{BASE}`: `{paper.policy}`, before any of it"
    yield from (f"- `{variant.name}`: {variant.meaning}" for variant in paper.variants)
    if figures["missing"]:
        yield ""
        seeds = {name: ", ".join(map(str, numbers)) for name, numbers in figures["missing"].items()}
        yield f"**Not there yet**: {'; '.join(f'`{name}` with seed {told}' for name, told in seeds.items())}."
    yield ""
    yield f"![curves]({paper.name}.svg)"
    yield ""
    yield "Means over the seeds; of rollouts, over the last five steps."


def _against_base(paper: Paper, figures: Figures) -> Iterator[str]:
    """Which way the main metric went from the policy that all start from."""
    main = paper.metrics[0]
    ways = {1: "higher", -1: "lower", 0: "too close to tell", None: "unknown"}
    for setting, found in figures["settings"].items():
        named: dict[int | None, list[str]] = {}
        for first, second in paper.pairs:
            if second == BASE and (ours := found["differences"].get(f"{first} - {second}")):
                told = _difference(main, ours["all"][main])
                named.setdefault(sign(ours["all"][main]), []).append(f"`{first}` ({told})")
        if named:
            told = "; ".join(f"{ways[way]} with {', '.join(names)}" for way, names in named.items())
            yield f"- {setting}: {METRICS[main].label}, next to `{BASE}`, is {told}."


def _outcome(figures: Figures) -> Iterator[str]:
    """How many of the paper's signs came out, and which did not."""
    rows = figures["comparisons"]
    if not rows:
        yield "There is no row of the paper to compare with."
        return
    for setting in figures["settings"]:
        counts = Counter(row["verdicts"][setting] for row in rows)
        told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        yield f"- {setting}: of {len(rows)} rows of the paper, {told}."
    for name, heading in (("disagree", "Against the paper's sign"), ("undecided", "Too close to tell")):
        found = {
            setting: list(dict.fromkeys(_named(row) for row in rows if row["verdicts"][setting] == name))
            for setting in figures["settings"]
        }
        for setting, named in found.items():
            if named:
                yield f"- {heading}, {setting}: {'; '.join(named)}."


def _named(row: Figures) -> str:
    return f"{METRICS[row['metric']].label} of `{row['first']}` - `{row['second']}`"


def _variants(paper: Paper, found: Figures) -> Iterator[str]:
    main = paper.metrics[0]
    rows = []
    for name, of in found["variants"].items():
        by_seed = ", ".join("?" if value is None else f"{value:.3f}" for value in of["by_seed"][main])
        rows.append([f"`{name}`", *(interval_text(of["all"][metric]) for metric in paper.metrics), by_seed])
    heads = [METRICS[metric].label for metric in paper.metrics]
    yield from table(["policy", *heads, f"{METRICS[main].label} by seed"], rows)


def _differences(paper: Paper, found: Figures) -> Iterator[str]:
    rows = []
    for name, of in found["differences"].items():
        first, second = name.split(" - ")
        cells = [_difference(metric, of["all"][metric]) for metric in paper.metrics]
        rows.append([f"`{first}` - `{second}`", len(of["seeds"]), *cells])
    yield from table(["difference", "seeds", *(METRICS[metric].label for metric in paper.metrics)], rows)


def _difference(metric: str, found: Mapping[str, float] | None) -> str:
    if found is None:
        return "unknown"
    return points_text(found) if METRICS[metric].share else bold(interval_text(found, sign=True), found)


def _comparisons(paper: Paper, figures: Figures) -> Iterator[str]:
    rows = []
    for row in figures["comparisons"]:
        sets = "" if row["sets"] is None else " ({} of {})".format(*row["sets"])
        cells = [f"`{row['first']}` - `{row['second']}`", METRICS[row["metric"]].label, row["source"]]
        cells.append(row["shown"] + sets)
        for setting, found in figures["settings"].items():
            ours = found["differences"].get(f"{row['first']} - {row['second']}")
            cells += ["" if ours is None else _difference(row["metric"], ours["all"][row["metric"]])]
            cells += [row["verdicts"][setting]]
        rows.append(cells)
    heads = [head for setting in figures["settings"] for head in (setting, "sign")]
    yield from table(["difference", "metric", "the paper's rows", "paper", *heads], rows)


def _by_kind(paper: Paper, figures: Figures) -> Iterator[str]:
    shown = [metric for metric in paper.metrics if metric in _BY_KIND]
    rows = []
    for setting, found in figures["settings"].items():
        kinds = dict.fromkeys(kind for of in found["variants"].values() for kind in of["by_kind"])
        for kind in kinds:
            for name, of in found["variants"].items():
                if metrics := of["by_kind"].get(kind):
                    rows.append([setting, kind, f"`{name}`", *(interval_text(metrics[metric]) for metric in shown)])
    yield from table(["setting", "kind", "policy", *(METRICS[metric].label for metric in shown)], rows)


def _cost(figures: Figures) -> Iterator[str]:
    rows = []
    for name, of in figures["training"].items():
        best = ", ".join("none" if step is None else str(step) for step in of["best"])
        rows.append([f"`{name}`", f"{of['steps']:.0f}", f"{of['seconds']:.0f}", best])
    yield from table(["training", "steps", "seconds", "best held-out at step, by seed"], rows)


def _commands(figures: Figures) -> Iterator[str]:
    """Those of the first seed: the others differ by their seed and folder alone."""
    first = [line for line in figures["commands"] if "OUT/seed-0/" in line]
    others = len(figures["commands"]) - len(first)
    yield "Commands with seed 0" + (f"; {others} more are the same with other seeds:" if others else ":")
    yield ""
    yield from ["```", *first, "```"]


def _panels(paper: Paper, figures: Figures) -> Iterator[Panel]:
    drawn = {key: lines for key, lines in figures["curves"].items() if lines}
    for key, lines in drawn.items():
        curves = [
            Line(name, [float(step) for step, _ in points], [value for _, value in points])
            for name, points in lines.items()
        ]
        yield Panel(paper.curves[key], "optimizer step", "", tuple(curves))
    if not drawn:
        yield Panel("no training is done", "optimizer step", "", ())
