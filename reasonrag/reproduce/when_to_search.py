"""The ablations of Learning when to search (Table 4): both stages of the answer reward, and the queries' reward."""

from __future__ import annotations

from reasonrag.reproduce.paper import BASE, OnlinePaper, Variant, published

FULL = "full"
_REWARD = "reward.when_to_search.{}={}".format

# Rows of the paper: LasJ in [0, 1] and RC on NQ, PopQA, TriviaQA, HotpotQA, MuSiQue, 2WIKI, Bamboogle.


def _half_way(steps: int) -> tuple[str, ...]:
    """Stage two begins in the middle of the training."""
    return (_REWARD("switch_step", max(1, steps // 2)),)


PAPER = OnlinePaper(
    name="when-to-search",
    title="The ablations of Learning when to search in the demo world",
    preset="demo-when-to-search",
    policy="demo:when_to_search",
    variants=(
        Variant(FULL, "stage one, then stage two from the middle of the training on"),
        Variant("no-stage-one", "stage two from the first step on", (_REWARD("no_stage_one", "true"),)),
        Variant("no-stage-two", "stage one to the end", (_REWARD("no_stage_two", "true"),)),
        Variant("no-r-s", "queries are not looked at", (_REWARD("no_r_s", "true"),)),
    ),
    pairs=(
        *((FULL, name) for name in ("no-stage-one", "no-stage-two", "no-r-s")),
        ("no-stage-two", "no-stage-one"),
        *((name, BASE) for name in (FULL, "no-stage-one", "no-stage-two", "no-r-s")),
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
        "Its row without r_a is not repeated: nothing would tell a right answer from a wrong one.",
        "Table 1 prints RC 1.44 on Bamboogle for the same policy where Table 4 prints 1.14.",
    ),
    shared=_half_way,
)
