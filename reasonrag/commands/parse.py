"""`parse`: trajectories of anybody's, read by one of the formats."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from reasonrag.core.errors import ConfigError
from reasonrag.core.text import Rules, exact_match, printable, token_f1
from reasonrag.formats import FORMATS, Format
from reasonrag.storage.records import RowProblems, json_lines, read_rows

_ADVICE = "Each row is a JSON object with the trajectory as `text` and, to score it, `golden_answers`, a list of texts."


def parse(
    name: str, source: Path | str, *, rules: Rules = "house", out: TextIO | None = None, err: TextIO | None = None
) -> int:
    """Read every row of a file, or of stdin if `source` is "-", one at a time; returns the exit code.

    A row goes to `out` as one line of JSON in printable ASCII: `well_formed`, `reason`, `steps` (the paper's own, with
    a search or without), `searches`, `queries`, `answer`, and `em` and `f1` in [0, 1], null where there are no
    `golden_answers`. Counts by reason go to `err` at the end.

    Raises:
        ConfigError: the format is unknown.
        DataError: a row that cannot be used, by its number; the rows before it are written.
    """
    if name not in FORMATS:
        raise ConfigError(f"format {name!r} is unknown; known: {', '.join(FORMATS)}")
    format = FORMATS[name]()
    reasons: Counter[str] = Counter()
    answered = 0
    try:
        for row in _rows(source):
            found = outcome(format, row, rules=rules)
            reasons[found["reason"]] += 1
            answered += found["answer"] is not None
            print(json.dumps(found).replace("\x7f", "\\u007f"), file=out or sys.stdout)  # JSON lets DEL pass
        (out or sys.stdout).flush()
    except BrokenPipeError:  # `| head`: nobody reads on, and Python would say so once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(_summary(name, reasons, answered), file=err or sys.stderr)
    return 0


def outcome(format: Format, row: Mapping[str, Any], *, rules: Rules = "house") -> dict[str, Any]:
    """What one row says: its `text` as the format reads it, scored against its `golden_answers` if it has any."""
    reading = format.read_text(row["text"])
    golden = row.get("golden_answers")
    return {
        "well_formed": reading.well_formed,
        "reason": reading.reason,
        "steps": len(reading.blocks),
        "searches": len(reading.queries),
        "queries": list(reading.queries),
        "answer": reading.answer,
        "em": exact_match(reading.answer, golden, rules=rules) if golden else None,
        "f1": token_f1(reading.answer, golden, rules=rules) if golden else None,
    }


def _rows(source: Path | str) -> Iterator[dict[str, Any]]:
    """Rows that can be used; the first that cannot ends it."""
    problems = RowProblems("stdin" if source == "-" else str(source))
    rows = json_lines(sys.stdin.buffer, problems) if source == "-" else read_rows(Path(source), problems)
    for number, row in rows:
        _check(number, row, problems)
        problems.check(_ADVICE)
        yield row
    problems.check(_ADVICE)


def _check(number: int, row: dict[str, Any], problems: RowProblems) -> None:
    golden = row.get("golden_answers")
    if not isinstance(row.get("text"), str):
        problems.add("no `text`", number, row.get("text"))
    elif golden is not None and not (isinstance(golden, list) and all(isinstance(answer, str) for answer in golden)):
        problems.add("`golden_answers` is no list of texts", number, golden)


def _summary(name: str, reasons: Counter[str], answered: int) -> str:
    total = reasons.total()
    well = reasons.pop("", 0)
    lines = [f"{total} rows read as {name}: {well} well-formed, {answered} with an answer"]
    lines += [f"{count:>8} {reason}" for reason, count in reasons.most_common()]
    return printable("\n".join(lines))
