"""Read the rollouts of an online training run, one group at a time: text, reward and its components."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.formats import FORMATS
from reasonrag.storage.parquet import Row, read_parquet
from reasonrag.storage.tables import rollout_schema

MOST_TRAJECTORIES = 20_000  # in a report; a longer run shows evenly chosen steps
# What the components of the rewards in `reasonrag.rewards` mean.
MEANINGS = {
    "accuracy": "the judge's score of the answer, 0 to 1",
    "answer": "score of the final answer",
    "answered": "1 if there is a final answer",
    "avg_sim": "similarity of its queries, if there are several",
    "bonus": "for steps with neither a needless nor a missing search; includes its weight",
    "cem": "1 if the answer contains a golden answer",
    "concise": "1 if its only query is concise",
    "correct": "1 if the answer counts as right",
    "em": "exact match of the answer",
    "f1": "token F1 of the answer",
    "format": "score of the format",
    "known_steps": "steps for which the judge gave a verdict",
    "n_actions": "number of searches",
    "n_plan": "steps of the policy's own plan",
    "n_ref": "steps of the reference plan that were carried out",
    "n_reference": "steps of the reference plan",
    "n_self": "steps of its own plan that were carried out",
    "outcome": "score of the outcome; for a wrong answer, the judge's score",
    "over": "needless searches",
    "own_steps": "steps without a search",
    "path": "the better of s_self and s_ref, at most 1.2",
    "plan_missing": "1 if the question has no reference plan",
    "planner": "the judge's score of the plan",
    "r_a": "reward of the answer, by the training stage",
    "r_f": "reward of the format",
    "r_s": "reward of the searches",
    "rc": "retrieval count: number of searches",
    "reasoning": "the judge's score of the reasoning, 0 to 1",
    "s_ref": "how well it follows the reference plan",
    "s_self": "how well it follows its own plan",
    "searches": "steps with a search",
    "stage": "training stage, 1 or 2",
    "steps": "steps, as its format separates them",
    "under": "wrong steps without a search",
    "well_formed": "1 if it follows its format",
}
_FILE = re.compile(r"step-(\d+)(?:-(\d+))?\.parquet")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a turn: text of the policy with its tags, or inserted passages."""

    text: str
    is_passages: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps in the report: their files, their number, and the number of all steps."""

    files: list[Path]
    shown: int
    total: int


def steps_shown(folder: Path, *, most: int = MOST_TRAJECTORIES) -> Steps:
    """Choose all steps, or evenly spaced ones with about `most` trajectories, the first and the last among them.

    Raises:
        DataError: the first file cannot be read.
    """
    files_by_step: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*.parquet"):
        if name := _FILE.fullmatch(path.name):
            files_by_step.setdefault(int(name[1]), []).append((int(name[2] or 0), path))
    steps = [[path for _, path in sorted(files_by_step[step])] for step in sorted(files_by_step)]
    if not steps:
        return Steps([], 0, 0)
    rows = sum(len(read_parquet(path, rollout_schema())) for path in steps[0])  # all steps have as many
    count = min(len(steps), max(2, most // max(1, rows)))
    chosen = sorted({round(n * (len(steps) - 1) / max(1, count - 1)) for n in range(count)})
    return Steps([path for index in chosen for path in steps[index]], len(chosen), len(steps))


def groups(files: Sequence[Path]) -> Iterator[list[Row]]:
    """Yield the attempts at each question of each step, in the order of the steps, with one file at a time in memory.

    Raises:
        DataError: a file is damaged.
    """
    for path in files:
        group: list[Row] = []
        for row in read_parquet(path, rollout_schema()):
            if group and (_question(row) != _question(group[0]) or row["sample"] <= group[-1]["sample"]):
                yield group
                group = []
            group.append(row)
        if group:
            yield group


def _question(row: Row) -> tuple[Any, ...]:
    return row["step"], row["dataset"], row["question_id"]


def weights(reward: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the components that a reward sums, from `settings.reward`; empty for a custom reward.

    A bonus includes its weight already. Components without a weight only explain the others.
    """
    name = reward.get("name")
    settings = reward.get(str(name).replace("-", "_"), {})
    match name:
        case "outcome":
            return {"answer": 1 - settings["format_weight"], "format": settings["format_weight"]}
        case "hiprag":
            return {"answer": 1 - settings["lambda_f"], "format": settings["lambda_f"], "bonus": 1.0}
        case "search-p1":
            return {"path": settings["lambda_p"], "outcome": settings["lambda_a"], "format": settings["lambda_f"]}
        case "when-to-search":
            return {"r_a": 1.0, "r_s": 1.0, "r_f": 1.0}
    return {}


def least(reward: Mapping[str, Any]) -> float | None:
    """Return the smallest reward of a trajectory with an answer; None if the components alone determine it."""
    return reward["outcome"].get("answer_present") if reward.get("name") == "outcome" else None


def pieces(turn: str, format_name: str) -> list[Piece]:
    """Split a turn into the policy's text and the passages, which are in the format's tag directly after a search.

    >>> [piece.text for piece in pieces("<search>a</search>\\n<information>b</information> so", "search_r1")]
    ['<search>a</search>\\n<information>', 'b', '</information> so']
    """
    format_class = FORMATS.get(format_name)
    search_tag = getattr(format_class, "search", None)
    passages_tag = getattr(format_class, "found", None)
    if search_tag is None or passages_tag is None:
        return [Piece(turn, is_passages=False)]
    parts = re.split(rf"(?s)(?<=</{search_tag}>)(\s*<{passages_tag}>)(.*?)(?=</{passages_tag}>|\Z)", turn)
    split_turn = [Piece(parts[0] + "".join(parts[1:2]), is_passages=False)]
    for index in range(1, len(parts), 3):
        following = "".join(parts[index + 3 : index + 4])
        split_turn += [
            Piece(parts[index + 1], is_passages=True),
            Piece(parts[index + 2] + following, is_passages=False),
        ]
    return [piece for piece in split_turn if piece.text]


def in_loss(row: Row, *, mask_truncated: bool) -> int:
    """Count the policy's tokens in the loss: 0 without a reward, or if the turn was cut off and is masked."""
    is_masked = row["truncated"] and mask_truncated
    return 0 if row["reward"] is None or is_masked else int(row["policy_tokens"])


def ending(row: Row) -> str:
    """Return the stop reason of a trajectory in words, and whether it was cut off."""
    words = [row["stop_reason"] or "not finished", *(["cut off"] if row["truncated"] else [])]
    return ", ".join(words).replace("_", " ")
