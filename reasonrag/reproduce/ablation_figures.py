"""What a page of ablations says, from what the stages left: figures, the paper's rows beside them, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.reproduce.ablation import AblationScale, Paper, Table, evaluation_of, stages
from reasonrag.reproduce.figures import Figures
from reasonrag.reproduce.measures import Seeds, described, difference, read_seeds, verdict
from reasonrag.reproduce.stages import Plan
from reasonrag.storage.files import require_json
from reasonrag.storage.runs import versions

# What an evaluation's files begin with at each temperature; the policy's own card gives the rest of the name.
SETTINGS = {"greedy": "t0_*", "sampled (T = 1)": "t1_*"}
_SMOOTHED = 5  # steps whose mean a point of a rollout's curve is: a batch has few questions


def summarise(paper: Paper, plan: Plan, out: Path, scale: AblationScale) -> Figures:
    """Everything that the page says of the variants whose evaluations are done.

    Args:
        paper: which ablations.
        plan: of these stages, which knows what is done.
        out: its folder.
        scale: of the comparison.

    Returns:
        What `PAPER.json` holds. A variant is there with the seeds that are done; `missing` names the others.
    """
    folders = {seed: out / f"seed-{seed}" for seed in range(scale.seeds)}
    done = {stage.out for stage in plan.stages if plan.is_done(stage)}
    there = {name: {seed: evaluation_of(folder, name) for seed, folder in folders.items()} for name in paper.names}
    there = {name: {seed: path for seed, path in paths.items() if path in done} for name, paths in there.items()}
    settings = {
        setting: _at(paper, {name: read_seeds(paths, name, files) for name, paths in there.items() if paths})
        for setting, files in SETTINGS.items()
    }
    trained = {
        variant.name: [require_json(folders[seed] / variant.name / "training.json") for seed in there[variant.name]]
        for variant in paper.variants
        if there[variant.name]
    }
    return {
        "paper": paper.name,
        "date": date.today().isoformat(),
        "command": command(paper, scale),
        "commands": [stage.line.replace(str(out), "OUT") for stage in stages(paper, out, scale) if stage.out in done],
        "versions": versions(),
        "steps": paper.steps(scale),
        "missing": {
            name: sorted(folders.keys() - paths.keys()) for name, paths in there.items() if len(paths) < len(folders)
        },
        "settings": settings,
        "comparisons": list(comparisons(paper, settings)),
        "training": {name: _cost(summaries) for name, summaries in trained.items()},
        "curves": {key: _curves(paper, trained, key) for key in paper.curves},
    }


def comparisons(paper: Paper, settings: Mapping[str, Figures]) -> Iterator[Figures]:
    """The paper's difference of each pair and metric that it has, and how the sign of ours compares with it.

    Args:
        paper: which has tables and claims.
        settings: as `summarise` gives them; a difference that is not there is `missing`.
    """
    for first, second in paper.pairs:
        for metric in paper.metrics:
            for told in _told(paper, first, second, metric):
                found = {}
                for setting, of in settings.items():
                    ours = of["differences"].get(f"{first} - {second}")
                    found[setting] = verdict(ours["all"][metric], told["paper"]) if ours else "missing"
                yield {"first": first, "second": second, "metric": metric, **told, "verdicts": found}


def command(paper: Paper, scale: AblationScale) -> str:
    """That makes the whole page, without its folders."""
    given = {"seeds": scale.seeds, "limit": scale.questions, "test-limit": scale.test_questions}
    flags = "".join(f" --{name} {value}" for name, value in given.items() if value is not None)
    steps = "" if scale.max_steps is None else f" --max-steps {scale.max_steps}"
    return f"reasonrag reproduce {paper.name}{flags}{steps}"


def _at(paper: Paper, seeds: Mapping[str, Seeds]) -> Figures:
    """All variants and differences at one setting."""
    differences = {
        f"{first} - {second}": difference(seeds[first], seeds[second], paper.metrics)
        for first, second in paper.pairs
        if first in seeds and second in seeds
    }
    return {
        "variants": {name: described(found, paper.metrics) for name, found in seeds.items()},
        "differences": {name: found for name, found in differences.items() if found},
    }


def _told(paper: Paper, first: str, second: str, metric: str) -> Iterator[Figures]:
    """What tables and words say of `first - second`."""
    for table in paper.tables:
        if {first, second} <= table.rows.keys() and metric in table.rows[first].metrics & table.rows[second].metrics:
            yield _from_table(table, first, second, metric)
    for claim in paper.claims:
        if (claim.first, claim.second, claim.metric) == (first, second, metric):
            yield {"source": claim.source, "paper": claim.sign, "shown": "+" if claim.sign > 0 else "-", "sets": None}


def _from_table(table: Table, first: str, second: str, metric: str) -> Figures:
    """A difference of averages, and on how many data sets it has the same sign."""
    a, b = table.rows[first], table.rows[second]
    # Prints have few digits: what is left below them is the computer's.
    paper = round(a.average(metric) - b.average(metric), 6)
    sets = None
    if paper and metric in a.values and metric in b.values:
        alike = [(x - y) * paper > 0 for x, y in zip(a.values[metric], b.values[metric], strict=True)]
        sets = [sum(alike), len(alike)]
    return {
        "source": f"{table.source}, {table.model}: {a.label} - {b.label}",
        "paper": paper,
        "shown": f"{paper:+.{table.digits}f}",
        "sets": sets,
    }


def _cost(summaries: Sequence[Figures]) -> Figures:
    """Means over the seeds, and where the best policy by validation was."""
    return {
        "steps": fmean(summary["steps"] for summary in summaries),
        "seconds": fmean(summary["seconds"] for summary in summaries),
        "best": [summary["best"] and summary["best"]["step"] for summary in summaries],
    }


def _curves(paper: Paper, trained: Mapping[str, Sequence[Figures]], key: str) -> Figures:
    """That of each variant that has one which says something."""
    blind = {variant.name for variant in paper.variants if key in variant.blind}
    found = {
        name: _curve([summary["history"] for summary in summaries], key)
        for name, summaries in trained.items()
        if name not in blind
    }
    return {name: points for name, points in found.items() if points}


def _curve(histories: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[tuple[int, float]]:
    """`[T]` steps and means over the seeds that have them; of rollouts, the mean of the last few steps."""
    by_step: dict[int, list[float]] = {}
    for history in histories:
        for entry in history:
            if entry.get(key) is not None:
                by_step.setdefault(int(entry["step"]), []).append(float(entry[key]))
    points = [(step, fmean(values)) for step, values in sorted(by_step.items())]
    window = 1 if key.startswith("eval_") else _SMOOTHED
    return [
        (step, round(fmean(value for _, value in points[max(0, place + 1 - window) : place + 1]), 6))
        for place, (step, _) in enumerate(points)
    ]
