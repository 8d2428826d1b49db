"""What a comparison of training variants is made of: the variants, the commands that train and evaluate them, and the
rows that the paper reports.

Every variant starts from the same policy, and its last policy is evaluated even if its training collapsed.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.plan import Plan, Stage
from reasonrag.evaluation.judged import JUDGED

BASE = "base"
JUDGE = "demo-judge"
# A collapse is a result of the comparison, so no guard stops an online training run.
NO_GUARDS = ("guards.format_rate_drop=0", "guards.max_length_growth=0")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of training that a paper compares with others."""

    name: str  # in commands, folders and tables
    meaning: str
    settings: tuple[str, ...] = ()  # settings of `rl train` that replace the preset's
    plans: bool = False  # whether the reward needs reference plans
    blind: tuple[str, ...] = ()  # curves that are not drawn, because this reward does not measure what they count
    table: str = ""  # the only table that has it, such as "table-11"; trained if that or its name is asked for


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a paper's table, in the units of the table."""

    label: str
    values: dict[str, tuple[float, ...]]  # by our metric, a value per data set
    averages: dict[str, float] = field(default_factory=dict)  # by our metric, if the paper prints an average

    def average(self, metric: str) -> float:
        """Return the average that the paper prints, else the mean over its data sets."""
        return self.averages[metric] if metric in self.averages else fmean(self.values[metric])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a paper that share model and algorithm."""

    source: str  # number of the table
    model: str
    rows: dict[str, Row]  # by our variant
    digits: int = 1  # after the point of a difference


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
    """How large a comparison is: seeds, questions, iterations and optimizer steps."""

    seeds: int = 3  # each trains and evaluates every variant once
    questions: int | None = None  # for training; None takes all 600
    test_questions: int = 1200
    max_steps: int | None = None  # None takes the number of optimizer steps that the variant declares
    iterations: int | None = None  # of tree search, for comparisons that build trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper(ABC):
    """Everything that is particular to one paper; a subclass says how variants are trained."""

    name: str  # of the command and of the page
    title: str
    policy: str  # address of the policy that every variant starts from
    variants: tuple[Variant, ...]  # in the order of tables; the policy itself, `BASE`, comes before them
    pairs: tuple[tuple[str, str], ...]  # differences (first minus second) to report
    metrics: tuple[str, ...]  # columns of tables, keys of `measures.METRICS`; the first one is the main metric
    by_kind: tuple[str, ...] = ("em", "acc", "osr", "usr", "retrievals")  # metrics to report by kind of question too
    pairs_by_kind: tuple[tuple[str, str], ...] = ()
    curves: Mapping[str, str] = field(default_factory=dict)  # titles by key of the history; bars are shown if empty
    main: str = ""  # the variant that those with a `table` are compared with
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader has to know about the paper's rows, and ours
    builds_trees: bool = False  # if so, search iterations are part of the scale
    in_demo_world: bool = True  # if not, questions, corpus and policy are real, and no paper's rows are compared
    sampled: tuple[str, ...] | None = None  # what is evaluated at temperature 1 too; None: everything
    scale: Scale = Scale()  # what the command does by default

    @property
    def page(self) -> str:
        """The name of the page's files."""
        return self.name

    @property
    def inputs(self) -> str:
        """What the command needs beside its scale, as a person types it."""
        return ""

    @property
    def names(self) -> tuple[str, ...]:
        """The policy that all start from, and the variants."""
        return (BASE, *(variant.name for variant in self.variants))

    @property
    def usual(self) -> tuple[str, ...]:
        """What is compared unless more or less is asked for."""
        return (BASE, *(variant.name for variant in self.variants if not variant.table))

    @property
    def by_table(self) -> dict[str, tuple[str, ...]]:
        """The variants of each table that has some of its own, `main` among them."""
        found: dict[str, tuple[str, ...]] = {}
        for variant in self.variants:
            if variant.table:
                found[variant.table] = (*found.get(variant.table, (self.main,)), variant.name)
        return found

    def compared(self, present: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the differences to report, given what was run: `pairs`, and `main` minus each variant of a table."""
        yield from self.pairs
        for variant in self.variants:
            if variant.table and variant.name in present:
                yield self.main, variant.name

    @abstractmethod
    def method(self, steps: int | None) -> str:
        """Return a sentence that says how the variants are trained; `steps` is what `steps` below returned."""

    @abstractmethod
    def steps(self, scale: Scale) -> int | None:
        """Return the optimizer steps of every variant; None if each has its own number."""

    @abstractmethod
    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        """Yield the commands of one seed, those that others need first; a variant is trained into `folder / NAME`."""

    def evaluation(self, folder: Path, name: str, seed: int, scale: Scale) -> Stage:
        """Return the command that evaluates one of `names` on questions that no training of the folder sees."""
        spec = self.policy if name == BASE else f"hf:{folder / name}"
        test = ("--split", "test", "--limit", str(scale.test_questions), "--temperature", "0,1", "--seed", str(seed))
        judged = [metric for metric in JUDGED if metric in self.metrics]
        judge = ("--judge", JUDGE, "--judged", ",".join(judged)) if judged else ()
        arguments = ("eval", "--dataset", "demo", "--policy", f"{name}={spec}", *test, *judge)
        needs = () if name == BASE else (folder / name,)
        return Stage.writing(evaluation_of(folder, name), *arguments, needs=needs)

    def facts(self, plan: Plan) -> dict[str, Any]:
        """Return what the page says beside metrics and curves; it becomes part of the results."""
        return {}

    def sections(self, results: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the page about `facts`."""
        yield from ()


def stages(paper: Paper, out: Path, scale: Scale) -> list[Stage]:
    """Return the commands of all variants, seed after seed; a command comes after those that it needs."""
    commands = []
    for seed in range(scale.seeds):
        folder = out / f"seed-{seed}"
        trained = {folder / variant.name: variant.name for variant in paper.variants}
        for stage in paper.training(folder, seed, scale):
            commands.append(stage)
            if stage.out in trained:
                commands.append(paper.evaluation(folder, trained[stage.out], seed, scale))
        commands.append(paper.evaluation(folder, BASE, seed, scale))
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
