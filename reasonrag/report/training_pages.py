"""The pages of a training: its data and settings, its curves, and, of online training, every group of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.report.charts import charts
from reasonrag.report.rollouts import MEANINGS, Steps, fate, groups, in_loss, least, pieces, steps_shown, weights
from reasonrag.report.site import (
    TITLE_COLUMNS,
    Listing,
    Site,
    open_site,
    reading,
    shortened,
    with_last,
)
from reasonrag.storage.files import require_json
from reasonrag.storage.parquet import Row
from reasonrag.training.folder import SUMMARY
from reasonrag.training.outcome import panels

_COLUMNS = (
    ("number", "index"),
    ("step", "number"),
    ("id", "text"),
    ("question", "link"),
    ("attempt", "number"),
    ("answer", "text"),
    ("golden answers", "list"),
    ("reward", "number"),
    ("advantage", "number"),
    ("exact match", "number"),
    ("searches", "number"),
    ("policy's tokens", "number"),
    ("end", "text"),
    ("set aside", "text"),
)
_FILTERS = (
    ("right", "right answers"),
    ("wrong", "wrong answers"),
    ("unscored", "set aside: without a verdict"),
    ("out of form", "not well-formed"),
    ("cut off", "cut off"),
)


def write_training_pages(training: Path, out: Path) -> Path:
    """Write the pages of a finished training into `out`; returns the path of the first one.

    Raises:
        RunError: its `training.json` cannot be read, or `out` holds something else.
        DataError: its rollouts are damaged.
        OSError: the pages cannot be written.
    """
    summary = require_json(training / SUMMARY)
    with reading(training / SUMMARY):
        overview = _overview(summary)
        reward = _Reward(summary["settings"])
    steps = steps_shown(training / "rollouts")
    with open_site(out, folder="groups", scripts=()) as site:
        return site.write_index(
            "training.html.j2",
            **overview,
            steps=steps,
            reward=reward,
            scripts=_group_pages(site, steps, reward),
            columns=_COLUMNS,
            filters=_FILTERS,
        )


class _Reward:
    """What a training's settings say of its reward."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        reward = settings.get("reward") or {}
        self.name = reward.get("name")
        self.weights = weights(reward)
        self.least = least(reward)
        self.settings = list(flat(reward.get(str(self.name).replace("-", "_"), {})))
        self.format = (settings.get("format") or {}).get("name", "")
        self.scale = settings.get("scale_rewards")
        self.mask_truncated = bool(settings.get("mask_truncated"))


def _overview(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the first page tells, but for the rollouts; nothing of the machine."""
    data = summary["data"]
    lengths = data.get("lengths") or {}
    told = {name: value for name, value in data.items() if name not in ("lengths", "content")}
    more = {name: value for name, value in lengths.items() if name != "tokens"}
    drawn, more_drawn = charts(panels(summary["history"]))
    final = summary["final"]
    return {
        "summary": summary,
        "charts": drawn,
        "more_charts": more_drawn,
        "data": list(flat(told)) + list(flat(more)),
        "content": list(flat(data.get("content") or {})),
        "tokens": {name: dict(quantiles) for name, quantiles in (lengths.get("tokens") or {}).items()},
        "results": list(flat({name: summary.get(name) or {} for name in ("steps", "epochs", "best")})),
        "unscored": list(flat(summary.get("unscored") or {})),
        "final": [(name, list(flat(final.get(key) or {}))) for name, key in _FINAL.items()],
        "settings": [(name, None if value is None else str(value)) for name, value in flat(summary["identity"])],
        "versions": list(flat(summary["versions"])),
    }


_FINAL = {"Last step, in training": "train", "Last look at the held-out questions": "held_out"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a tree, one after the other; lists as text.

    >>> list(flat({"train": {"pairs": 44}, "report_to": ["wandb"], "limit": None}))
    [('train pairs', 44), ('report to', 'wandb'), ('limit', None)]
    """
    for name, value in tree.items():
        shown = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from flat(value, f"{shown} ")
        else:
            yield shown, ", ".join(map(str, value)) if isinstance(value, list) else value


def _group_pages(site: Site, steps: Steps, reward: _Reward) -> list[str]:
    """Write a page a group; returns the parts of the list of trajectories."""
    listing = Listing(site)
    number = 0
    for place, group, last in with_last(groups(steps.files)):
        _write_group(site, place, group, reward, last=last)
        for row in group:
            listing.add(_cells(number, row), f"{site.page_name(place)}#attempt-{row['sample']}", _marks(row))
            number += 1
    return listing.close()


def _write_group(site: Site, place: int, group: Sequence[Row], reward: _Reward, *, last: bool) -> None:
    components = _components(group, reward.weights)
    site.write_page(
        place,
        "group.html.j2",
        last=last,
        question=group[0],
        short_title=shortened(group[0]["question"], TITLE_COLUMNS),
        reward=reward,
        components=components,
        meanings={name: MEANINGS[name] for name, *_ in components if name in MEANINGS},
        attempts=[_attempt(row, reward) for row in group],
    )


def _attempt(row: Row, reward: _Reward) -> dict[str, Any]:
    return {
        **row,
        "fate": fate(row),
        "pieces": pieces(row["turn"], reward.format),
        "in_loss": in_loss(row, mask_truncated=reward.mask_truncated),
    }


def _components(group: Sequence[Row], weights: Mapping[str, float]) -> list[tuple[str, float | None, list[Any]]]:
    """Each component with its weight and its value in each attempt; those that are summed come first."""
    parts = [dict(row["parts"]) for row in group]
    names = dict.fromkeys([*weights, *sorted({name for part in parts for name in part})])
    return [
        (name, weights.get(name), [part.get(name) for part in parts])
        for name in names
        if any(name in part for part in parts)
    ]


def _cells(number: int, row: Row) -> list[Any]:
    parts = dict(row["parts"])
    return [
        number,
        row["step"],
        row["question_id"],
        row["question"],
        row["sample"] + 1,
        row["answer"],
        row["golden_answers"],
        row["reward"],
        row["advantage"],
        parts.get("em"),
        parts.get("rc"),
        row["policy_tokens"],
        fate(row),
        "" if row["reward"] is not None else row["cause"] or "no verdict",
    ]


def _marks(row: Row) -> list[str]:
    em = dict(row["parts"]).get("em")
    found = {
        "right": em == 1,
        "wrong": em is not None and em < 1,
        "unscored": row["reward"] is None,
        "out of form": row["well_formed"] is False,
        "cut off": row["truncated"],
    }
    return [name for name, there in found.items() if there]
