"""An outcome of one's own: a function in the convention of `own_reward.py`, with values in [0, 1] and reasons.

    reasonrag build-tree --outcome python:examples.own_outcome:short_and_right --dataset questions.jsonl ...

From Python: `build_trees(config, out, parts=open_parts(config, outcome=short_and_right))`. None is no verdict,
never 0. An exception sets its question aside, with the file and the line of this file.
"""

from __future__ import annotations

from reasonrag import cover_match


def short_and_right(predictions: list[str], golden_answers: list[list[str]]) -> list[tuple[float, str]]:
    """Return 1 for an answer that holds a golden one in at most ten words, and less for a longer one."""
    grades = []
    for prediction, golden in zip(predictions, golden_answers, strict=True):
        words = len(prediction.split())
        right = cover_match(prediction, golden)
        grades.append((right * min(1.0, 10 / max(words, 1)), f"{'right' if right else 'wrong'}, in {words} words"))
    return grades
