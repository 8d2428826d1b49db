"""The results of a comparison, read from what its commands left: metrics, the paper's rows beside them, and curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.comparison import BASE, Paper, Row, Scale, Table, evaluation_of
from papers.measures import Results, Seeds, described, difference, mean_hops, read_seeds, read_values, verdict
from papers.plan import Plan, Stage
from reasonrag.core.bootstrap import add_adjusted
from reasonrag.demo.world import demo_questions, make_world
from reasonrag.storage.files import require_json
from reasonrag.storage.folder import versions
from tools.pages import head

Evaluated = Mapping[str, Mapping[str, Seeds]]  # rows by decoding and variant

# Beginning of an evaluation's file names at each temperature; the policy's own settings give the rest.
GREEDY = "greedy"
SETTINGS = {GREEDY: "t0_*", "sampled (T = 1)": "t1_*"}
_ADVICE = "run the same command again"
_SMOOTHED = 5  # a batch has few questions, so a point of a rollout's curve is the mean of the last steps


def evaluated(paper: Paper, plan: Plan, scale: Scale, earlier: Path | None = None) -> Evaluated:
    """Read the variants whose evaluations are done: rows by decoding, variant, seed and question id.

    `earlier` has the values of the seeds before `scale.first_seed`, as `write_values` wrote them.

    Raises:
        RunError: an evaluation is missing, although its command has succeeded.
    """
    done = {stage.out for stage in plan.stages if plan.is_done(stage)}
    rows: dict[str, dict[str, Seeds]] = {setting: {} for setting in SETTINGS}
    before = read_values(earlier) if earlier and scale.first_seed else {}
    for name in paper.names:
        folders = {seed: evaluation_of(plan.out / f"seed-{seed}", name) for seed in range(scale.seeds)}
        folders = {seed: folder for seed, folder in folders.items() if folder in done}
        for setting, files in SETTINGS.items():
            is_asked = setting == GREEDY or paper.sampled is None or name in paper.sampled
            values = before.get(setting, {}).get(name, {})
            known = {seed: values[seed] for seed in range(scale.first_seed) if seed in values}
            if (folders or known) and is_asked:
                rows[setting][name] = {**known, **read_seeds(folders, name, files)}
    return rows


def summarise(paper: Paper, plan: Plan, scale: Scale, rows: Evaluated) -> Results:
    """Return the contents of `PAPER.json`; `rows` are what `evaluated` read.

    A variant has the seeds that are done; `missing` names the others.
    """
    settings = {setting: _at_setting(paper, of_setting) for setting, of_setting in rows.items()}
    seeds = {name: list(by_seed) for of_setting in rows.values() for name, by_seed in of_setting.items()}
    asked = [name for name in paper.names if name in seeds or name in paper.usual]
    missing = {name: [seed for seed in range(scale.seeds) if seed not in seeds.get(name, ())] for name in asked}
    trained: dict[str, dict[int, Results]] = {}
    for variant in paper.variants:
        for seed in set(seeds.get(variant.name, ())).difference(range(scale.first_seed)):
            folder = plan.out / f"seed-{seed}" / variant.name
            if any(stage.out == folder for stage in plan.stages):  # a rival may only be prompted
                summary = require_json(folder / "training.json", _ADVICE)
                trained.setdefault(variant.name, {})[seed] = summary
    curves: Results = {key: {} for key in paper.curves}
    for variant in paper.variants:
        histories = [summary["history"] for summary in trained.get(variant.name, {}).values()]
        for key in curves.keys() - variant.blind:
            if points := _curve(histories, key):
                curves[key][variant.name] = points
    return {
        "paper": paper.name,
        "date": date.today().isoformat(),
        "commit": head("reasonrag", "papers"),
        "command": command(paper, scale, seeds),
        "commands": [stage.line.replace(str(plan.out), "OUT") for stage in plan.stages if plan.is_done(stage)],
        "versions": versions(),
        "seeds": max((len(numbers) for numbers in seeds.values()), default=0),
        "steps": paper.steps(scale),
        "missing": {name: numbers for name, numbers in missing.items() if numbers},
        "shared_with_training": _shared_with_training(rows) if paper.in_demo_world else None,
        "settings": settings,
        "comparisons": list(comparisons(paper, settings)),
        "trees": _trees(plan),
        "training": {name: _cost(list(by_seed.values())) for name, by_seed in trained.items()},
        "curves": curves,
        "by_cost": dict(_by_cost(plan, trained, settings[GREEDY]["variants"])),
        "by_calls": dict(_by_calls(plan, trained)) if paper.kind == "reasonrag" else {},
    }


def comparisons(paper: Paper, settings: Mapping[str, Results]) -> Iterator[Results]:
    """Yield the paper's difference of each pair and metric, and how the sign of ours compares with it.

    `settings` are those of `summarise`; a difference that was not run is "not run".
    """
    present = {name for at_setting in settings.values() for name in at_setting["variants"]}
    for first, second in paper.compared(present):
        for metric in paper.metrics:
            for reported in _reported(paper, first, second, metric):
                verdicts = {}
                for setting, at_setting in settings.items():
                    ours = at_setting["differences"].get(f"{first} - {second}")
                    verdicts[setting] = verdict(ours["all"][metric], reported["paper"]) if ours else "not run"
                yield {"first": first, "second": second, "metric": metric, **reported, "verdicts": verdicts}


def command(paper: Paper, scale: Scale, present: Collection[str] = ()) -> str:
    """Return the command that makes the whole page, without its folders; `present` has been run."""
    options = {
        "seeds": scale.seeds,
        "limit": scale.questions,
        "iterations": scale.iterations,
        "test-limit": scale.test_questions,
        "max-steps": scale.max_steps,
    }
    flags = "".join(f" --{name} {value}" for name, value in options.items() if value is not None)
    if tables := [table for table, names in paper.by_table.items() if not set(names) - {paper.main} - set(present)]:
        others = [name for name in paper.usual if name in present and name not in (BASE, paper.main)]
        flags += "".join(f" --only {name}" for name in (*others, *tables))
    if not paper.in_demo_world:
        template = f" --chat-template {paper.chat_template}" if paper.chat_template else ""
        flags = f" --model MODEL{template} --data DATA{flags}"
    return f"python -m papers {paper.name}{flags}"


def renewed(paper: Paper, results: Results, rows: Evaluated) -> Results:
    """Return the results of a page with the differences that the paper declares now.

    Intervals that are there are kept; those of a new pair are computed from `rows`, the values by question.
    """
    settings = {name: _at_setting(paper, rows[name], found) for name, found in results["settings"].items()}
    return {**results, "settings": settings, "comparisons": list(comparisons(paper, settings))}


def _at_setting(paper: Paper, seeds: Mapping[str, Seeds], kept: Results | None = None) -> Results:
    """Return all variants and differences at one setting; `kept` is what is known of them."""
    differences = {}
    for first, second in paper.compared(seeds):
        if first in seeds and second in seeds:
            found = kept and kept["differences"].get(f"{first} - {second}")
            if found := found or difference(seeds[first], seeds[second], paper.metrics):
                differences[f"{first} - {second}"] = found
    for family in families(paper, differences):
        add_adjusted(family)
    if kept:
        return {**kept, "differences": differences}
    variants = {name: described(rows, paper.metrics) for name, rows in seeds.items()}
    for found in () if paper.by_kind else (*variants.values(), *differences.values()):
        found["by_kind"] = {}  # a megabyte that no page shows
    return {"hops": mean_hops(next(iter(seeds.values()), {})), "variants": variants, "differences": differences}


def families(paper: Paper, differences: Mapping[str, Results]) -> tuple[list[Results], list[Results]]:
    """Return the differences that the page shows for one decoding, and apart from them those to `BASE`.

    A family is adjusted for itself. Training changes the policy, so differences to `BASE` are sure before anything is
    measured: among the others they would make doubtful ones look certain.
    """
    between: list[Results] = []
    to_base: list[Results] = []
    for name, found in differences.items():
        family = to_base if BASE in name.split(" - ") else between
        family += filter(None, found["all"].values())
        if tuple(name.split(" - ")) in paper.pairs_by_kind:
            for of_kind in found["by_kind"].values():
                family += [of_kind[metric] for metric in paper.by_kind if of_kind.get(metric)]
    return between, to_base


def _reported(paper: Paper, first: str, second: str, metric: str) -> Iterator[Results]:
    """Yield what the paper's tables and text say about `first - second`."""
    for table in paper.tables:
        if {first, second} <= table.rows.keys():
            minuend, subtrahend = table.rows[first], table.rows[second]
            # Two of our variants may stand for one row of the paper, which says nothing about their difference.
            if minuend.label != subtrahend.label and metric in minuend.values and metric in subtrahend.values:
                yield _from_table(table, minuend, subtrahend, metric)
    for claim in paper.claims:
        if (claim.first, claim.second, claim.metric) == (first, second, metric):
            shown = "+" if claim.sign > 0 else "-"
            yield {"source": claim.source, "paper": claim.sign, "shown": shown, "sets": None}


def _from_table(table: Table, first: Row, second: Row, metric: str) -> Results:
    """Return a difference of averages, and on how many data sets it has the same sign."""
    # Papers print few digits; anything below is a rounding error of this subtraction.
    paper = round(first.average(metric) - second.average(metric), 6)
    sets = None
    if paper:
        pairs = list(zip(first.values[metric], second.values[metric], strict=True))
        sets = [sum((minuend - subtrahend) * paper > 0 for minuend, subtrahend in pairs), len(pairs)]
    return {
        "source": f"{table.source}, {table.model}: {first.label} - {second.label}",
        "paper": paper,
        "shown": f"{paper:+.{table.digits}f}",
        "sets": sets,
    }


def _shared_with_training(rows: Evaluated) -> Results:
    """Count the test questions, and the answers, that name an entity which a training question names."""
    evaluations = [asked for variants in rows.values() for seeds in variants.values() for asked in seeds.values()]
    questions = set().union(*evaluations)
    training = make_world().named(demo_questions("train"))
    asked = [question for question in demo_questions("test") if question.id in questions]
    return {
        "questions": sum(not training.isdisjoint(make_world().named([question])) for question in asked),
        "answers": sum(not training.isdisjoint(question.golden_answers) for question in asked),
    }


def _trees(plan: Plan) -> Results:
    """Return calls and pairs of the trees that were built, means over the seeds."""
    by_name: dict[str, list[Results]] = {}
    for stage in plan.stages:
        if stage.arguments[0] == "build-tree" and plan.is_done(stage):
            by_name.setdefault(stage.out.name, []).append(require_json(stage.out / "run.json", _ADVICE))
    trees = {}
    for name, runs in by_name.items():
        trees[name] = {"pairs": fmean(run["pairs"]["total"] for run in runs)}
        for kind in ("policy", "judge"):
            calls = [run["calls"].get(kind, {}).get("calls", 0) for run in runs]
            trees[name][f"{kind}_calls"] = fmean(calls)
    return trees


def _cost(summaries: Sequence[Results]) -> Results:
    """Return means over the seeds; of online training also the step of the best policy by validation."""
    cost: Results = {name: fmean(summary[name] for summary in summaries) for name in ("steps", "seconds")}
    if all("rows" in summary.get("data", {}) for summary in summaries):
        # SFT is trained on each chosen step once, however many pairs it stands in.
        cost["examples"] = fmean(summary["data"]["rows"]["train"] for summary in summaries)
    if all("best" in summary for summary in summaries):
        cost["best"] = [summary["best"] and summary["best"]["step"] for summary in summaries]
    return cost


def _by_cost(
    plan: Plan, trained: Mapping[str, Mapping[int, Results]], greedy: Mapping[str, Results]
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield each variant with EM by CPU seconds, its trees and plans included (ReasonRAG, Fig. 5; Search-P1, Fig. 6a).

    Points are means over the seeds: the validations of an online training, else the ends of the training, greedily.
    """
    for name, by_seed in trained.items():
        curves = []
        for seed, summary in by_seed.items():
            needed = _needed(plan, plan.out / f"seed-{seed}" / name)
            spent = [plan.cpu_s.get(stage.line, math.nan) for stage in needed]  # unknown of earlier versions
            before, last = sum(spent[1:]), spent[0]
            looked = [entry for entry in summary["history"] if {"seconds", "eval_em"} <= entry.keys()]
            points = [(before + last * entry["seconds"] / summary["seconds"], entry["eval_em"]) for entry in looked]
            evaluated = [(x, greedy[one]) for x, one in ((0.0, BASE), (before + last, name)) if one in greedy]
            ends = [(x, found["all"]["em"]["mean"]) for x, found in evaluated]
            curves.append(points or ends)
        means = [[fmean(values) for values in zip(*points, strict=True)] for points in zip(*curves, strict=False)]
        if all(math.isfinite(x) for x, _ in means):
            yield name, means


def _by_calls(plan: Plan, trained: Mapping[str, Iterable[int]]) -> Iterator[tuple[str, float]]:
    """Yield each variant with the calls of the policy that its training took, trees included; means over the seeds."""
    for name, seeds in trained.items():
        spent = []
        for seed in seeds:
            stages = _needed(plan, plan.out / f"seed-{seed}" / name)
            spent.append(sum(_calls(stage) for stage in stages))
        yield name, fmean(spent)


def _calls(stage: Stage) -> float:
    """Return how often a stage asked the policy: once a node of a tree that was sampled, once a step of a rollout."""
    if stage.arguments[0] == "build-tree":
        return float(require_json(stage.out / "run.json", _ADVICE)["calls"]["policy"]["calls"])
    if stage.arguments[:2] != ("rl", "train"):
        return 0.0
    summary = require_json(stage.out / "training.json", _ADVICE)
    rollout = summary["settings"]["rollout"]
    steps = [entry["rollout/steps"] for entry in summary["history"] if "rollout/steps" in entry]
    return float(sum(steps)) * int(rollout["group_size"]) * int(rollout["questions_per_step"])


def _needed(plan: Plan, out: Path) -> list[Stage]:
    """Return the stage that writes a folder, and every stage before it that it needs."""
    stages = {stage.out: stage for stage in plan.stages}
    needed = [stages[out]]
    for stage in needed:  # it grows until everything is in it
        needed += [stages[path] for path in stage.needs if stages[path] not in needed]
    return needed


def _curve(histories: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[tuple[int, float]]:
    """Return `[T]` steps and means over the seeds that have them; of rollouts, the mean of the last few steps."""
    by_step: dict[int, list[float]] = {}
    for history in histories:
        for entry in history:
            if entry.get(key) is not None:
                by_step.setdefault(int(entry["step"]), []).append(float(entry[key]))
    steps = sorted(by_step)
    means = [fmean(by_step[step]) for step in steps]
    window = 1 if key.startswith("eval_") else _SMOOTHED
    points = []
    for index, step in enumerate(steps):
        points.append((step, round(fmean(means[max(0, index + 1 - window) : index + 1]), 6)))
    return points
