"""What a paper's ablations are made of here: rewards to be compared, commands that train and evaluate them, its rows.

Every variant starts from the same policy and takes the same number of optimizer steps on the same questions; its last
policy is evaluated, whatever became of it. A paper's file declares variants, metrics and what the paper found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from reasonrag.evaluation.judged import JUDGED
from reasonrag.online_rl.presets import RL_PRESETS
from reasonrag.reproduce.stages import Stage

BASE = "base"
JUDGE = "demo-judge"
# An ablation that collapses is a result: no guard ends it.
_NO_GUARDS = ("guards.format_rate_drop=0", "guards.max_length_growth=0")
_VALIDATED = int(RL_PRESETS["demo-outcome"]["validation"]["limit"])


@dataclass(frozen=True, slots=True)
class Variant:
    """One reward.

    Attributes:
        name: in commands, folders and tables.
        meaning: in words.
        settings: of `rl train`, over the preset's.
        plans: whether it needs reference plans.
        blind: curves that would be drawn and say nothing, as nobody looks at what they count.
    """

    name: str
    meaning: str
    settings: tuple[str, ...] = ()
    plans: bool = False
    blind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a paper's table.

    Attributes:
        label: how the paper names it.
        values: by our metric, a value for each data set, in the table's units.
        averages: by our metric, as the paper prints it; elsewhere it is the mean over the data sets.
    """

    label: str
    values: Mapping[str, tuple[float, ...]]
    averages: Mapping[str, float] = field(default_factory=dict)

    def average(self, metric: str) -> float:
        """Over the data sets."""
        return self.averages[metric] if metric in self.averages else fmean(self.values[metric])

    @property
    def metrics(self) -> set[str]:
        """Those that it has."""
        return {*self.values, *self.averages}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that were trained alike.

    Attributes:
        source: which tables of which paper.
        model: and algorithm.
        rows: by our variant.
        digits: after the point, of a difference.
    """

    source: str
    model: str
    rows: Mapping[str, Row]
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says in words or in a figure alone: the sign of `first - second`."""

    first: str
    second: str
    metric: str
    sign: int
    source: str


@dataclass(frozen=True, slots=True)
class Paper:
    """All that is particular to one paper.

    Attributes:
        name: of the command and of its page.
        title: of its page.
        preset: of `rl train`.
        policy: that every variant starts from.
        variants: besides the policy itself, in the order of tables.
        pairs: differences (first minus second) that are looked at.
        metrics: of tables, keys of `measures.METRICS`; the first is drawn by kind of question too.
        curves: keys of a training's history, with titles; those that are there are drawn.
        tables, claims: what the paper found.
        notes: what a reader has to know of the paper's rows, and of ours.
        shared: settings of all variants, by their number of optimizer steps.
    """

    name: str
    title: str
    preset: str
    policy: str
    variants: tuple[Variant, ...]
    pairs: tuple[tuple[str, str], ...]
    metrics: tuple[str, ...]
    curves: Mapping[str, str]
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    shared: Callable[[int], tuple[str, ...]] = lambda steps: ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the policy that all start from, and of the variants."""
        return (BASE, *(variant.name for variant in self.variants))

    def steps(self, scale: AblationScale) -> int:
        """Optimizer steps of each training."""
        return scale.max_steps or int(RL_PRESETS[self.preset]["max_steps"])


@dataclass(frozen=True, slots=True)
class AblationScale:
    """How large the comparison is.

    Args:
        seeds: of training and sampling; everything is done once for each.
        questions: of the train split; all 600 if None.
        test_questions: held out; 1,200 are all.
        max_steps: optimizer steps of each training; as many as the preset has if None.
    """

    seeds: int = 3
    questions: int | None = None
    test_questions: int = 1200
    max_steps: int | None = None


def stages(paper: Paper, out: Path, scale: AblationScale) -> list[Stage]:
    """The commands of all variants, seed after seed."""
    found = []
    for seed in range(scale.seeds):
        folder = out / f"seed-{seed}"
        found.append(_evaluation(paper, folder, BASE, paper.policy, seed, scale))
        if any(variant.plans for variant in paper.variants):
            found.append(_plans(folder, seed, scale))
        for variant in paper.variants:
            found.append(_training(paper, variant, folder, seed, scale))
            trained = folder / variant.name
            found.append(_evaluation(paper, folder, variant.name, f"hf:{trained}", seed, scale, trained))
    return found


def outs(paper: Paper, out: Path, scale: AblationScale, only: Collection[str]) -> set[Path]:
    """What the stages of some variants write, with all that these need; the policy they start from is among them."""
    chosen = {BASE, *only}
    found = set()
    for seed in range(scale.seeds):
        folder = out / f"seed-{seed}"
        found |= {evaluation_of(folder, name) for name in chosen}
        found |= {folder / variant.name for variant in paper.variants if variant.name in chosen}
        if any(variant.plans for variant in paper.variants if variant.name in chosen):
            found.add(_plans_of(folder))
    return found


def evaluation_of(folder: Path, name: str) -> Path:
    """Where a variant's evaluation is, within a seed's folder."""
    return folder / "eval" / name


def _plans_of(folder: Path) -> Path:
    return folder / "plans.parquet"


def _limit(scale: AblationScale) -> tuple[str, ...]:
    return () if scale.questions is None else ("--limit", str(scale.questions))


def _plans(folder: Path, seed: int, scale: AblationScale) -> Stage:
    """For the very questions that are trained on: both commands draw their sample by the seed."""
    out = _plans_of(folder)
    asked = ("--preset", "demo", *_limit(scale), "--set", f"seed={seed}", "--judge", JUDGE)
    return Stage(("rl", "plan", *asked, "--out", str(out)), out)


def _training(paper: Paper, variant: Variant, folder: Path, seed: int, scale: AblationScale) -> Stage:
    out, plans = folder / variant.name, _plans_of(folder)
    steps = paper.steps(scale)
    settings = [*paper.shared(steps), *variant.settings, *_NO_GUARDS]
    if scale.test_questions < _VALIDATED:  # to see it run
        settings.append(f"validation.limit={scale.test_questions}")
    asked = ["--preset", paper.preset, "--seed", str(seed), *_limit(scale), "--max-steps", str(steps)]
    asked += [argument for setting in settings for argument in ("--set", setting)]
    if variant.plans:
        asked += ["--plans", str(plans)]
    return Stage(("rl", "train", *asked, "--out", str(out)), out, needs=(plans,) if variant.plans else ())


def _evaluation(
    paper: Paper, folder: Path, name: str, spec: str, seed: int, scale: AblationScale, *needs: Path
) -> Stage:
    out = evaluation_of(folder, name)
    test = ("--split", "test", "--limit", str(scale.test_questions), "--temperature", "0,1", "--seed", str(seed))
    judged = [metric for metric in JUDGED if metric in paper.metrics]
    judge = ("--judge", JUDGE, "--judged", ",".join(judged)) if judged else ()
    asked = ("eval", "--dataset", "demo", "--policy", f"{name}={spec}", *test, *judge)
    return Stage((*asked, "--out", str(out)), out, needs=needs)
