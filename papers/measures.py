"""Metrics of a comparison, read from its evaluations: means and rates over questions and seeds, and paired differences.

A mean is over all attempts, of all questions and seeds. OSR and USR are micro-averages (arXiv:2510.07794, eq. 2): over
all their steps. Intervals are about other questions and other seeds.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.seeds import OverSeeds, estimates_by_seed, intervals
from reasonrag.core.bootstrap import Column, Difference, Measure, Ratio, as_json
from reasonrag.core.errors import RunError
from reasonrag.core.text import cover_match, normalize_answer
from reasonrag.evaluation.tables import is_certain
from reasonrag.storage.files import writing

Row = dict[str, Any]
Results = dict[str, Any]
Seeds = Mapping[int, Mapping[str, Row]]  # rows by seed and question id


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a comparison: the mean of a column over questions, or a rate over steps."""

    label: str  # in tables
    part: str  # the column that is averaged, or the numerator of the rate
    whole: str | None = None  # the denominator of the rate
    share: bool = True  # whether it lies in [0, 1], so that differences are shown in percentage points


METRICS = {
    "em": Metric("EM", "em"),
    "f1": Metric("F1", "f1"),
    "acc": Metric("ACC (CEM)", "acc"),
    "lasj": Metric("LasJ", "lasj"),
    "osr": Metric("OSR", "steps_over", "searches_known"),
    "usr": Metric("USR", "steps_under", "own_steps_known"),
    "retrievals": Metric("RC", "retrievals", share=False),
    "steps": Metric("steps", "steps", share=False),
    "forced": Metric("forced", "forced"),
    "format_rate": Metric("in form", "format_rate"),
    "needless": Metric("needless", "needless", share=False),
    "early": Metric("early", "early"),
    "parsed": Metric("steps parsed", "steps_parsed", "steps"),
    "found": Metric("found", "found"),
    "noted": Metric("noted", "noted"),
}
_KEYS = ("decoding", "variant", "seed", "question_id", "kind")  # of the values by question
_STEP = "trajectory.list.element"
_STEP_COLUMNS = (f"{_STEP}.action", f"{_STEP}.content", f"{_STEP}.passages.list.element.contents")


def read_seeds(folders: Mapping[int, Path], policy: str, setting: str) -> dict[int, dict[str, Row]]:
    """Read a policy's evaluations at one setting, by seed and question id; `setting` may be a pattern of file names.

    Raises:
        RunError: an evaluation is missing.
    """
    return {seed: _read_rows(folder, policy, setting) for seed, folder in folders.items()}


def described(seeds: Seeds, metrics: Sequence[str]) -> Results:
    """Return the metrics of one variant, given as keys of `METRICS`.

    Returns:
        `all` and `by_kind` with an interval (or None) per metric, `by_seed` with a list of means per metric.
    """
    return _results([seeds], metrics)


def difference(first: Seeds, second: Seeds, metrics: Sequence[str]) -> Results | None:
    """Return first minus second, paired by question over the seeds that both have; None if they share none.

    The result has the shape of `described`.
    """
    # A question counts for both or for neither, seed by seed.
    sides: list[dict[int, dict[str, Row]]] = [{}, {}]
    for seed in sorted(first.keys() & second.keys()):
        common = first[seed].keys() & second[seed].keys()
        for side, seeds in zip(sides, (first, second), strict=True):
            side[seed] = {question: row for question, row in seeds[seed].items() if question in common}
    return _results(sides, metrics) if any(sides[0].values()) else None


def write_values(path: Path, rows: Mapping[str, Mapping[str, Seeds]], metrics: Sequence[str]) -> None:
    """Write what every interval of a page is computed from, as a gzipped CSV with a line per attempt.

    Its columns are `decoding`, `variant`, `seed`, `question_id`, `kind`, `hops`, and those that the metrics are made
    of; a cell is empty if a value is unknown. Equal rows give equal bytes.
    """
    parts = [part for name in metrics for part in (METRICS[name].part, METRICS[name].whole) if part is not None]
    with writing(path) as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        lines = csv.writer(text := io.StringIO(), lineterminator="\n")
        lines.writerow([*_KEYS, "hops", *parts])
        for decoding, variants in rows.items():
            for variant, seeds in variants.items():
                for seed, by_question in seeds.items():
                    for question, row in sorted(by_question.items()):
                        values = [_plain(row.get(part)) for part in parts]
                        lines.writerow([decoding, variant, seed, question, row["kind"], row["hops"], *values])
        packed.write(text.getvalue().encode())


def read_values(path: Path) -> dict[str, dict[str, dict[int, dict[str, Row]]]]:
    """Read what `write_values` wrote: the attempts by decoding, variant, seed and question id.

    Raises:
        RunError: there is no such file.
    """
    if not path.exists():
        raise RunError(f"{path} is missing: it has the values of the seeds that are not run here; see --results")
    rows: dict[str, dict[str, dict[int, dict[str, Row]]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            decoding, variant, seed, question, kind = [line.pop(name) for name in _KEYS]
            row = {name: float(value) if value else None for name, value in line.items()}
            by_seed = rows.setdefault(decoding, {}).setdefault(variant, {})
            by_seed.setdefault(int(seed), {})[question] = {"kind": kind, **row}
    return rows


def _plain(value: float | None) -> float | None:
    """Return 1 for 1.0 and True: half of the file is such numbers."""
    return int(value) if value is not None and value == int(value) else value


def mean_hops(seeds: Seeds) -> dict[str, float]:
    """Return the searches that questions of each kind need on average, for the kinds whose data set says so."""
    hops: dict[str, dict[str, int]] = {}
    for rows in seeds.values():
        for question, row in rows.items():
            if row["kind"] and row["hops"] is not None:
                hops.setdefault(row["kind"], {})[question] = row["hops"]
    return {kind: fmean(by_question.values()) for kind, by_question in sorted(hops.items())}


def sign(difference: Mapping[str, float] | None) -> int | None:
    """Return the sign of a difference that is certain, 0 for one that is not, None if nothing was measured.

    >>> sign({"mean": 0.2, "p_adjusted": 0.03, "n": 99}), sign({"mean": 0.2, "p_adjusted": 0.06, "n": 99}), sign(None)
    (1, 0, None)
    """
    if difference is None:
        return None
    return (1 if difference["mean"] > 0 else -1) if is_certain(difference) else 0


def verdict(difference: Mapping[str, float] | None, paper: float) -> str:
    """Compare the sign of a difference with the paper's: "agree", "disagree", or neither.

    "undecided" if ours is not certain, "unknown" if there is none, "no sign" if the paper's difference is 0.

    >>> verdict({"mean": -0.2, "p_adjusted": 0.01, "n": 99}, 5.9)
    'disagree'
    """
    ours = sign(difference)
    if ours is None:
        return "unknown"
    if not paper:
        return "no sign"
    if not ours:
        return "undecided"
    return "agree" if (ours > 0) == (paper > 0) else "disagree"


def _results(sides: Sequence[Seeds], metrics: Sequence[str]) -> Results:
    """Return the metrics of one variant, or the differences of two that have the same questions and seeds."""
    kinds: dict[str, str] = {}
    for rows in sides[0].values():
        kinds |= {question: row["kind"] for question, row in rows.items()}
    questions, numbers = sorted(kinds), sorted(sides[0])
    values: dict[str, OverSeeds] = {}
    for name in metrics:
        by_seed: list[Measure] = []
        for number in numbers:
            columns = [_column(METRICS[name], seeds[number], questions) for seeds in sides]
            by_seed.append(Difference(*columns) if len(columns) == 2 else columns[0])
        values[name] = OverSeeds(by_seed)
    groups: dict[str, list[int]] = {"": list(range(len(questions)))}
    for kind in sorted(set(kinds.values()) - {""}):
        groups[kind] = [index for index, question in enumerate(questions) if kinds[question] == kind]
    by_group: dict[str, Results] = {}
    for group, members in groups.items():
        of_group = intervals(values, seed=0, among=members)
        by_group[group] = {name: as_json(interval) for name, interval in of_group.items()}
    return {
        "seeds": numbers,
        "questions": len(questions),
        "questions_by_seed": [len(sides[0][number]) for number in numbers],
        "all": by_group.pop(""),
        "by_kind": by_group,
        "by_seed": {name: estimates_by_seed(value) for name, value in values.items()},
    }


def _column(metric: Metric, rows: Mapping[str, Row], questions: Sequence[str]) -> Column | Ratio:
    """Return `[n]` values of one seed by question, or numerators and denominators."""

    def values(column: str) -> Column:
        return [rows[question].get(column) if question in rows else None for question in questions]

    return values(metric.part) if metric.whole is None else Ratio(values(metric.part), values(metric.whole))


def _read_rows(evaluation: Path, policy: str, setting: str) -> dict[str, Row]:
    """Read the columns of `METRICS` by question id.

    `needless` and `early` are derived from searches and hops. `steps_parsed`, `found` and `noted` come from the steps:
    how many could be read, and whether a golden answer stands in a passage, or in the evidence that the policy noted;
    both are None for a question whose answer is yes or no.
    """
    import pyarrow.parquet as pq

    files = sorted((evaluation / policy / "trajectories").glob(f"{setting}-*.parquet"))
    if not files:
        raise RunError(f"{evaluation / policy} has no trajectories at {setting}; run the evaluation again")
    wanted = {"question_id", "kind", "hops", "golden_answers"}
    for metric in METRICS.values():
        wanted |= {metric.part, metric.whole or metric.part}
    rows: dict[str, Row] = {}
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            # An evaluation without a judge has no judged columns.
            columns = sorted(wanted & set(file.schema_arrow.names))
            for row in file.read([*columns, *_STEP_COLUMNS]).to_pylist():
                row |= _of_steps(row.pop("golden_answers"), row.pop("trajectory"))
                if row["hops"] is not None:
                    extra = row["retrievals"] - row["hops"]
                    row["needless"] = max(extra, 0)
                    row["early"] = int(extra < 0 and row["kind"] != "known")
                rows[row["question_id"]] = row
    return rows


def _of_steps(golden_answers: Sequence[str], steps: Sequence[Row]) -> Row:
    """Return `steps_parsed`, `found` and `noted` of an attempt, see `_read_rows`."""
    parsed = sum(step["action"] != "malformed" for step in steps)
    if {normalize_answer(answer) for answer in golden_answers} <= {"yes", "no"}:
        return {"steps_parsed": parsed}
    passages = [passage["contents"] for step in steps for passage in step["passages"]]
    notes = [step["content"] for step in steps if step["action"] == "evidence"]
    return {
        "steps_parsed": parsed,
        "found": int(any(cover_match(text, golden_answers) for text in passages)),
        "noted": int(any(cover_match(text, golden_answers) for text in notes)),
    }
