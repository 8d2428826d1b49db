"""The figures of ReasonRAG's comparison as a page, JSON and a plot, next to the paper's Table 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from statistics import fmean

from reasonrag.core.plots import Bar, save_bars
from reasonrag.evaluation.sweep import Setting
from reasonrag.reproduce.figures import Figures, compare, read_attempts
from reasonrag.reproduce.markdown import interval_text, points_text, table
from reasonrag.reproduce.reasonrag import BASE, COMPARISONS, MAIN, TABLE_3, VARIANTS, Scale
from reasonrag.storage.files import require_json, write_json, write_text
from reasonrag.storage.runs import versions

# The demo policy reads one passage a search and takes at most eight steps.
SETTINGS = {"greedy": Setting(0.0, 8, 1).name, "sampled (T = 1)": Setting(1.0, 8, 1).name}
_SHOWN = ("em", "f1", "acc", "retrievals", "steps", "forced", "format_rate")


def summarise(out: Path, scale: Scale) -> Figures:
    """Everything that the page says, from what the stages left in `out`."""
    folders = [out / f"seed-{seed}" for seed in range(scale.seeds)]
    variants = scale.variants
    pairs = [(first, second) for first, second, *_ in COMPARISONS if first in variants and second in variants]
    settings = {
        name: compare(
            {variant: [read_attempts(folder / "eval", variant, setting) for folder in folders] for variant in variants},
            pairs,
        )
        for name, setting in SETTINGS.items()
    }
    return {
        "date": date.today().isoformat(),
        "seeds": list(range(scale.seeds)),
        "command": _command(scale),
        "versions": versions(),
        "budget": {
            name: [_budget(require_json(folder / name / "run.json")) for folder in folders]
            for name in ("trees-rollout", "trees-judge")
            if all((folder / name).exists() for folder in folders)
        },
        "training": {
            name: [_training(require_json(folder / name / "training.json")) for folder in folders]
            for name in variants
            if name != BASE
        },
        "settings": settings,
    }


def write(figures: Figures, results: Path) -> Path:
    """Write `reasonrag.md`, `.json`, `.svg` and `.png` into a folder; returns the page."""
    results.mkdir(parents=True, exist_ok=True)
    bars = [
        Bar(variant, setting, em["mean"], em["low"], em["high"])
        for setting, found in figures["settings"].items()
        for variant in found["variants"]
        if (em := found["variants"][variant]["all"]["em"])
    ]
    save_bars(results / "reasonrag", bars, title="Exact match in the demo world, 95 % intervals", x_label="EM")
    write_json(results / "reasonrag.json", figures, indent=1)
    write_text(results / "reasonrag.md", "\n".join(_page(figures)) + "\n")
    return results / "reasonrag.md"


def _page(figures: Figures) -> Iterator[str]:
    count = next(iter(figures["settings"].values()))["questions"]
    yield "# ReasonRAG's Table 3 in the demo world"
    yield ""
    yield f"Made on {figures['date']} by `{figures['command']}`, seeds {', '.join(map(str, figures['seeds']))};"
    yield f"{', '.join(f'{name} {version}' for name, version in figures['versions'].items())}."
    yield ""
    yield f"{count} held-out questions of an invented world, about entities that no training question touches. A"
    yield "question's value is its mean over the seeds; intervals are 95 % bootstrap intervals over questions;"
    yield "differences are paired by question. Learning rates and optimizer steps were chosen on the dev split, with"
    yield "more settings tried for the main variant than for the others."
    yield ""
    yield from (f"- `{name}`: {VARIANTS[name]}" for name in next(iter(figures["settings"].values()))["variants"])
    yield ""
    yield "![exact match](reasonrag.svg)"
    for setting, found in figures["settings"].items():
        yield from ["", f"## {setting[0].upper()}{setting[1:]}", ""]
        yield from _variants(found)
    yield from ["", "## Differences, and the paper's", ""]
    yield "The paper's column is the difference of the average EM (F1) between the rows of its Table 3, in points; ours"
    yield "is in points too. The paper's policy has 7 B parameters and answers real questions, ours 1.1 M and an"
    yield "invented world: signs can be compared, sizes cannot. Sign: `same` as the paper's or `other`, `open` where"
    yield "the interval holds 0. The paper's `RL-PRL` row stands beside our DPO on steps, its `RL-ORL` row with 5k"
    yield "questions beside DPO on outcomes."
    yield ""
    yield from _differences(figures)
    for setting, found in figures["settings"].items():
        yield from ["", f"## By kind of question: {setting}", ""]
        yield "Retrievals stand beside the searches that the question needs (hops); `known` facts need none. Early:"
        yield "share of attempts that answered with fewer searches than hops."
        yield ""
        yield from _by_kind(found)
    if {MAIN, "dpo-alpha1"} <= set(figures["training"]):
        yield from ["", "## The shortest-path term", ""]
        yield f"`{MAIN}` (alpha 0.9) minus `dpo-alpha1`, trained on pairs of the same trees:"
        yield ""
        yield from _alpha(figures)
    yield from ["", "## What it cost", ""]
    yield from _cost(figures)


def _variants(found: Figures) -> Iterator[str]:
    rows = []
    for name, of in found["variants"].items():
        seeds = ", ".join(f"{em:.3f}" for em in of["by_seed"])
        rows.append([f"`{name}`", *(interval_text(of["all"][metric]) for metric in _SHOWN), seeds])
    yield from table(["policy", "EM", "F1", "ACC", "retrievals", "steps", "forced", "format rate", "EM by seed"], rows)


def _differences(figures: Figures) -> Iterator[str]:
    rows = []
    for first, second, ours, theirs in COMPARISONS:
        if not {first, second} <= next(iter(figures["settings"].values()))["variants"].keys():
            continue
        paper = _paper(ours, theirs)
        cells = []
        for found in figures["settings"].values():
            difference = found["differences"][f"{first} - {second}"]
            em = difference["all"]["em"]
            seeds = ", ".join(f"{100 * mean:+.1f}" for mean in difference["by_seed"])
            cells += [points_text(em), seeds, _agrees(em, paper)]
        told = "" if paper is None else f"{paper[0]:+.1f} ({paper[1]:+.1f})"
        rows.append([f"`{first}` - `{second}`", told, *cells])
    heads = ["difference", "paper", "greedy", "by seed", "sign", "sampled", "by seed", "sign"]
    yield from table(heads, rows)


def _paper(ours: str | None, theirs: str | None) -> tuple[float, float] | None:
    if ours is None or theirs is None:
        return None
    return TABLE_3[ours][0] - TABLE_3[theirs][0], TABLE_3[ours][1] - TABLE_3[theirs][1]


def _agrees(em: Mapping[str, float], paper: tuple[float, float] | None) -> str:
    if em["low"] <= 0 <= em["high"]:
        return "open"
    if paper is None:
        return "+" if em["mean"] > 0 else "-"
    return "same" if (em["mean"] > 0) == (paper[0] > 0) else "other"


def _by_kind(found: Figures) -> Iterator[str]:
    rows = []
    for kind, hops in found["hops"].items():
        for name, variant in found["variants"].items():
            of = variant["by_kind"][kind]
            cells = [interval_text(of[metric]) for metric in ("em", "retrievals", "steps", "early")]
            rows.append([kind, f"{hops:g}", of["em"]["n"], f"`{name}`", *cells])
    yield from table(["kind", "hops", "n", "policy", "EM", "retrievals", "steps", "early"], rows)


def _alpha(figures: Figures) -> Iterator[str]:
    rows = []
    for setting, found in figures["settings"].items():
        of = found["differences"][f"{MAIN} - dpo-alpha1"]
        for kind, metrics in {"all": of["all"], **of["by_kind"]}.items():
            rows.append([setting, kind, *(interval_text(metrics[m], sign=True) for m in ("em", "retrievals", "steps"))])
    yield from table(["setting", "kind", "EM", "retrievals", "steps"], rows)


def _cost(figures: Figures) -> Iterator[str]:
    rows = [
        [f"`{name}`", *(f"{fmean(run[key] for run in runs):.0f}" for key in ("policy_calls", "judge_calls", "pairs"))]
        for name, runs in figures["budget"].items()
    ]
    yield from table(["trees", "policy calls", "judge calls", "pairs"], rows)
    yield ""
    rows = [
        [f"`{name}`", *(f"{fmean(run[key] for run in runs):.0f}" for key in ("examples", "steps", "seconds"))]
        for name, runs in figures["training"].items()
    ]
    yield from table(["training", "examples", "optimizer steps", "seconds"], rows)
    yield ""
    yield "Means over the seeds."


def _budget(run: Figures) -> Figures:
    calls = {kind: run["calls"].get(kind, {}).get("calls", 0) for kind in ("policy", "judge")}
    return {"policy_calls": calls["policy"], "judge_calls": calls["judge"], "pairs": run["pairs"]["total"]}


def _training(summary: Figures) -> Figures:
    return {"examples": summary["data"]["train"]["pairs"], "steps": summary["steps"], "seconds": summary["seconds"]}


def _command(scale: Scale) -> str:
    given = {"seeds": scale.seeds, "limit": scale.questions, "iterations": scale.iterations}
    flags = " ".join(f"--{name} {value}" for name, value in given.items())
    short = "" if scale.max_steps is None else f" --max-steps {scale.max_steps}"
    only = "".join(f" --only {name}" for name in scale.only)
    return f"reasonrag reproduce reasonrag {flags} --test-limit {scale.test_questions}{short}{only}"
