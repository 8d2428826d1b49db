"""The ablations of Learning when to search (Table 4): both stages of the answer reward, and the queries' reward."""

from __future__ import annotations

from itertools import product

from reasonrag.reproduce.paper import BASE, OnlinePaper, Variant, published

FULL = "full"
_REWARD = "reward.when_to_search.{}={}".format

# Rows of the paper: LasJ in [0, 1] and RC on NQ, PopQA, TriviaQA, HotpotQA, MuSiQue, 2WIKI, Bamboogle.


def _half_way(steps: int) -> tuple[str, ...]:
    """Return the setting by which stage two begins in the middle of the training run."""
    return (_REWARD("switch_step", max(1, steps // 2)),)


PAPER = OnlinePaper(
    name="when-to-search",
    title="The ablations of Learning when to search in the demo world",
    preset="demo-when-to-search",
    policy="demo:when_to_search",
    variants=(
        Variant(FULL, "stage one in the first half, stage two in the second half"),
        Variant("no-stage-one", "stage two from the first step on", (_REWARD("no_stage_one", "true"),)),
        Variant("no-stage-two", "stage one to the end", (_REWARD("no_stage_two", "true"),)),
        Variant("no-r-s", "no reward for queries", (_REWARD("no_r_s", "true"),)),
    ),
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
        "Its row without r_a is not repeated: without r_a, right and wrong answers earn the same.",
        "Table 1 prints RC 1.44 on Bamboogle for the same policy where Table 4 prints 1.14.",
    ),
    shared=_half_way,
)
