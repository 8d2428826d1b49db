"""Comparisons of online training: the outcome alone, HiPRAG, Search-P1 and Learning when to search.

The data sets of a row of `published.csv` are in the order of the paper's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from papers.comparison import BASE, JUDGE, NO_GUARDS, Claim, Paper, Scale, Variant, published
from papers.plan import Stage
from reasonrag.online_rl.presets import RL_PRESETS

_VALIDATION_QUESTIONS = int(RL_PRESETS["demo-outcome"]["validation"]["limit"])
_FAMOUS = """
They train on `train-famous`: the training questions, thinned out until a third of them need no search. In the world at
large a tenth do, and a policy trained there with HiPRAG's bonus came to search always all the same ([log](../log.md)),
so that nothing could be compared. Test questions are not thinned out."""
FULL = "full"  # the variant that has every part of its paper's reward
_BONUS = "reward.hiprag.lambda_p={}".format
_PATHS = "reward.search_p1.{}={}".format
_WHEN = "reward.when_to_search.{}={}".format
# As many rollouts as GRPO makes: preset demo-hiprag-ppo.
_PPO = ("algorithm=ppo", "ppo.learning_rate=1e-3", "rollout.group_size=1", "rollout.questions_per_step=64")


def _sweep(table: str, name: str, meaning: str, *settings: str) -> Variant:
    """Return a variant of Search-P1 with all that `full` has and other settings, which one table asks for."""
    return Variant(name, meaning, settings, plans=True, table=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlinePaper(Paper):
    """A comparison of rewards for online training: the same number of optimizer steps on the same questions."""

    preset: str  # of `rl train`
    shared: Callable[[int], tuple[str, ...]] = lambda steps: ()  # settings of all variants, given the optimizer steps

    def method(self, steps: int | None) -> str:
        return (
            f"Every variant is trained by `rl train --preset {self.preset}` for {steps} optimizer\n"
            f"steps from `{self.policy}`, and its last policy is evaluated even if training collapsed."
            f"{_FAMOUS if RL_PRESETS[self.preset].get('split') == 'train-famous' else ''}"
        )

    def steps(self, scale: Scale) -> int:
        return scale.max_steps or int(RL_PRESETS[self.preset]["max_steps"])

    def training(self, folder: Path, seed: int, scale: Scale) -> Iterator[Stage]:
        plans = folder / "plans.parquet"
        limit = () if scale.questions is None else ("--limit", str(scale.questions))
        if any(variant.plans for variant in self.variants):
            # `rl plan` and `rl train` draw the same questions, because both draw them by the seed.
            models = ("--policy", self.policy, "--judge", JUDGE)
            yield Stage.writing(plans, "rl", "plan", "--preset", "demo", *models, *limit, "--set", f"seed={seed}")
        steps = self.steps(scale)
        for variant in self.variants:
            settings = [*self.shared(steps), *variant.settings, *NO_GUARDS]
            if scale.test_questions < _VALIDATION_QUESTIONS:  # a quick look: validation shall not dominate it
                settings.append(f"validation.limit={scale.test_questions}")
            arguments = ("rl", "train", "--preset", self.preset, "--seed", str(seed), *limit, "--max-steps", str(steps))
            for setting in settings:
                arguments += ("--set", setting)
            if variant.plans:
                arguments += ("--plans", str(plans))
            yield Stage.writing(folder / variant.name, *arguments, needs=(plans,) if variant.plans else ())


# Rows of ReasonRAG: PopQA, HotpotQA, 2WikiMulti, Bamboogle, MuSiQue; rows of Search-P1: NQ, TriviaQA, PopQA, HotpotQA,
# 2Wiki, Musique, Bamboogle.
OUTCOME = OnlinePaper(
    name="outcome",
    title="GRPO on outcomes in the demo world",
    preset="demo-outcome",
    policy="demo:search_r1",
    variants=(Variant("grpo", "GRPO on exact match only"),),
    pairs=(("grpo", BASE),),
    metrics=("em", "f1", "acc", "retrievals", "steps", "format_rate"),
    curves={
        "eval_em": "held-out EM",
        "eval_retrievals": "held-out searches a question",
        "rollout/reward": "reward of rollouts",
        "rollout/format_rate": "rollouts in form",
        "entropy": "entropy, nats a token",
    },
    tables=published("outcome"),
    notes=(
        "No paper reports exactly this pair; the closest rows are shown. Search-o1 is a prompted agent on the "
        "model that Search-R1 trains.",
    ),
)

# Rows of the paper: Table 2's averages, and Tables 4 to 6 by data set: NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, Musique,
# Bamboogle; in percent.
HIPRAG = OnlinePaper(
    name="hiprag",
    title="HiPRAG's ablations in the demo world",
    preset="demo-hiprag",
    policy="demo:hiprag",
    variants=(
        Variant("lp-0", "no bonus for steps: outcome and format only", (_BONUS(0),)),
        Variant("lp-0.2", "bonus 0.2", (_BONUS(0.2),)),
        Variant("lp-0.4", "bonus 0.4, the paper's choice", (_BONUS(0.4),)),
        Variant("lp-0.6", "bonus 0.6", (_BONUS(0.6),)),
        Variant(
            "over-only",
            "bonus 0.4, lost only by needless searches",
            (_BONUS(0.4), "reward.hiprag.under_search=false"),
            blind=("rollout/usr",),
        ),
        Variant(
            "under-only",
            "bonus 0.4, lost only by missing searches",
            (_BONUS(0.4), "reward.hiprag.over_search=false"),
            blind=("rollout/osr",),
        ),
        Variant("ppo", "bonus 0.4, trained with PPO", (_BONUS(0.4), *_PPO), table="table-2"),
        Variant(
            "beta-grpo",
            "exact match, which does not count after a search of which some token was less likely than 0.4",
            ("reward.name=outcome", "reward.outcome.search_confidence=0.4"),
            blind=("rollout/osr", "rollout/usr", "reward/bonus"),
            table="table-1",
        ),
    ),
    main="lp-0.4",
    pairs=(
        *product(("lp-0.2", "lp-0.4", "lp-0.6", "over-only", "under-only"), ("lp-0",)),
        *product(("lp-0.4",), ("lp-0.2", "lp-0.6", "over-only", "under-only")),
        *product(("lp-0", "lp-0.2", "lp-0.4", "lp-0.6", "over-only", "under-only"), (BASE,)),
    ),
    metrics=("acc", "em", "osr", "usr", "retrievals", "format_rate"),
    curves={
        "eval_acc": "held-out CEM",
        "eval_em": "held-out EM",
        "eval_retrievals": "held-out searches a question",
        "eval_osr": "held-out OSR",
        "eval_usr": "held-out USR",
        "rollout/search_share": "searches among the steps of rollouts",
        "rollout/osr": "OSR of rollouts looked at",
        "rollout/usr": "USR of rollouts looked at",
        "rollout/reward": "reward of rollouts",
        "reward/answer": "A of rollouts",
        "reward/format": "F of rollouts",
        "reward/bonus": "bonus of rollouts",
    },
    tables=published("hiprag"),
    notes=(
        "The paper's `over-search only` row of Table 5 (OSR) repeats its `HiPRAG` row on all data sets, and both have "
        "the same average: their difference has no sign.",
        "Section 5.2 and Table 2 differ in some numbers (2.3 % OSR for 7B with GRPO; 39.1 % USR for 3B with "
        "PPO). Those of Table 2 are used.",
        "If a training run collapses, the paper evaluates its last stable checkpoint; here the last policy is "
        "always evaluated.",
    ),
)

# Rows of the paper: NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, MuSiQue, Bamboogle; in percent, without its internal AD-QA.
SEARCH_P1 = OnlinePaper(
    name="search-p1",
    title="Search-P1's ablations in the demo world",
    preset="demo-search-p1",
    policy="demo:search_p1",
    variants=(
        Variant(FULL, "both tracks, soft format scoring, soft outcome scoring", plans=True),
        Variant("no-reference", "without the reference track (Eq. 7)", (_PATHS("reference_track", "false"),)),
        Variant("no-self", "without the policy's own track (Eq. 6)", (_PATHS("self_track", "false"),), plans=True),
        Variant("format-strict", "broken format earns nothing", (_PATHS("format", "strict"),), plans=True),
        Variant("format-none", "no format reward", (_PATHS("format", "none"),), plans=True),
        Variant("outcome-binary", "a wrong answer earns no outcome", (_PATHS("outcome", "binary"),), plans=True),
        Variant("outcome", "exact match only, in the same format", ("reward.name=outcome",), blind=("reward/format",)),
        _sweep("table-3", "ppo", "trained with PPO", *_PPO),
        _sweep("table-11", "path-0.2", "weight of the path 0.2, not 0.3", _PATHS("lambda_p", 0.2)),
        _sweep("table-11", "path-0.4", "weight of the path 0.4", _PATHS("lambda_p", 0.4)),
        _sweep("table-12", "outcome-0.8", "weight of the outcome 0.8, not 0.6", _PATHS("lambda_a", 0.8)),
        _sweep("table-12", "outcome-1", "weight of the outcome 1", _PATHS("lambda_a", 1)),
        # People shared 85 to 93 and 78 to 88 % of the verdicts of these two models (Table 4).
        _sweep("table-13", "judge-0.1", "a judge wrong in a tenth, for Qwen3-32B", "judge.spec=demo-judge:0:0.1"),
        _sweep("table-13", "judge-0.2", "a judge wrong in a fifth, for Qwen3-8B", "judge.spec=demo-judge:0:0.2"),
    ),
    main=FULL,
    pairs=(
        *product((FULL,), ("outcome", "no-reference", "no-self", "format-strict", "format-none", "outcome-binary")),
        ("no-self", "no-reference"),
        *product(("no-reference", "no-self"), ("outcome",)),
        *product((FULL, "outcome"), (BASE,)),
    ),
    metrics=("acc", "em", "retrievals", "steps", "format_rate"),
    curves={
        "eval_em": "held-out EM",
        "eval_retrievals": "held-out searches a question",
        "eval_format_rate": "held-out, in form",
        "rollout/reward": "reward of rollouts",
        "reward/path": "R_path of rollouts",
        "reward/s_self": "S_self of rollouts",
        "reward/s_ref": "S_ref of rollouts",
        "reward/outcome": "R_outcome of rollouts",
        "reward/format": "R_format of rollouts",
    },
    tables=published("search-p1"),
    claims=(
        Claim(FULL, "format-strict", "acc", 1, "Fig. 3, sec. 4.3.1"),
        Claim(FULL, "format-none", "acc", 1, "Fig. 3, sec. 4.3.1"),
    ),
    notes=(
        "Table 2 has 42.0 where Table 8 has 42.1 for 7B without the reference track; Table 8's number is used.",
        "Figure 3 shows curves without numbers: soft format scoring rises faster and ends higher than strict and none.",
        "The paper's accuracy asks whether a golden answer is contained in the prediction: our ACC. It does not report "
        "how many searches each variant makes.",
    ),
)

# Rows of the paper: LasJ in [0, 1] and RC on NQ, PopQA, TriviaQA, HotpotQA, MuSiQue, 2WIKI, Bamboogle.
WHEN_TO_SEARCH = OnlinePaper(
    name="when-to-search",
    title="The ablations of Learning when to search in the demo world",
    preset="demo-when-to-search",
    policy="demo:when_to_search",
    variants=(
        Variant(FULL, "stage one in the first half, stage two in the second half"),
        Variant("no-stage-one", "stage two from the first step on", (_WHEN("stages", "two"),)),
        Variant("no-stage-two", "stage one to the end", (_WHEN("stages", "one"),)),
        Variant("no-r-s", "no reward for queries", (_WHEN("no_r_s", "true"),)),
        Variant("unified", "one reward without stages", (_WHEN("stages", "unified"),), table="table-2"),
        Variant("no-r-a", "no reward for the answer", (_WHEN("no_r_a", "true"),), table="table-4"),
    ),
    main=FULL,
    pairs=(
        *product((FULL,), ("no-stage-one", "no-stage-two", "no-r-s")),
        ("no-stage-two", "no-stage-one"),
        *product((FULL, "no-stage-one", "no-stage-two", "no-r-s"), (BASE,)),
    ),
    metrics=("em", "lasj", "f1", "acc", "retrievals", "format_rate"),
    curves={
        "eval_em": "held-out EM",
        "eval_retrievals": "held-out searches a question",
        "rollout/retrievals": "searches of rollouts",
        "rollout/reward": "reward of rollouts",
        "reward/r_f": "r_f of rollouts",
        "reward/r_s": "r_s of rollouts",
        "reward/r_a": "r_a of rollouts",
        "reward/avg_sim": "similarity of queries",
    },
    tables=published("when-to-search"),
    notes=(
        "Table 4 prints no averages; the means over its seven data sets are compared.",
        "Table 1 prints RC 1.44 on Bamboogle for the same policy where Table 4 prints 1.14.",
    ),
    # Stage two begins in the middle of the training run.
    shared=lambda steps: (_WHEN("switch_step", max(1, steps // 2)),),
)
