"""Trees to pairs, pairs to a policy."""
