"""Two own rewards: plain functions, one in each form that `reasonrag rl train` accepts.

    reasonrag rl train --reward python:examples.own_reward:f1_per_search --dataset questions.jsonl ...

A function that returns None, NaN or raises leaves the trajectory out and is counted: a failure is never a score.
"""

from __future__ import annotations

from typing import Any

from reasonrag import Search, Trajectory, token_f1


def f1_per_search(trajectory: Trajectory) -> float:
    """Return the token F1 of the answer, minus 0.05 for each search after the first; 0 without an answer."""
    if trajectory.answer is None:
        return 0.0
    searches = sum(isinstance(step.action, Search) for step in trajectory.steps)
    f1 = token_f1(trajectory.answer, trajectory.question.golden_answers)
    return max(0.0, f1 - 0.05 * max(0, searches - 1))


def short_completions(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Return 1 for an empty completion and less the longer it is: a reward as TRL's trainers call it."""
    return [1 / (1 + len(completion[0]["content"]) / 1000) for completion in completions]
