"""Trees to preference pairs, pairs to token ids, token ids to a policy: DPO and SFT."""
