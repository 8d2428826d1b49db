"""Write the pages of a training run: curves, data, settings and, of online training, every group of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reasonrag.report.charts import charts
from reasonrag.report.rollouts import MEANINGS, Steps, ending, groups, in_loss, least, pieces, steps_shown, weights
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
    ("policy tokens", "number"),
    ("stop reason", "text"),
    ("set aside", "text"),
)
_FILTERS = (
    ("right", "right answers"),
    ("wrong", "wrong answers"),
    ("unscored", "set aside without a reward"),
    ("out of form", "not well-formed"),
    ("cut off", "cut off"),
)


def write_training_pages(training: Path, out: Path) -> Path:
    """Write the pages of a finished training run into `out`; return the path of the first page.

    Raises:
        RunError: its `training.json` cannot be read, or `out` holds other files.
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
    """The reward's part of a training run's settings."""

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


_FINAL = {"Last training step": "train", "Last held-out evaluation": "held_out"}


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


def _group_pages(site: Site, steps: Steps, reward: _Reward) -> list[str]:
    """Write a page per group; return the parts of the list of trajectories."""
    listing = Listing(site)
    row_number = 0
    for page_number, group, last in with_last(groups(steps.files)):
        components = _components(group, reward.weights)
        site.write_page(
            page_number,
            "group.html.j2",
            last=last,
            question=group[0],
            short_title=shortened(group[0]["question"], TITLE_COLUMNS),
            reward=reward,
            components=components,
            meanings={name: MEANINGS[name] for name, *_ in components if name in MEANINGS},
            attempts=[_attempt(row, reward) for row in group],
        )
        for row in group:
            page = f"{site.page_name(page_number)}#attempt-{row['sample']}"
            listing.add(_cells(row_number, row), page, _marks(row))
            row_number += 1
    return listing.close()


def _attempt(row: Row, reward: _Reward) -> dict[str, Any]:
    return {
        **row,
        "ending": ending(row),
        "pieces": pieces(row["turn"], reward.format),
        "in_loss": in_loss(row, mask_truncated=reward.mask_truncated),
    }


def _components(group: Sequence[Row], weights: Mapping[str, float]) -> list[tuple[str, float | None, list[Any]]]:
    """Return each component with its weight and its value in each attempt; the summed ones come first."""
    parts = [dict(row["parts"]) for row in group]
    known = {name for part in parts for name in part}
    summed = [name for name in weights if name in known]
    others = sorted(known - weights.keys())
    return [(name, weights.get(name), [part.get(name) for part in parts]) for name in [*summed, *others]]


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
        ending(row),
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
