"""Write the pages of a training run: curves, data, settings and, of online training, every group of rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.formats import FORMATS
from reasonrag.report.charts import charts
from reasonrag.report.site import ListRow, Page, open_site, reading
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import Row, read_parquet
from reasonrag.storage.tables import rollout_schema
from reasonrag.training.folder import SUMMARY
from reasonrag.training.run import panels

_COLUMNS = (
    *(("number", "index"), ("step", "number"), ("id", "text"), ("question", "link"), ("attempt", "number")),
    *(("answer", "text"), ("golden answers", "list"), ("reward", "number"), ("advantage", "number")),
    *(("exact match", "number"), ("searches", "number"), ("policy tokens", "number")),
    *(("stop reason", "text"), ("set aside", "text")),
)
_FILTERS = (
    ("right", "right answers"),
    ("wrong", "wrong answers"),
    ("unscored", "set aside without a reward"),
    ("out of form", "not well-formed"),
    ("cut off", "cut off"),
)
_FINAL = {"Last training step": "train", "Last held-out evaluation": "held_out"}
_MOST_TRAJECTORIES = 20_000  # in a report; a longer run shows evenly chosen steps
# What the components of the rewards in `reasonrag.rewards` mean.
_MEANINGS = {
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
    "own_steps_known": "such steps for which the judge gave a verdict",
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
    "searches_known": "such steps for which the judge gave a verdict",
    "stage": "training stage, 1 or 2",
    "steps": "steps, as its format separates them",
    "under": "wrong steps without a search",
    "well_formed": "1 if it follows its format",
}
_FILE = re.compile(r"step-(\d+)(?:-(\d+))?\.parquet")


def write_training_pages(training: Path, out: Path) -> Path:
    """Write the pages of a finished training run into `out`, see `write_report`."""
    summary = require_json(training / SUMMARY)
    with reading(training / SUMMARY):
        overview = _overview(summary)
        reward = _Reward(summary["settings"])
    steps = steps_shown(training / "rollouts")
    with open_site(out, folder="groups", scripts=()) as site:
        site.write_pages("group.html.j2", _pages(steps.files, reward))
        return site.write(
            "index.html",
            "training.html.j2",
            scripts=site.rows.close(),
            **overview,
            steps=steps,
            reward=reward,
            columns=_COLUMNS,
            filters=_FILTERS,
        )


class _Reward:
    """The reward's part of a training run's settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reward = settings.get("reward") or {}
        self.name = reward.get("name")
        self.weights = weights(reward)
        # The smallest reward of a trajectory with an answer; None if the components alone determine it.
        self.least = reward["outcome"].get("answer_present") if self.name == "outcome" else None
        self.settings = list(flat(reward.get(str(self.name).replace("-", "_"), {})))
        self.format = (settings.get("format") or {}).get("name", "")
        self.scale = settings.get("scale_rewards")
        self.mask_truncated = bool(settings.get("mask_truncated"))


def _overview(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the first page, without the rollouts. None of them names the machine."""
    data = dict(summary["data"])
    lengths = dict(data.pop("lengths", None) or {})
    content = data.pop("content", None) or {}
    tokens = lengths.pop("tokens", None) or {}
    whole, split = charts(panels(summary["history"]))
    final = summary["final"]
    return {
        "summary": summary,
        "charts": whole,
        "more_charts": split,
        "data": [*flat(data), *flat(lengths)],
        "content": list(flat(content)),
        "tokens": {name: dict(quantiles) for name, quantiles in tokens.items()},
        "results": list(flat({name: summary.get(name) or {} for name in ("steps", "epochs", "best")})),
        "unscored": list(flat(summary.get("unscored") or {})),
        "final": [(title, list(flat(final.get(key) or {}))) for title, key in _FINAL.items()],
        "settings": [(name, None if value is None else str(value)) for name, value in flat(summary["identity"])],
        "versions": list(flat(summary["versions"])),
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of nested mappings, lists as text.

    >>> list(flat({"train": {"pairs": 44}, "report_to": ["wandb"], "limit": None}))
    [('train pairs', 44), ('report to', 'wandb'), ('limit', None)]
    """
    for name, value in tree.items():
        words = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{words} ")
        else:
            yield words, ", ".join(map(str, value)) if isinstance(value, list) else value


def _pages(files: Sequence[Path], reward: _Reward) -> Iterator[Page]:
    """Yield a page per group, with a row of the list per trajectory."""
    for group in _groups(files):
        components = _components(group, reward.weights)
        attempts = []
        for row in group:
            turn = pieces(row["turn"], reward.format)
            in_loss = _in_loss(row, mask_truncated=reward.mask_truncated)
            attempts.append({**row, "ending": _ending(row), "pieces": turn, "in_loss": in_loss})
        values = {
            "reward": reward,
            "components": components,
            "meanings": {name: _MEANINGS[name] for name, *_ in components if name in _MEANINGS},
            "attempts": attempts,
        }
        rows = [ListRow(_cells(row), _marks(row), f"#attempt-{row['sample']}") for row in group]
        yield Page(group[0], values, rows)


def _components(group: Sequence[Row], weights: Mapping[str, float]) -> list[tuple[str, float | None, list[Any]]]:
    """Return each component with its weight and its value in each attempt; the summed ones come first."""
    parts = [dict(row["parts"]) for row in group]
    known = {name for part in parts for name in part}
    summed = [name for name in weights if name in known]
    others = sorted(known - weights.keys())
    return [(name, weights.get(name), [part.get(name) for part in parts]) for name in [*summed, *others]]


def _cells(row: Row) -> list[Any]:
    parts = dict(row["parts"])
    return [
        *(row["step"], row["question_id"], row["question"], row["sample"] + 1, row["answer"], row["golden_answers"]),
        *(row["reward"], row["advantage"], parts.get("em"), parts.get("rc"), row["policy_tokens"], _ending(row)),
        "" if row["reward"] is not None else row["cause"] or "no reward",
    ]


def _marks(row: Row) -> list[str]:
    em = dict(row["parts"]).get("em")
    marks = {
        "right": em == 1,
        "wrong": em is not None and em < 1,
        "unscored": row["reward"] is None,
        "out of form": row["well_formed"] is False,
        "cut off": row["truncated"],
    }
    return [name for name, applies in marks.items() if applies]


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


def steps_shown(folder: Path, *, most: int = _MOST_TRAJECTORIES) -> Steps:
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


def _groups(files: Sequence[Path]) -> Iterator[list[Row]]:
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


def _in_loss(row: Row, *, mask_truncated: bool) -> int:
    """Count the policy's tokens in the loss: 0 without a reward, or if the turn was cut off and is masked."""
    is_masked = row["truncated"] and mask_truncated
    return 0 if row["reward"] is None or is_masked else int(row["policy_tokens"])


def _ending(row: Row) -> str:
    """Return the stop reason of a trajectory in words, and whether it was cut off."""
    words = [row["stop_reason"] or "not finished", *(["cut off"] if row["truncated"] else [])]
    return ", ".join(words).replace("_", " ")
