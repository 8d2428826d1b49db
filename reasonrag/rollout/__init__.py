"""The one loop that every stage uses: tree search, inference and online RL."""

from reasonrag.rollout.engine import Engine, derive_seed

__all__ = ["Engine", "derive_seed"]
