"""GRPO on outcomes alone, as Search-R1 trains (arXiv:2503.09516): the baseline of every process reward."""

from __future__ import annotations

from reasonrag.reproduce.paper import BASE, OnlinePaper, Row, Table, Variant
from reasonrag.reproduce.reasonrag import BASE_ROW, OUTCOME_5K, OUTCOME_10K

# NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, Musique, Bamboogle.
_SEARCH_P1 = {
    BASE: Row("Search-o1", {"acc": (15.1, 44.3, 13.1, 18.7, 17.6, 5.8, 29.6)}, {"acc": 20.6}),
    "grpo": Row("Search-R1", {"acc": (42.9, 62.3, 42.7, 38.6, 34.6, 16.2, 40.0)}, {"acc": 39.6}),
}

PAPER = OnlinePaper(
    name="outcome",
    title="GRPO on outcomes in the demo world",
    preset="demo-outcome",
    policy="demo:search_r1",
    variants=(Variant("grpo", "GRPO on exact match alone"),),
    pairs=(("grpo", BASE),),
    metrics=("em", "f1", "acc", "retrievals", "steps", "format_rate"),
    curves={
        "eval_em": "held-out EM",
        "eval_retrievals": "held-out searches a question",
        "rollout/reward": "reward of rollouts",
        "rollout/format_rate": "rollouts in form",
        "entropy": "entropy, nats a token",
    },
    tables=(
        Table("ReasonRAG, Table 3", "Qwen2.5-7B-Instruct, 5k questions", {BASE: BASE_ROW, "grpo": OUTCOME_5K}),
        Table("ReasonRAG, Table 3", "Qwen2.5-7B-Instruct, 10k questions", {BASE: BASE_ROW, "grpo": OUTCOME_10K}),
        Table("Search-P1, Table 1", "Qwen2.5-7B-Instruct", _SEARCH_P1),
    ),
    notes=(
        "None of the papers trains this very pair; the closest rows are shown. Search-o1 is a prompted agent on the "
        "model that Search-R1 trains.",
    ),
)
