"""Tree to rewards: Shortest Path Reward Estimation of every node, and the evaluators that value new nodes."""

from reasonrag.spre.estimate import JudgeEvaluator, RolloutEvaluator, Weighting, means_below, node_rewards

__all__ = ["JudgeEvaluator", "RolloutEvaluator", "Weighting", "means_below", "node_rewards"]
