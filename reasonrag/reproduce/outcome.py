"""GRPO on outcomes alone, as Search-R1 trains (arXiv:2503.09516): what every process reward is compared with."""

from __future__ import annotations

from reasonrag.reproduce.ablation import BASE, Paper, Row, Table, Variant

# EM and F1 of arXiv:2505.14069, Table 3: PopQA, HotpotQA, 2WikiMulti, Bamboogle, MuSiQue.
_REASONRAG = {
    BASE: Row(
        "ReasonRAG (Base)",
        {"em": (35.6, 23.7, 15.2, 28.0, 7.7), "f1": (42.7, 38.2, 28.9, 38.7, 15.4)},
        {"em": 22.0, "f1": 32.8},
    ),
    "grpo": Row(
        "ReasonRAG (RL-ORL): 5k queries",
        {"em": (23.0, 28.1, 32.0, 17.5, 5.9), "f1": (30.9, 32.6, 43.8, 24.1, 13.1)},
        {"em": 21.3, "f1": 28.9},
    ),
}
_MORE_QUESTIONS = Row(
    "ReasonRAG (RL-ORL): 10k queries",
    {"em": (39.5, 36.7, 40.5, 30.7, 12.6), "f1": (45.7, 46.7, 47.2, 40.6, 19.5)},
    {"em": 32.0, "f1": 39.9},
)
# NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, Musique, Bamboogle.
_SEARCH_P1 = {
    BASE: Row("Search-o1", {"acc": (15.1, 44.3, 13.1, 18.7, 17.6, 5.8, 29.6)}, {"acc": 20.6}),
    "grpo": Row("Search-R1", {"acc": (42.9, 62.3, 42.7, 38.6, 34.6, 16.2, 40.0)}, {"acc": 39.6}),
}

PAPER = Paper(
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
        Table("ReasonRAG, Table 3", "Qwen2.5-7B-Instruct, 5k questions", _REASONRAG),
        Table(
            "ReasonRAG, Table 3",
            "Qwen2.5-7B-Instruct, 10k questions",
            {BASE: _REASONRAG[BASE], "grpo": _MORE_QUESTIONS},
        ),
        Table("Search-P1, Table 1", "Qwen2.5-7B-Instruct", _SEARCH_P1),
    ),
    notes=(
        "None of the papers trains this very pair; the closest rows are shown. Search-o1 is a prompted agent on the "
        "model that Search-R1 trains.",
    ),
)
