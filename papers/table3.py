"""ReasonRAG's Table 3 in the demo world (arXiv:2505.14069, sec. 3.4): which training signal helps a policy most; and
what an online stage adds to the policy that DPO made, in the same format.

Trees valued by rollouts and trees valued by a judge get about the same number of model calls, verdicts included. The
variants without the shortest-path term and with outcomes alone reuse the trees that are valued by rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from papers.comparison import BASE, JUDGE, NO_GUARDS, Paper, Scale, Variant, published
from papers.plan import Stage
from reasonrag.online_rl.presets import RL_PRESETS

MAIN = "dpo-rollout"
ONLINE_OUTCOME = "online-outcome"
DPO = "dpo"
_QUESTIONS = 600
_ITERATIONS = 8
# Calls of one iteration with two rollouts, measured as 5.7 to 6.0: the budget of a tree that is valued by a judge.
_CALLS_PER_ITERATION = 5.75
# Optimizer steps of each variant, chosen on the dev split.
_STEPS = {"sft": 180, "dpo-outcome": 75, "dpo-alpha1": 110, "dpo-judge": 75, "dpo-judge-reward": 110, MAIN: 150}
# Rows of the paper: PopQA, HotpotQA, 2WikiMulti, Bamboogle, MuSiQue.


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePaper(Paper):
    """Table 3: SFT and DPO on trees that are built once per seed."""

    builds_trees: bool = True

    def method(self, steps: int | None) -> str:
        return (
            f"Every variant is trained from `{self.policy}` on trees of the demo world.\n"
            f"Selection effort, all on the dev split: for `{MAIN}` 14 settings of learning rate, steps, beta,\n"
            "weights, an SFT term, LoRA, the end-of-turn token and the shape of trees were tried ([log](../log.md));\n"
            f"for `sft` learning rates and epochs; for the others the optimizer steps alone, at the learning rate of\n"
            f"`{MAIN}`."
        )

    def steps(self, scale: Scale) -> None:
        return None

    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        rollout, judge = folder / "trees-rollout", folder / "trees-judge"
        outcome, alpha1, judge_reward = (folder / f"pairs-{name}" for name in ("outcome", "alpha1", "judge-reward"))
        iterations = scale.iterations or _ITERATIONS
        limit = ("--limit", str(scale.questions or _QUESTIONS))
        trees = ("build-tree", "--preset", "demo", *limit, "--seed", str(seed), "--lag", "0")
        budget = ("--iterations", "64", "--max-calls", str(round(iterations * _CALLS_PER_ITERATION)))
        yield Stage.writing(rollout, *trees, "--iterations", str(iterations))
        yield Stage.writing(judge, *trees, *budget, "--value", "judge", "--judge", JUDGE)
        yield Stage.writing(alpha1, "pairs", str(rollout), "--alpha", "1", needs=(rollout,))
        yield Stage.writing(judge_reward, "pairs", str(judge), "--pair-reward", "judge", needs=(judge,))
        yield Stage.writing(outcome, "pairs", str(rollout), "--level", "trajectory", needs=(rollout,))
        data = {
            "sft": rollout,
            "dpo-outcome": outcome,
            "dpo-alpha1": alpha1,
            "dpo-judge": judge,
            "dpo-judge-reward": judge_reward,
            MAIN: rollout,
        }
        for name, source in data.items():
            steps = min(_STEPS[name], scale.max_steps or _STEPS[name])
            train = ("sft" if name == "sft" else "dpo", "train", "--preset", "demo", "--data", str(source))
            settings = ("--seed", str(seed), "--set", f"max_steps={steps}")
            yield Stage.writing(folder / name, *train, *settings, needs=(source,))
        yield _online(folder / ONLINE_OUTCOME, "demo-reasonrag", "demo", seed, scale, "reward.name=outcome")


def _online(out: Path, preset: str, model: str, seed: int, scale: Scale, *settings: str) -> Stage:
    """Return the command of an online stage; a model that is a folder is what it needs."""
    steps = scale.max_steps or int(RL_PRESETS[preset]["max_steps"])
    arguments = ["rl", "train", "--preset", preset, "--model", model, "--seed", str(seed)]
    arguments += ["--limit", str(scale.questions or _QUESTIONS), "--max-steps", str(steps)]
    for setting in (*settings, *NO_GUARDS):
        arguments += ["--set", setting]
    return Stage.writing(out, *arguments, needs=() if model == "demo" else (Path(model),))


REASONRAG = OfflinePaper(
    name="reasonrag",
    title="ReasonRAG's Table 3 in the demo world",
    policy="demo",
    variants=(
        Variant("sft", "SFT on the chosen steps"),
        Variant("dpo-outcome", "DPO on whole trajectories, by outcome alone"),
        Variant("dpo-alpha1", "DPO on steps, alpha 1: no shortest-path term"),
        Variant("dpo-judge", "DPO on steps, search valued by a judge (Eq. 6), pairs by SPRE"),
        Variant("dpo-judge-reward", "DPO on steps, search valued by a judge, pairs by its values too"),
        Variant(MAIN, "DPO on steps, search valued by rollouts (Eq. 1), pairs by SPRE; alpha 0.9"),
        Variant(ONLINE_OUTCOME, "GRPO on exact match, a row per step: the paper's RL-ORL", table="fig-5"),
    ),
    main=MAIN,
    pairs=(
        *product((MAIN, "dpo-judge", "dpo-judge-reward", "sft", "dpo-outcome"), (BASE,)),
        *product((MAIN,), ("sft", "dpo-outcome", "dpo-alpha1", "dpo-judge", "dpo-judge-reward")),
    ),
    metrics=("em", "f1", "acc", "retrievals", "steps", "forced", "format_rate", "needless", "early"),
    by_kind=("em", "retrievals", "steps", "needless", "early"),
    pairs_by_kind=((MAIN, "dpo-alpha1"),),
    tables=published("reasonrag"),
    notes=(
        "The paper's `RL-PRL` row is compared with each of our variants of DPO on steps, and its `RL-ORL` row with 5k "
        "questions with DPO on outcomes.",
        "`dpo-alpha1` is trained on pairs of the same trees as `dpo-rollout`: their difference is the effect of the "
        "shortest-path term.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineAfterDPO(Paper):
    """An online stage that goes on from the policy of DPO; all variants but `DPO` itself are trained that way."""

    preset: str  # of `rl train`
    builds_trees: bool = True

    def method(self, steps: int | None) -> str:
        return (
            f"`{DPO}` is trained from `{self.policy}` as `{MAIN}` of Table 3 is; every other variant goes on from\n"
            f"that policy with `rl train --preset {self.preset}`, in the same format: a training row per step. The\n"
            "last policy is evaluated even if training collapsed. Selection effort: two learning rates, one seed, 100\n"
            "questions of the dev split. 1e-4 (EM .96 greedy and .77 sampled, in form 1.00 and .97) was taken before\n"
            "3e-4 (.95 and .79, in form .96 and .93): no difference in accuracy that shows, and it keeps the form."
        )

    def steps(self, scale: Scale) -> None:
        return None

    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        trees, policy = folder / "trees", folder / DPO
        limit = ("--limit", str(scale.questions or _QUESTIONS))
        iterations = ("--iterations", str(scale.iterations or _ITERATIONS))
        yield Stage.writing(
            trees, "build-tree", "--preset", "demo", *limit, "--seed", str(seed), "--lag", "0", *iterations
        )
        steps = min(_STEPS[MAIN], scale.max_steps or _STEPS[MAIN])
        dpo = ("dpo", "train", "--preset", "demo", "--data", str(trees), "--seed", str(seed))
        yield Stage.writing(policy, *dpo, "--set", f"max_steps={steps}", needs=(trees,))
        for variant in self.variants:
            if variant.name != DPO:
                yield _online(folder / variant.name, self.preset, str(policy), seed, scale, *variant.settings)


_CURVES = {
    "eval_em": "held-out EM",
    "eval_retrievals": "held-out searches a question",
    "rollout/em": "EM of rollouts",
    "rollout/retrievals": "searches of rollouts",
    "rollout/steps": "steps of rollouts",
    "entropy": "entropy, nats a token",
}
ONLINE = OnlineAfterDPO(
    name="online",
    title="The online stage after DPO in the demo world",
    preset="demo-reasonrag",
    policy="demo",
    variants=(
        Variant(DPO, "DPO on steps, as in Table 3", blind=tuple(_CURVES)),
        Variant("online-outcome", "then GRPO on steps, rewarded by exact match", ("reward.name=outcome",)),
        Variant("online-spre", "then GRPO on steps, rewarded by SPRE of the trajectory (Eq. 1, k = 1)"),
        Variant("online-spre-step", "the same, with SPRE of the step as its credit", ("credit=step",)),
    ),
    pairs=(
        *product((DPO, "online-outcome", "online-spre", "online-spre-step"), (BASE,)),
        *product(("online-outcome", "online-spre", "online-spre-step"), (DPO,)),
        ("online-spre", "online-outcome"),
        ("online-spre-step", "online-spre"),
    ),
    metrics=("em", "f1", "acc", "retrievals", "steps", "forced", "format_rate"),
    curves=_CURVES,
    notes=("The paper has no online stage after DPO; there is no row to compare with.",),
)
