"""The rollouts of an online training, a group at a time: what was written, what it earned, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.formats import FORMATS
from reasonrag.storage.parquet import Row, read_parquet
from reasonrag.storage.tables import rollout_schema

MOST_TRAJECTORIES = 20_000  # that are shown; of a longer training, those of evenly chosen steps
# Components of the rewards of `reasonrag.rewards`.
MEANINGS = {
    "accuracy": "the judge's score of the answer, 0 to 1",
    "answer": "score of the final answer",
    "answered": "1 with a final answer",
    "avg_sim": "likeness of its queries, where there are several",
    "bonus": "for steps with neither a needless nor a missing search, its weight included",
    "cem": "1 where a golden answer is contained in the answer",
    "concise": "1 where its only query is concise",
    "correct": "1 where the answer counts as right",
    "em": "exact match of the answer",
    "f1": "token F1 of the answer",
    "format": "score of the form",
    "known_steps": "steps of which the judge could tell whether they were well chosen",
    "n_actions": "searches that were made",
    "n_plan": "steps of the policy's own plan",
    "n_ref": "steps of the reference plan that were carried out",
    "n_reference": "steps of the reference plan",
    "n_self": "steps of its own plan that were carried out",
    "outcome": "score of the outcome; of a wrong answer what the judge gives for it",
    "over": "needless searches",
    "own_steps": "steps without a search",
    "path": "the better of s_self and s_ref, at most 1.2",
    "plan_missing": "1 where the question has no reference plan",
    "planner": "the judge's score of the plan",
    "r_a": "reward of the answer, by the stage of the training",
    "r_f": "reward of the form",
    "r_s": "reward of the searches",
    "rc": "retrieval count: searches",
    "reasoning": "the judge's score of the reasoning, 0 to 1",
    "s_ref": "how well it follows the reference plan",
    "s_self": "how well it follows its own plan",
    "searches": "steps with a search",
    "stage": "1 or 2, of the training",
    "steps": "steps as its format tells them apart",
    "under": "false steps without a search",
    "well_formed": "1 where it follows its format",
}
_FILE = re.compile(r"step-(\d+)(?:-(\d+))?\.parquet")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a turn: the policy's words and the tags around it, or passages that were put in."""

    text: str
    found: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """The optimizer steps whose rollouts are shown: files by step, and how many steps there are."""

    files: list[Path]
    shown: int
    total: int


def steps_shown(folder: Path, *, most: int = MOST_TRAJECTORIES) -> Steps:
    """All steps, or as many evenly chosen ones as have about `most` trajectories, the first and the last among them.

    Raises:
        DataError: the first file cannot be read.
    """
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*.parquet"):
        if name := _FILE.fullmatch(path.name):
            found.setdefault(int(name[1]), []).append((int(name[2] or 0), path))
    steps = [[path for _, path in sorted(found[step])] for step in sorted(found)]
    if not steps:
        return Steps([], 0, 0)
    rows = sum(len(read_parquet(path, rollout_schema())) for path in steps[0])  # all steps have as many
    count = min(len(steps), max(2, most // max(1, rows)))
    places = sorted({round(n * (len(steps) - 1) / max(1, count - 1)) for n in range(count)})
    return Steps([path for place in places for path in steps[place]], len(places), len(steps))


def groups(files: Sequence[Path]) -> Iterator[list[Row]]:
    """The attempts at one question at one step, in the order of the steps; no more than one file is held in memory.

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
    """What the components weigh that a reward sums, of `settings.reward`; empty for a reward of one's own.

    A bonus holds its weight already. The other components are told, and weigh nothing by themselves.
    """
    name = reward.get("name")
    of = reward.get(str(name).replace("-", "_"), {})
    match name:
        case "outcome":
            return {"answer": 1 - of["format_weight"], "format": of["format_weight"]}
        case "hiprag":
            return {"answer": 1 - of["lambda_f"], "format": of["lambda_f"], "bonus": 1.0}
        case "search-p1":
            return {"path": of["lambda_p"], "outcome": of["lambda_a"], "format": of["lambda_f"]}
        case "when-to-search":
            return {"r_a": 1.0, "r_s": 1.0, "r_f": 1.0}
    return {}


def least(reward: Mapping[str, Any]) -> float | None:
    """What a trajectory with an answer earns at least; None where its components alone tell."""
    return reward["outcome"].get("answer_present") if reward.get("name") == "outcome" else None


def pieces(turn: str, format_name: str) -> list[Piece]:
    """A turn parted at what searches found: what stands in the format's tag for it right behind a search.

    >>> [piece.text for piece in pieces("<search>a</search>\\n<information>b</information> so", "search_r1")]
    ['<search>a</search>\\n<information>', 'b', '</information> so']
    """
    search, found = (getattr(FORMATS.get(format_name), name, None) for name in ("search", "found"))
    if search is None or found is None:
        return [Piece(turn, found=False)]
    parts = re.split(rf"(?s)(?<=</{search}>)(\s*<{found}>)(.*?)(?=</{found}>|\Z)", turn)
    made = [Piece(parts[0] + "".join(parts[1:2]), found=False)]
    for place in range(1, len(parts), 3):
        following = "".join(parts[place + 3 : place + 4])
        made += [Piece(parts[place + 1], found=True), Piece(parts[place + 2] + following, found=False)]
    return [piece for piece in made if piece.text]


def in_loss(row: Row, *, mask_truncated: bool) -> int:
    """Tokens of the policy in the loss: none without a reward, or where the turn was cut off and is masked."""
    taught = row["reward"] is not None and not (row["truncated"] and mask_truncated)
    return int(row["policy_tokens"]) if taught else 0


def fate(row: Row) -> str:
    """How a trajectory ended, in words."""
    words = [row["stop_reason"] or "not finished", *(["cut off"] if row["truncated"] else [])]
    return ", ".join(words).replace("_", " ")
