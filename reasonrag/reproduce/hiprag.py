"""HiPRAG's ablations (arXiv:2510.07794, Tables 2 and 4 to 6): how large the bonus is, and which detector pays it."""

from __future__ import annotations

from itertools import product

from reasonrag.reproduce.paper import BASE, OnlinePaper, Variant, published

_BONUS = "reward.hiprag.lambda_p={}".format

# Rows of the paper: Table 2's averages, and Tables 4 to 6 by data set: NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, Musique,
# Bamboogle; in percent.
PAPER = OnlinePaper(
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
    ),
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
