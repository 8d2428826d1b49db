"""Other people's trainers and agents: the rollout engine as an environment server, and a proxy that records agents."""
