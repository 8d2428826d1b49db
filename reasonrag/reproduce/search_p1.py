"""Search-P1's ablations (Tables 1, 2, 6, 8 and 10, Fig. 3): both tracks, the form's reward, soft outcomes."""

from __future__ import annotations

from itertools import product

from reasonrag.reproduce.paper import BASE, Claim, OnlinePaper, Variant, published

FULL = "full"
_REWARD = "reward.search_p1.{}={}".format

# Rows of the paper: NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, MuSiQue, Bamboogle; in percent, without its internal AD-QA.
PAPER = OnlinePaper(
    name="search-p1",
    title="Search-P1's ablations in the demo world",
    preset="demo-search-p1",
    policy="demo:search_p1",
    variants=(
        Variant(FULL, "both tracks, soft format scoring, soft outcome scoring", plans=True),
        Variant("no-reference", "without the reference track (Eq. 7)", (_REWARD("reference_track", "false"),)),
        Variant("no-self", "without the policy's own track (Eq. 6)", (_REWARD("self_track", "false"),), plans=True),
        Variant(
            "format-strict",
            "broken format earns nothing",
            (_REWARD("format", "strict"),),
            plans=True,
        ),
        Variant("format-none", "no format reward", (_REWARD("format", "none"),), plans=True),
        Variant("outcome-binary", "a wrong answer earns no outcome", (_REWARD("outcome", "binary"),), plans=True),
        Variant("outcome", "exact match only, in the same format", ("reward.name=outcome",), blind=("reward/format",)),
    ),
    pairs=(
        *product((FULL,), ("outcome", "no-reference", "no-self")),
        *product((FULL,), ("format-strict", "format-none", "outcome-binary")),
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
