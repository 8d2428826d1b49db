"""Two own rewards: plain functions, called with the columns that they name.

    reasonrag rl train --reward python:examples.own_reward:f1_per_search --dataset questions.jsonl ...

None or NaN leaves a trajectory out, an exception all of its question, and is counted: a failure is never a score.
"""

from __future__ import annotations

from typing import Any

from reasonrag import Search, Trajectory, token_f1


def f1_per_search(trajectories: list[Trajectory]) -> list[float]:
    """Return the token F1 of each answer, minus 0.05 for each search after the first; 0 without an answer."""
    rewards = []
    for trajectory in trajectories:
        searches = sum(isinstance(step.action, Search) for step in trajectory.steps)
        f1 = token_f1(trajectory.answer, trajectory.question.golden_answers)
        rewards.append(max(0.0, f1 - 0.05 * max(0, searches - 1)))
    return rewards


def short_completions(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Return 1 for an empty completion and less the longer it is: a reward as TRL's trainers call it."""
    return [1 / (1 + len(completion[0]["content"]) / 1000) for completion in completions]
