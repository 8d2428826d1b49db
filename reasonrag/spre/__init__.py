"""Shortest Path Reward Estimation: unfinished trajectory to value."""

from reasonrag.spre.estimate import Weighting, node_rewards, spre, trajectory_reward
from reasonrag.spre.evaluator import JudgeEvaluator, RolloutEvaluator

__all__ = ["JudgeEvaluator", "RolloutEvaluator", "Weighting", "node_rewards", "spre", "trajectory_reward"]
