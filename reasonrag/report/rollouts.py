"""The rollouts of an online training, a group at a time: what was written, what it earned, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.formats import FORMATS
from reasonrag.parquet import Row, read_parquet
from reasonrag.tables import rollout_schema

MOST_TRAJECTORIES = 20_000  # that are shown; of a longer training, those of evenly chosen steps
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
