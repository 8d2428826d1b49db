"""Question to tree: Monte Carlo tree search over the steps of a policy."""
