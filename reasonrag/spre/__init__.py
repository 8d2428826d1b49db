"""Tree to rewards: Shortest Path Reward Estimation of nodes and decisions, and the evaluators that value new nodes."""

from reasonrag.spre.decisions import (
    Decision,
    PairReward,
    confidence,
    content_of,
    decisions_of,
    full_prompt,
    standard_error,
    step_end,
)
from reasonrag.spre.estimate import JudgeEvaluator, PRMEvaluator, RolloutEvaluator, Weighting, node_rewards

__all__ = [
    "Decision",
    "JudgeEvaluator",
    "PRMEvaluator",
    "PairReward",
    "RolloutEvaluator",
    "Weighting",
    "confidence",
    "content_of",
    "decisions_of",
    "full_prompt",
    "node_rewards",
    "standard_error",
    "step_end",
]
