"""ReasonRAG's Table 3 in the demo world (arXiv:2505.14069, sec. 3.4): which training signal helps a policy most.

Every variant starts from the same policy. Trees valued by rollouts and by a judge get nearly the same number of model
calls (verdicts included; the page says how many); the variants without the shortest-path term and with outcomes alone
use the rollout trees again. How many optimizer steps each variant takes was chosen on the dev split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reasonrag.reproduce.stages import Stage

BASE = "base"
MAIN = "dpo-rollout"
# Name to what it is, in the order of tables.
VARIANTS = {
    BASE: "the policy before any of it",
    "sft": "SFT on the chosen steps",
    "dpo-outcome": "DPO on whole trajectories, by outcome alone",
    "dpo-alpha1": "DPO on steps, alpha 1: no shortest-path term",
    "dpo-judge": "DPO on steps, search valued by a judge (Eq. 6), pairs by SPRE",
    "dpo-judge-reward": "DPO on steps, search valued by a judge, pairs by its values too",
    MAIN: "DPO on steps, search valued by rollouts (Eq. 1), pairs by SPRE",
}
# Optimizer steps of each, chosen on the dev split.
STEPS = {"sft": 180, "dpo-outcome": 75, "dpo-alpha1": 110, "dpo-judge": 75, "dpo-judge-reward": 110, MAIN: 150}
# Calls of an iteration with two rollouts, from 5.7 to 6.0 as measured: what a tree valued by a judge may spend.
_CALLS_AN_ITERATION = 5.75
# Which difference is looked at, and the same one between the rows of the paper's Table 3 (average EM, F1).
TABLE_3 = {"base": (22.0, 32.8), "sft": (23.9, 32.0), "orl": (21.3, 28.9), "prl": (34.5, 42.3)}
COMPARISONS = (
    (MAIN, BASE, "prl", "base"),
    ("dpo-judge", BASE, "prl", "base"),
    ("dpo-judge-reward", BASE, "prl", "base"),
    ("sft", BASE, "sft", "base"),
    ("dpo-outcome", BASE, "orl", "base"),
    (MAIN, "sft", "prl", "sft"),
    (MAIN, "dpo-outcome", "prl", "orl"),
    (MAIN, "dpo-alpha1", None, None),
    (MAIN, "dpo-judge", None, None),
    (MAIN, "dpo-judge-reward", None, None),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the comparison is.

    Args:
        seeds: of trees, training and sampling; everything is done once for each.
        questions: of the train split that trees are built for.
        iterations: of a tree valued by rollouts; one valued by a judge gets as many calls.
        test_questions: held out; 1,200 are all.
        max_steps: of each training at most, to see it run; None takes as many as were chosen.
        only: these variants, and the policy that they start from; all of them if none is named.
    """

    seeds: int = 3
    questions: int = 600
    iterations: int = 8
    test_questions: int = 1200
    max_steps: int | None = None
    only: tuple[str, ...] = ()

    @property
    def variants(self) -> list[str]:
        """Those that are compared, in the order of tables."""
        return [name for name in VARIANTS if name == BASE or not self.only or name in self.only]


def stages(out: Path, scale: Scale) -> list[Stage]:
    """The commands, in order."""
    return [stage for seed in range(scale.seeds) for stage in _of_seed(out / f"seed-{seed}", seed, scale)]


def _of_seed(folder: Path, seed: int, scale: Scale) -> list[Stage]:
    rollout, judge = folder / "trees-rollout", folder / "trees-judge"
    data = {
        "sft": rollout,
        "dpo-outcome": folder / "pairs-outcome",
        "dpo-alpha1": folder / "pairs-alpha1",
        "dpo-judge": judge,
        "dpo-judge-reward": folder / "pairs-judge-reward",
        MAIN: rollout,
    }
    trees = ("build-tree", "--preset", "demo", "--limit", str(scale.questions), "--seed", str(seed))
    budget = ("--iterations", "64", "--max-calls", str(round(scale.iterations * _CALLS_AN_ITERATION)))
    found = [
        _stage(rollout, *trees, "--iterations", str(scale.iterations)),
        _stage(judge, *trees, *budget, "--value", "judge", "--judge", "demo-judge"),
        _stage(data["dpo-alpha1"], "pairs", str(rollout), "--alpha", "1"),
        _stage(data["dpo-judge-reward"], "pairs", str(judge), "--pair-reward", "judge"),
        _stage(data["dpo-outcome"], "pairs", str(rollout), "--level", "trajectory"),
    ]
    data = {name: source for name, source in data.items() if name in scale.variants}
    read = {str(source) for source in data.values()}
    read |= {stage.arguments[1] for stage in found if stage.arguments[0] == "pairs" and str(stage.out) in read}
    found = [stage for stage in found if str(stage.out) in read]
    for name, source in data.items():
        kind = "sft" if name == "sft" else "dpo"
        dose = ("--seed", str(seed), "--set", f"max_steps={min(STEPS[name], scale.max_steps or STEPS[name])}")
        train = (kind, "train", "--preset", "demo", "--data", str(source), *dose)
        found.append(_stage(folder / name, *train))
    policies = [f"{BASE}=demo", *(f"{name}=hf:{folder / name}" for name in data)]
    named = [argument for policy in policies for argument in ("--policy", policy)]
    test = ("--split", "test", "--limit", str(scale.test_questions), "--temperature", "0,1", "--seed", str(seed))
    return [*found, _stage(folder / "eval", "eval", "--preset", "demo", *named, *test)]


def _stage(out: Path, *arguments: str) -> Stage:
    return Stage((*arguments, "--out", str(out)), out)
