"""Engine and rewards to a policy: GRPO and DAPO on the rollouts that build trees, too."""
