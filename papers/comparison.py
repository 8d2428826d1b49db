"""The papers' comparisons of training variants: what they train, by which commands, and what the papers report.

`comparisons.yaml` declares them, `published.csv` holds the papers' rows. Every variant starts from the same policy, and
its last policy is evaluated even if its training collapsed.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from papers.plan import Stage
from reasonrag.evaluation.metrics import JUDGED
from reasonrag.online_rl.settings import rl_presets

BASE = "base"
JUDGE = "demo-judge"
# A collapse is a result of the comparison, so no guard stops an online training run.
NO_GUARDS = ("guards.format_rate_drop=0", "guards.max_length_growth=0")
_VALIDATION_QUESTIONS = int(rl_presets()["demo-outcome"]["validation"]["limit"])
_QUESTIONS = 600  # for trees, and the iterations of each
_ITERATIONS = 8
_DPO_STEPS, _SFT_STEPS = 150, 180  # optimizer steps, chosen on the dev split
_ROUNDS = 3
# Fresh rollouts cost this many questions, so that all rules cost about as many calls.
_CONFIRMED_SHARE = 0.7
_PAPERS_LOSS = ("--loss-type", "sigmoid")
_SIBLINGS = ("--pair-rule", "siblings", "--min-confidence", "0", "--max-pairs", "0")
_EVERY_PAIR = (*_SIBLINGS, "--path-share", "1")  # the paper's rule
_RULES = {
    "siblings": _EVERY_PAIR,
    "siblings-half": (*_SIBLINGS, "--path-share", "0.5"),
    "alpha1": (*_SIBLINGS, "--alpha", "1"),
    "outcome": ("--level", "trajectory"),
    "best": ("--path-share", "1"),
    "best-half": ("--path-share", "0.5"),
    "best-quarter": ("--path-share", "0.25"),
    "best-none": ("--path-share", "0"),
}
# Settings of online training. PPO takes an attempt a question, as its authors do.
_REWARDED = {
    "grpo-outcome": ("reward.name=outcome",),
    "grpo-spre": (),
    "grpo-step": ("credit=step",),
    "ppo-outcome": (
        "reward.name=outcome",
        "algorithm=ppo",
        "ppo.learning_rate=1e-3",
        "rollout.group_size=1",
        "rollout.questions_per_step=64",
    ),
}
_REWARDED_STEPS = 100  # about as many calls as a round of trees and DPO makes
_FAMOUS = """
They train on `train-famous`: the training questions, thinned out until a third of them need no search. In the world at
large a tenth do, and a policy trained there with HiPRAG's bonus came to search always all the same ([log](../log.md)),
so that nothing could be compared. Test questions are not thinned out."""


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
        return self.averages[metric] if metric in self.averages else fmean(self.values[metric])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a paper that share model and algorithm."""

    source: str  # number of the table
    model: str
    rows: dict[str, Row]  # by our variant
    digits: int = 1  # after the point of a difference


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
    """How large a comparison is."""

    seeds: int = 3  # each trains and evaluates every variant once
    first_seed: int = 0  # the seeds before it were run elsewhere, and their values are read from the page's file
    questions: int | None = None  # for training; None takes all 600
    test_questions: int = 1200
    max_steps: int | None = None  # None takes the number of optimizer steps that the variant declares
    iterations: int | None = None  # of tree search, for comparisons that build trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """Everything that is particular to one paper."""

    name: str  # of the command
    title: str
    kind: str  # how variants are trained: online, reasonrag, rounds, real
    policy: str  # address of the policy that every variant starts from
    chat_template: str | None = None  # of a real base model that has none
    is_served: bool = False  # whether a real model answers from a server
    variants: tuple[Variant, ...]  # in the order of tables; the policy itself, `BASE`, comes before them
    pairs: tuple[tuple[str, str], ...]  # differences (first minus second) to report
    metrics: tuple[str, ...]  # columns of tables, keys of `measures.METRICS`; the first one is the main metric
    preset: str = ""  # of `rl train`
    shared: tuple[str, ...] = ()  # settings of all variants; {half} is half of the optimizer steps
    by_kind: tuple[str, ...] = ("em", "acc", "osr", "usr", "retrievals")  # metrics to report by kind of question too
    pairs_by_kind: tuple[tuple[str, str], ...] = ()
    curves: Mapping[str, str] = field(default_factory=dict)  # titles by key of the history; bars are shown if empty
    main: str = ""  # the variant that others with a `table` are compared with
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader has to know about the paper's rows, and ours
    method: str = ""  # how the variants are trained, for the page
    sampled: tuple[str, ...] | None = None  # what is evaluated at temperature 1 too; None: everything
    scale: Scale = Scale()  # what the command does by default

    @property
    def page(self) -> str:
        """The name of the page's files."""
        return self.name if self.in_demo_world else "real-model"

    @property
    def in_demo_world(self) -> bool:
        """Whether questions and policy are invented, and compared with a paper's rows."""
        return self.kind != "real"

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
        names: dict[str, tuple[str, ...]] = {}
        for variant in self.variants:
            if variant.table:
                names[variant.table] = (*names.get(variant.table, (self.main,)), variant.name)
        return names

    def compared(self, present: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the differences to report, given what was run: `pairs`, and `main` minus each variant of a table."""
        yield from self.pairs
        for variant in self.variants:
            if variant.table and variant.name in present:
                yield self.main, variant.name

    def steps(self, scale: Scale) -> int | None:
        """Return the optimizer steps of every variant; None if each has its own number."""
        return scale.max_steps or int(rl_presets()[self.preset]["max_steps"]) if self.kind == "online" else None

    def described_method(self, steps: int | None) -> str:
        if self.kind != "online":
            return self.method.rstrip("\n")
        famous = _FAMOUS if rl_presets()[self.preset].get("split") == "train-famous" else ""
        return (
            f"Every variant is trained by `rl train --preset {self.preset}` for {steps} optimizer\n"
            f"steps from `{self.policy}`, and its last policy is evaluated even if training collapsed.{famous}"
        )


def load() -> dict[str, Paper]:
    """Return the comparisons of `comparisons.yaml` by name."""
    text = Path(__file__).with_name("comparisons.yaml").read_text(encoding="utf-8")
    papers = {}
    for name, entry in yaml.safe_load(text).items():
        special = ("variants", "claims", "curves", "scale")
        fields = {key: _frozen(value) for key, value in entry.items() if key not in special}
        papers[name] = Paper(
            name=name,
            variants=tuple(Variant(**{key: _frozen(value) for key, value in of.items()}) for of in entry["variants"]),
            claims=tuple(Claim(**claim) for claim in entry.get("claims", ())),
            curves=entry.get("curves", {}),
            scale=Scale(**entry.get("scale", {})),
            tables=published(name),
            **fields,
        )
    return papers


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


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


def _online(paper: Paper, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
    """Yield `rl train` of every variant, and `rl plan` before it if a reward needs reference plans."""
    plans = folder / "plans.parquet"
    limit = () if scale.questions is None else ("--limit", str(scale.questions))
    if any(variant.plans for variant in paper.variants):
        # `rl plan` and `rl train` draw the same questions, because both draw them by the seed.
        models = ("--policy", paper.policy, "--judge", JUDGE)
        yield Stage.writing(plans, "rl", "plan", "--preset", "demo", *models, *limit, "--set", f"seed={seed}")
    steps = paper.steps(scale) or 0
    for variant in paper.variants:
        shared = [setting.format(half=max(1, steps // 2)) for setting in paper.shared]
        settings = [*shared, *variant.settings, *NO_GUARDS]
        if scale.test_questions < _VALIDATION_QUESTIONS:  # a quick look: validation shall not dominate it
            settings.append(f"validation.limit={scale.test_questions}")
        arguments = ["rl", "train", "--preset", paper.preset, "--seed", str(seed), *limit, "--max-steps", str(steps)]
        for setting in settings:
            arguments += ["--set", setting]
        if variant.plans:
            arguments += ["--plans", str(plans)]
        yield Stage.writing(folder / variant.name, *arguments, needs=(plans,) if variant.plans else ())


def _rounds(
    paper: Paper, folder: Path, seed: int, scale: Scale, rules: Mapping[str, tuple[str, ...]] = _RULES
) -> Iterator[Stage]:
    """Yield rounds of trees, pairs and DPO for each rule, with about as many calls for each.

    A round asks about another world. In the first one all rules derive their pairs from the same trees of the base
    policy, in later ones from trees of their own. A variant is a rule and a round.
    """
    built = set()
    for name, rule in rules.items():
        policy, model = "demo", None
        is_confirmed = rule[0] == "--path-share"
        first_of = "best" if is_confirmed else "siblings"  # whose trees of the first round it shares
        share = _CONFIRMED_SHARE if is_confirmed else 1.0
        limit = ("--limit", str(round(share * (scale.questions or _QUESTIONS))))
        search = ("--iterations", str(scale.iterations or _ITERATIONS), *(() if is_confirmed else ("--confirm", "0")))
        for number in range(1, _ROUNDS + 1):
            if f"{name}-{number}" not in paper.names:
                break
            world = ("--seed", str(seed), "--lag", "0", "--world-seed", str(number))
            trees = folder / f"trees-{name if model else first_of}-{number}"
            pairs, out = folder / f"pairs-{name}-{number}", folder / f"{name}-{number}"
            if trees not in built:
                built.add(trees)
                build = ("build-tree", "--preset", "demo", *limit, *world, *search, "--policy", policy)
                yield Stage.writing(trees, *build, needs=(model,) if model else ())
            yield Stage.writing(pairs, "pairs", str(trees), *rule, needs=(trees,))
            loss = () if is_confirmed else _PAPERS_LOSS
            arguments = ("dpo", "train", "--preset", "demo", "--data", str(pairs), "--seed", str(seed), *loss)
            steps = min(_DPO_STEPS, scale.max_steps or _DPO_STEPS)
            start = ("--model", str(model)) if model else ()
            needs = (pairs, model) if model else (pairs,)
            yield Stage.writing(out, *arguments, *start, "--set", f"max_steps={steps}", needs=needs)
            policy, model = f"hf:{out}", out


def _reasonrag(paper: Paper, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
    """Yield ReasonRAG's Table 3 (arXiv:2505.14069, sec. 3.4): rounds of DPO on steps, and what competes with the first.

    SFT and DPO have the trees of `rounds`; online training has the same format and begins with the same policy.
    """
    rules = {"dpo": _RULES["best-half"], "no-path": _RULES["best-none"], "outcome": _RULES["outcome"]}
    yield from _rounds(paper, folder, seed, scale, rules)
    steps = min(_SFT_STEPS, scale.max_steps or _SFT_STEPS)
    for name, data in (("sft-1", "pairs-dpo-1"), ("rejection-1", "trees-siblings-1")):
        how = ("--examples", "trajectories") if name == "rejection-1" else ()
        train = ("sft", "train", "--preset", "demo", "--data", str(folder / data), "--seed", str(seed), *how)
        yield Stage.writing(folder / name, *train, "--set", f"max_steps={steps}", needs=(folder / data,))
    for name, settings in _REWARDED.items():
        arguments = ["rl", "train", "--preset", "demo-reasonrag", "--model", "demo", "--seed", str(seed)]
        arguments += ["--limit", str(scale.questions or _QUESTIONS)]
        arguments += ["--max-steps", str(scale.max_steps or _REWARDED_STEPS)]
        for setting in (*settings, "world_seed=1", "validation.steps=0", *NO_GUARDS):
            arguments += ["--set", setting]
        yield Stage.writing(folder / f"{name}-1", *arguments)


def training(paper: Paper, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
    """Yield the commands of one seed; a command comes after its inputs. A variant is trained into `folder / NAME`."""
    from papers.real import real_training

    trainings = {"online": _online, "reasonrag": _reasonrag, "rounds": _rounds, "real": real_training}
    return trainings[paper.kind](paper, folder, seed, scale)


def evaluation(paper: Paper, folder: Path, name: str, seed: int, scale: Scale) -> Stage:
    """Return the command that evaluates one of `names` on questions that no training of the folder sees."""
    if paper.kind == "real":
        from papers.real import real_evaluation

        return real_evaluation(paper, folder, name, seed, scale)
    spec = paper.policy if name == BASE else f"hf:{folder / name}"
    test = ("--split", "test", "--limit", str(scale.test_questions), "--temperature", "0,1", "--seed", str(seed))
    judged = [metric for metric in JUDGED if metric in paper.metrics]
    judge = ("--judge", JUDGE, "--judged", ",".join(judged)) if judged else ()
    arguments = ("eval", "--dataset", "demo", "--policy", f"{name}={spec}", *test, *judge)
    needs = () if name == BASE else (folder / name,)
    return Stage.writing(evaluation_of(folder, name), *arguments, needs=needs)


def stages(paper: Paper, out: Path, scale: Scale) -> list[Stage]:
    """Return the commands of all variants, seed after seed; a command comes after its inputs."""
    commands = []
    for seed in range(scale.first_seed, scale.seeds):
        folder = out / f"seed-{seed}"
        left = {folder / name: name for name in paper.names}
        for stage in training(paper, folder, seed, scale):
            commands.append(stage)
            if name := left.pop(stage.out, None):
                commands.append(evaluation(paper, folder, name, seed, scale))
        # What this seed does not train: the policy that all start from, and rivals that are only prompted.
        commands += [evaluation(paper, folder, name, seed, scale) for name in left.values()]
    return commands


def outputs(paper: Paper, out: Path, scale: Scale, only: Collection[str]) -> set[Path]:
    """Return what the commands of some variants write, with everything that they need; `BASE` is always among them."""
    needs = {stage.out: stage.needs for stage in stages(paper, out, scale)}
    seeds = range(scale.first_seed, scale.seeds)
    evaluated = [evaluation_of(out / f"seed-{seed}", name) for seed in seeds for name in {BASE, *only}]
    required: set[Path] = set()
    while evaluated:
        path = evaluated.pop()
        required.add(path)
        evaluated.extend(needs[path])
    return required


def evaluation_of(folder: Path, name: str) -> Path:
    """Return the evaluation of a variant within a seed's folder."""
    return folder / "eval" / name
