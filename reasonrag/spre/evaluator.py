"""Values for new nodes: rollouts scored by SPRE, or one judge call."""

from __future__ import annotations

from reasonrag.core.errors import JudgeError
from reasonrag.core.types import Trajectory
from reasonrag.mcts.search import Evaluation
from reasonrag.rewards.judge import ProcessJudge
from reasonrag.rollout import Engine, derive_seed
from reasonrag.spre.estimate import trajectory_reward


class RolloutEvaluator:
    """`k` completions of the trajectory, valued by SPRE (arXiv:2505.14069, eq. 1).

    Completions that end without an answer have no correctness and are left out of the mean.
    """

    def __init__(self, engine: Engine, *, k: int = 2, alpha: float = 0.9) -> None:
        self.engine = engine
        self.k = k
        self.alpha = alpha

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        """The mean reward of `k` completions; a trajectory that has ended is its own and needs no call."""
        if trajectory.stop_reason is not None:
            return Evaluation(trajectory_reward(trajectory, alpha=self.alpha))
        seeds = [derive_seed(seed, i) for i in range(self.k)]
        rollouts = await self.engine.run([trajectory] * self.k, seeds=seeds)
        values = [trajectory_reward(r, alpha=self.alpha) for r in rollouts]
        known = [v for v in values if v is not None]
        return Evaluation(sum(known) / len(known) if known else None, tuple(rollouts), tuple(values))


class JudgeEvaluator:
    """One judge call per node, with the golden answers in view (arXiv:2505.14069, eq. 6). Guides the search only."""

    def __init__(self, judge: ProcessJudge) -> None:
        self.judge = judge

    async def evaluate(self, trajectory: Trajectory, *, seed: int) -> Evaluation:
        """The judge's score in [0, 1]; None where its replies could not be read (the judge counts these)."""
        try:
            return Evaluation(await self.judge.score(trajectory, seed=seed), calls=1)
        except JudgeError:
            return Evaluation(None, calls=1)
