"""What a comparison of training variants is made of: the variants, the commands that train and evaluate them, and the
rows that the paper reports.

Every variant starts from the same policy, and its last policy is evaluated even if its training collapsed.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from reasonrag.evaluation.judged import JUDGED
from reasonrag.online_rl.presets import RL_PRESETS
from reasonrag.reproduce.stages import Stage

BASE = "base"
JUDGE = "demo-judge"
# A collapse is a result of the comparison, so no guard stops the training run.
_NO_GUARDS = ("guards.format_rate_drop=0", "guards.max_length_growth=0")
_VALIDATION_QUESTIONS = int(RL_PRESETS["demo-outcome"]["validation"]["limit"])


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of training.

    Attributes:
        name: in commands, folders and tables.
        meaning: in words.
        settings: settings of `rl train` that replace the preset's.
        plans: whether the reward needs reference plans.
        blind: curves that are not drawn, because this variant's reward does not measure what they count.
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
        label: the paper's name of it.
        values: a value per data set by our metric, in the table's units.
        averages: the average that the paper prints, by our metric; if it prints none, the mean over the data sets.
    """

    label: str
    values: dict[str, tuple[float, ...]]
    averages: dict[str, float] = field(default_factory=dict)

    def average(self, metric: str) -> float:
        return self.averages[metric] if metric in self.averages else fmean(self.values[metric])

    @property
    def metrics(self) -> set[str]:
        return {*self.values, *self.averages}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a paper that share model and algorithm.

    Attributes:
        source: paper and number of the table.
        model: model and algorithm.
        rows: the paper's rows by our variant.
        digits: digits of a difference after the point.
    """

    source: str
    model: str
    rows: dict[str, Row]
    digits: int = 1


def published(paper: str) -> tuple[Table, ...]:
    """Read the tables of a paper from `published.csv`, which has a line per row and metric."""
    tables: dict[tuple[str, str], Table] = {}
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["paper"] == paper:
                numbers = line["data_sets"].split()
                digits = max(len(number.partition(".")[2]) for number in numbers)
                source = (line["table"], line["model"])
                table = tables.setdefault(source, Table(*source, rows={}, digits=digits))
                row = table.rows.setdefault(line["variant"], Row(line["row"], {}, {}))
                row.values[line["metric"]] = tuple(map(float, numbers))
                if line["average"]:
                    row.averages[line["metric"]] = float(line["average"])
    return tuple(tables.values())


@dataclass(frozen=True, slots=True)
class Claim:
    """The sign of `first - second` that a paper states in words or shows in a plot, without a number."""

    first: str
    second: str
    metric: str
    sign: int
    source: str


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a comparison.

    Args:
        seeds: how many seeds; each trains and evaluates every variant once.
        questions: training questions; None takes all 600.
        test_questions: held-out questions, of 1,200.
        max_steps: at most as many optimizer steps per training run; None takes the number that the variant declares.
        iterations: search iterations of a tree, for comparisons that build trees.
    """

    seeds: int = 3
    questions: int | None = None
    test_questions: int = 1200
    max_steps: int | None = None
    iterations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper(ABC):
    """Everything that is particular to one paper; a subclass says how variants are trained.

    Attributes:
        name: of the command and of the page.
        title: of the page.
        policy: address of the policy that every variant starts from.
        variants: in the order of tables; the policy itself, `BASE`, comes before them.
        pairs: differences (first minus second) to report.
        metrics: columns of tables, keys of `measures.METRICS`; the first one is the main metric.
        by_kind: those of them that are also reported by kind of question.
        pairs_by_kind: differences to report by kind of question.
        curves: keys of a training run's history, with titles. The page shows a bar chart if there are none.
        tables: rows of the paper.
        claims: statements of the paper without numbers.
        notes: what a reader has to know about the paper's rows, and ours.
        builds_trees: whether variants are trained on trees, whose search iterations are then part of the scale.
    """

    name: str
    title: str
    policy: str
    variants: tuple[Variant, ...]
    pairs: tuple[tuple[str, str], ...]
    metrics: tuple[str, ...]
    by_kind: tuple[str, ...] = ("em", "acc", "osr", "usr", "retrievals")
    pairs_by_kind: tuple[tuple[str, str], ...] = ()
    curves: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    builds_trees: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The policy that all start from, and the variants."""
        return (BASE, *(variant.name for variant in self.variants))

    @abstractmethod
    def method(self, steps: int | None) -> str:
        """Return a sentence that says how the variants are trained; `steps` is what `steps` below returned."""

    @abstractmethod
    def steps(self, scale: Scale) -> int | None:
        """Return the optimizer steps of every variant; None if each has its own number."""

    @abstractmethod
    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        """Yield the commands of one seed, those that others need first; a variant is trained into `folder / NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlinePaper(Paper):
    """A comparison of rewards for online training: the same number of optimizer steps on the same questions.

    Attributes:
        preset: of `rl train`.
        shared: further settings of all variants, given their number of optimizer steps.
    """

    preset: str
    shared: Callable[[int], tuple[str, ...]] = lambda steps: ()

    def method(self, steps: int | None) -> str:
        return (
            f"Every variant is trained by `rl train --preset {self.preset}` for {steps} optimizer\n"
            f"steps from `{self.policy}`, and its last policy is evaluated even if training collapsed."
        )

    def steps(self, scale: Scale) -> int:
        return scale.max_steps or int(RL_PRESETS[self.preset]["max_steps"])

    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        plans = folder / "plans.parquet"
        limit = () if scale.questions is None else ("--limit", str(scale.questions))
        if any(variant.plans for variant in self.variants):
            # `rl plan` and `rl train` draw the same questions, because both draw them by the seed.
            arguments = ("rl", "plan", "--preset", "demo", *limit, "--set", f"seed={seed}", "--judge", JUDGE)
            yield Stage.writing(plans, *arguments)
        steps = self.steps(scale)
        for variant in self.variants:
            settings = [*self.shared(steps), *variant.settings, *_NO_GUARDS]
            if scale.test_questions < _VALIDATION_QUESTIONS:  # a quick look: validation shall not dominate it
                settings.append(f"validation.limit={scale.test_questions}")
            arguments = ("rl", "train", "--preset", self.preset, "--seed", str(seed), *limit, "--max-steps", str(steps))
            for setting in settings:
                arguments += ("--set", setting)
            if variant.plans:
                arguments += ("--plans", str(plans))
            yield Stage.writing(folder / variant.name, *arguments, needs=(plans,) if variant.plans else ())


def stages(paper: Paper, out: Path, scale: Scale) -> list[Stage]:
    """Return the commands of all variants, seed after seed; a command comes after those that it needs."""
    commands = []
    for seed in range(scale.seeds):
        folder = out / f"seed-{seed}"
        trained = {folder / variant.name: variant.name for variant in paper.variants}
        commands.append(_evaluation(paper, folder, BASE, paper.policy, seed, scale))
        for stage in paper.training(folder, seed, scale):
            commands.append(stage)
            if stage.out in trained:
                name = trained[stage.out]
                commands.append(_evaluation(paper, folder, name, f"hf:{stage.out}", seed, scale, stage.out))
    return commands


def outputs(paper: Paper, out: Path, scale: Scale, only: Collection[str]) -> set[Path]:
    """Return what the commands of some variants write, with everything that they need; `BASE` is always among them."""
    needs = {stage.out: stage.needs for stage in stages(paper, out, scale)}
    evaluated = [evaluation_of(out / f"seed-{seed}", name) for seed in range(scale.seeds) for name in {BASE, *only}]
    required: set[Path] = set()
    while evaluated:
        path = evaluated.pop()
        required.add(path)
        evaluated.extend(needs[path])
    return required


def evaluation_of(folder: Path, name: str) -> Path:
    """Return the evaluation of a variant within a seed's folder."""
    return folder / "eval" / name


def _evaluation(paper: Paper, folder: Path, name: str, spec: str, seed: int, scale: Scale, *needs: Path) -> Stage:
    test = ("--split", "test", "--limit", str(scale.test_questions), "--temperature", "0,1", "--seed", str(seed))
    judged = [metric for metric in JUDGED if metric in paper.metrics]
    judge = ("--judge", JUDGE, "--judged", ",".join(judged)) if judged else ()
    policy = ("--dataset", "demo", "--policy", f"{name}={spec}")
    return Stage.writing(evaluation_of(folder, name), "eval", *policy, *test, *judge, needs=needs)
