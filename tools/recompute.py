"""Compute every interval anew from the values by question: `python -m tools.recompute docs/results/*.json runs/eval`.

A `NAME.json` of `python -m papers` is compared with `NAME.values.csv.gz` beside it, the folder of a `reasonrag eval`
with its trajectories. This is a second implementation, which shares no code with the first: one metric after the other,
with the draws that `reasonrag.core.bootstrap` and `papers.seeds` document. The exit code is 1 if a number differs by
over 1e-9.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-9  # results are rounded to ten digits
RESAMPLES = 10_000
RATES = {
    "osr": ("steps_over", "searches_known"),
    "usr": ("steps_under", "own_steps_known"),
    "parsed": ("steps_parsed", "steps"),
}

Array = NDArray[np.float64]
Side = Mapping[int, Mapping[str, Mapping[str, Any]]]  # the attempts of one variant, by seed and question


class Comparison:
    """Counts what was computed anew, and keeps the largest difference from what is recorded."""

    def __init__(self) -> None:
        self.intervals = 0
        self.largest = 0.0

    def number(self, recorded: float | None, computed: float | None) -> None:
        if recorded is None or computed is None:
            self.largest = max(self.largest, 0.0 if recorded is computed else math.inf)
        else:
            self.largest = max(self.largest, abs(recorded - computed))

    def interval(self, recorded: Mapping[str, Any] | None, computed: Mapping[str, float] | None) -> None:
        """Compare an interval, or None; the p-value of a difference with it."""
        self.intervals += 1
        recorded, computed = recorded or {}, computed or {}
        for name in ("mean", "low", "high", "p"):
            if name != "p" or "p" in recorded:
                self.number(recorded.get(name), computed.get(name))

    def adjusted(self, differences: Sequence[Mapping[str, Any]]) -> None:
        """Compare p-values adjusted for each other (Benjamini and Hochberg), given all differences of a page."""
        by_p = sorted(difference["p"] for difference in differences)
        for difference in differences:
            above = [(p, rank) for rank, p in enumerate(by_p, start=1) if p >= difference["p"]]
            self.number(difference["p_adjusted"], min(1.0, *(p * len(by_p) / rank for p, rank in above)))


def interval(sides: Sequence[Side], metric: str, questions: Sequence[str], *, seed: int) -> dict[str, float] | None:
    """Return a metric of one variant, or of the first minus the second, over some questions and all seeds."""
    cells = _cells(sides, metric, questions)
    estimate = _estimate(cells)
    if estimate is None:
        return None
    drawn = np.zeros(RESAMPLES)
    for way, side in zip((1, -1), cells, strict=False):
        part, whole = _over_seeds(side)
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn += way * resampled_sums(part.tobytes(), seed) / resampled_sums(whole.tobytes(), seed)
    drawn = drawn[np.isfinite(drawn)]
    by_seed = [_estimate(cells[:, [number]]) for number in range(cells.shape[1])]
    known = [one for one in by_seed if one is not None]
    error = float(np.var(known, ddof=1)) / len(known) if len(known) > 1 else 0.0
    if error:
        freedom = (len(known) - 1) * (error + float(np.var(drawn))) ** 2 / error**2
        rng = np.random.default_rng([seed, 1])
        normal = rng.standard_normal(len(drawn))
        stretched = np.sqrt(freedom / rng.chisquare(freedom, len(drawn)))
        drawn = estimate + stretched * (drawn - estimate + math.sqrt(error) * normal)
        drawn = drawn.clip(*_range(cells, metric))
    low, high = np.quantile(drawn, (0.025, 0.975))
    drawn = drawn.round(10)  # no difference is exactly none
    beyond = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    p = min(1.0, 2 * (beyond + 1) / (len(drawn) + 1))
    return {"mean": estimate, "low": float(low), "high": float(high), "p": p}


@lru_cache(maxsize=512)
def resampled_sums(values: bytes, seed: int) -> Array:
    """Return `[10,000]` sums over questions that were drawn with replacement, given a value by question."""
    column = np.frombuffer(values)
    return np.concatenate([column[drawn].sum(axis=1) for drawn in resampled_questions(len(column), seed)])


@lru_cache(maxsize=4)
def resampled_questions(n: int, seed: int) -> list[NDArray[np.int32]]:
    """Return `[10,000, n]` indices of questions in parts of 100 resamples."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, n, (100, n)).astype(np.int32) for _ in range(RESAMPLES // 100)]


def _cells(sides: Sequence[Side], metric: str, questions: Sequence[str]) -> Array:
    """Return `[sides, seeds, n, 2]` numerators and denominators; NaN where a question is unknown on any side."""
    names = RATES.get(metric, (metric,))
    table: list[list[list[list[float | None]]]] = []
    for side in sides:
        of_seeds = []
        for number in sorted(set.intersection(*(set(side) for side in sides))):
            rows = [side[number].get(question, {}) for question in questions]
            of_seeds.append([[row.get(names[0]), row.get(names[1]) if len(names) > 1 else 1.0] for row in rows])
        table.append(of_seeds)
    cells = np.array(table, dtype=np.float64)
    cells[:, np.isnan(cells).any(axis=(0, 3))] = np.nan
    return cells


def _over_seeds(side: Array) -> tuple[Array, Array]:
    """Return `[n]` numerators and denominators of the questions that any seed knows."""
    side = side[:, ~np.isnan(side[:, :, 0]).all(axis=0)]
    return np.nansum(side[:, :, 0], axis=0), np.nansum(side[:, :, 1], axis=0)


def _estimate(cells: Array) -> float | None:
    sums = [[column.sum() for column in _over_seeds(side)] for side in cells]
    if not all(whole for _, whole in sums):
        return None
    first, *others = (float(part / whole) for part, whole in sums)
    return first - sum(others)


def _range(cells: Array, metric: str) -> tuple[float, float]:
    """Return the least and the greatest value of a single attempt, or of a single difference."""
    with np.errstate(invalid="ignore", divide="ignore"):
        values = cells[..., 0] / cells[..., 1]
    if len(values) == 1:
        return float(np.nanmin(values)), float(np.nanmax(values))
    if metric in RATES:
        return float(np.nanmin(values[0]) - np.nanmax(values[1])), float(np.nanmax(values[0]) - np.nanmin(values[1]))
    return float(np.nanmin(values[0] - values[1])), float(np.nanmax(values[0] - values[1]))


def of_page(file: Path) -> Comparison:
    """Compare the results of a page with the values beside them."""
    results = json.loads(file.read_text(encoding="utf-8"))
    values = _read_values(file.with_suffix(".values.csv.gz"))
    done = Comparison()
    for decoding, recorded in results["settings"].items():
        of_decoding = values.get(decoding, {})
        for name, variant in recorded["variants"].items():
            _compare(done, variant, [of_decoding[name]])
        for name, difference in recorded["differences"].items():
            _compare(done, difference, [of_decoding[side] for side in name.split(" - ")])
        for is_to_base in (True, False):  # two families
            names = [name for name in recorded["differences"] if ("base" in name.split(" - ")) == is_to_base]
            family = [found for name in names for found in _intervals(recorded["differences"][name])]
            done.adjusted([found for found in family if "p_adjusted" in found])
    return done


def _compare(done: Comparison, recorded: Mapping[str, Any], sides: Sequence[Side]) -> None:
    """Compare a row of a page: over all questions, by kind of question and by seed."""
    kinds: dict[str, str] = {}
    for number in recorded["seeds"]:
        for question in set.intersection(*(set(side[number]) for side in sides)):
            kinds[question] = sides[0][number][question]["kind"]
    kept = [{number: {q: side[number][q] for q in kinds if q in side[number]} for number in side} for side in sides]
    for metric, found in recorded["all"].items():
        done.interval(found, interval(kept, metric, sorted(kinds), seed=0))
        for kind, of_kind in recorded["by_kind"].items():
            done.interval(of_kind[metric], interval(kept, metric, sorted(q for q in kinds if kinds[q] == kind), seed=0))
        for number, of_seed in zip(recorded["seeds"], recorded["by_seed"][metric], strict=True):
            alone = [{number: side[number]} for side in kept]
            done.number(of_seed, _estimate(_cells(alone, metric, sorted(kinds))))


def _intervals(row: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for found in (row["all"], *row["by_kind"].values()):
        yield from filter(None, found.values())


def _read_values(file: Path) -> dict[str, dict[str, dict[int, dict[str, dict[str, Any]]]]]:
    """Return the attempts by decoding, variant, seed and question."""
    values: dict[str, dict[str, dict[int, dict[str, dict[str, Any]]]]] = {}
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            names = [line.pop(name) for name in ("decoding", "variant", "seed", "question_id", "kind")]
            decoding, variant, number, question, kind = names
            row = {name: float(value) if value else None for name, value in line.items()}
            by_seed = values.setdefault(decoding, {}).setdefault(variant, {})
            by_seed.setdefault(int(number), {})[question] = {"kind": kind, **row}
    return values


def of_evaluation(folder: Path) -> Comparison:
    """Compare the `metrics.json` of an evaluation with its trajectories."""
    import pyarrow.parquet as pq

    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    done = Comparison()
    attempts: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for policy, settings in metrics["policies"].items():
        for setting, recorded in settings.items():
            rows: dict[str, dict[str, Any]] = {}
            for file in sorted((folder / policy / "trajectories").glob(f"{setting}-*.parquet")):
                columns = [name for name in pq.read_schema(file).names if name != "trajectory"]
                for row in pq.read_table(file, columns=columns).to_pylist():
                    rows[f"{row['dataset']} {row['question_id']}"] = row
            attempts[policy, setting] = rows
            _compare_groups(done, recorded, [rows], metrics["seed"])
    for row in metrics["differences"]:
        sides = [attempts[row["policy"], row["setting"]], attempts[row["baseline"], row["baseline_setting"]]]
        whole = {row["metric"]: row if row["mean"] is not None else None}
        by_kind = {kind: {row["metric"]: found} for kind, found in row["by_kind"].items()}
        _compare_groups(done, {**whole, "by_kind": by_kind}, sides, metrics["seed"])
    done.adjusted([row for row in metrics["differences"] if "p_adjusted" in row])
    return done


def _compare_groups(
    done: Comparison, recorded: Mapping[str, Any], sides: Sequence[Mapping[str, Any]], seed: int
) -> None:
    """Compare the intervals over all questions, by kind and by data set; questions are in the evaluation's order."""
    attempts = [{0: side} for side in sides]
    groups = [(recorded, list(sides[0]))]
    for column, name in (("kind", "by_kind"), ("dataset", "by_dataset")):
        for value, of_group in recorded.get(name, {}).items():
            groups.append((of_group, [q for q, row in sides[0].items() if (row[column] or "other") == value]))
    for group, questions in groups:
        for metric, found in group.items():
            is_interval = "mean" in found if isinstance(found, dict) else found is None and metric != "hops"
            if is_interval:
                done.interval(found, interval(attempts, metric, questions, seed=seed))


@click.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
def main(results: Sequence[Path]) -> None:
    """Compute the intervals of RESULTS anew: `docs/results/NAME.json`, or the folder of an evaluation."""
    failed = False
    for path in results:
        done = of_evaluation(path) if path.is_dir() else of_page(path)
        failed |= done.largest > TOLERANCE or not done.intervals
        print(f"{path}: {done.intervals} intervals, largest difference {done.largest:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
