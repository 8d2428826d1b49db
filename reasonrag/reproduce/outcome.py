"""GRPO on outcomes alone, as Search-R1 trains (arXiv:2503.09516): the baseline of every process reward."""

from __future__ import annotations

from reasonrag.reproduce.paper import BASE, OnlinePaper, Variant, published

# Rows of ReasonRAG: PopQA, HotpotQA, 2WikiMulti, Bamboogle, MuSiQue; rows of Search-P1: NQ, TriviaQA, PopQA, HotpotQA,
# 2Wiki, Musique, Bamboogle.
PAPER = OnlinePaper(
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
