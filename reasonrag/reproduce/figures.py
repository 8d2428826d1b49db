"""What several seeds of a comparison come to: means over questions and seeds, with intervals, and paired differences.

A question's value is its mean over the seeds, and questions are resampled: an interval says how sure a figure is for
other questions of this kind, with these seeds. Each seed's own figure stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.evaluation.bootstrap import intervals, subtract

METRICS = ("em", "f1", "acc", "retrievals", "steps", "forced", "format_rate", "needless", "early")

Row = dict[str, Any]
Figures = dict[str, Any]


def read_attempts(evaluation: Path, policy: str, setting: str) -> dict[str, Row]:
    """The scores of one policy at one setting, by question id, with what its retrievals lack or have too many.

    `needless`: retrievals beyond those that the question needs; `early`: 1 where it was answered with fewer, unless
    its facts are known by heart.

    Raises:
        RunError: the evaluation is not there.
    """
    found = read_rows(evaluation, policy, setting, METRICS[:-2])
    for row in found.values():
        extra = row["retrievals"] - row["hops"]
        row |= {"needless": max(extra, 0), "early": int(extra < 0 and row["kind"] != "known")}
    return found


def read_rows(evaluation: Path, policy: str, setting: str, columns: Iterable[str]) -> dict[str, Row]:
    """Columns of one policy's trajectories at one setting, with `kind` and `hops`, by question id.

    Args:
        evaluation: the folder of `eval`.
        policy: its name there.
        setting: as its files are called, or a pattern.
        columns: those that an evaluation without a judge has not got are left out.

    Raises:
        RunError: the evaluation is not there.
    """
    import pyarrow.parquet as pq

    files = sorted((evaluation / policy / "trajectories").glob(f"{setting}-*.parquet"))
    if not files:
        raise RunError(f"{evaluation / policy} has no trajectories at {setting}; run the evaluation again")
    found: dict[str, Row] = {}
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            there = sorted({"question_id", "kind", "hops", *columns} & set(file.schema_arrow.names))
            found |= {row["question_id"]: row for row in file.read(there).to_pylist()}
    return found


def over_seeds(seeds: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """Each question's mean over the seeds that have it, by question id."""
    ids = sorted({question for rows in seeds for question in rows})
    merged = {}
    for question in ids:
        rows = [by_id[question] for by_id in seeds if question in by_id]
        merged[question] = {
            "kind": rows[0]["kind"],
            "hops": rows[0]["hops"],
            **{metric: fmean(row[metric] for row in rows) for metric in METRICS},
        }
    return merged


def compare(
    attempts: Mapping[str, Sequence[Mapping[str, Row]]], pairs: Iterable[tuple[str, str]], *, seed: int = 0
) -> Figures:
    """Means of each variant and differences of some, over all questions and by kind, each with its interval.

    Args:
        attempts: by variant, one mapping of question id to scores a seed; all of the same questions.
        pairs: variants whose difference (first minus second) is wanted.
        seed: of the bootstrap.

    Returns:
        `variants` and `differences`, each by name (a difference is "a - b"): `all` and `by_kind` with an interval a
        metric, `by_seed` with the mean EM of each seed.
    """
    merged = {name: over_seeds(seeds) for name, seeds in attempts.items()}
    ids = sorted(set.intersection(*(set(rows) for rows in merged.values())))
    columns = {name: {m: [rows[i][m] for i in ids] for m in METRICS} for name, rows in merged.items()}
    by_seed = {name: [fmean(row["em"] for row in rows.values()) for rows in seeds] for name, seeds in attempts.items()}
    kinds = {i: next(iter(merged.values()))[i]["kind"] for i in ids}
    hops = {i: next(iter(merged.values()))[i]["hops"] for i in ids}
    groups = {"": list(range(len(ids)))}
    for place, question in enumerate(ids):
        groups.setdefault(kinds[question], []).append(place)

    def described(values: Mapping[str, Sequence[float | None]], seeds: Sequence[float]) -> Figures:
        found = {
            group: {
                metric: interval and asdict(interval)
                for metric, interval in intervals(
                    {m: [column[place] for place in places] for m, column in values.items()}, seed=seed
                ).items()
            }
            for group, places in groups.items()
        }
        return {"all": found.pop(""), "by_kind": dict(sorted(found.items())), "by_seed": list(seeds)}

    return {
        "questions": len(ids),
        "hops": {kind: fmean(hops[ids[place]] for place in places) for kind, places in groups.items() if kind},
        "variants": {name: described(columns[name], by_seed[name]) for name in columns},
        "differences": {
            f"{first} - {second}": described(
                {m: subtract(columns[first][m], columns[second][m]) for m in METRICS},
                [a - b for a, b in zip(by_seed[first], by_seed[second], strict=True)],
            )
            for first, second in pairs
        },
    }
