"""Tree to rewards: Shortest Path Reward Estimation of nodes and decisions, and the evaluators that value new nodes."""
