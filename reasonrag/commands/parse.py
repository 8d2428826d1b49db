"""`parse`: trajectories from any source, parsed by one of the formats."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import RULES, flag_help
from reasonrag.core.text import Rules, exact_match, printable, token_f1

if TYPE_CHECKING:
    from reasonrag.formats import Format

_ADVICE = "Each row is a JSON object with the trajectory as `text` and, to score it, `golden_answers`, a list of texts."


@click.command()
@click.option("--format", "name", required=True, help=flag_help("Config", "format.name"))
@RULES
@click.argument("file")
def parse(name: str, rules: Rules, file: str) -> None:
    """Parse trajectories: print one row of JSON for each, and count what is wrong with them.

    FILE is JSONL(.gz) with `text` and, to score it, `golden_answers`; - reads standard input.

    \b
      reasonrag parse --format search_r1 trajectories.jsonl.gz > parsed.jsonl
    \f
    Raises:
        ConfigError: the format is unknown.
        DataError: a row cannot be used; the message has its number, and the rows before it are written.
    """
    from reasonrag.core.config import load_config
    from reasonrag.formats import open_format

    format = open_format(load_config(overrides={"format.name": name}))
    reasons: Counter[str] = Counter()
    answered = 0
    for row in _rows(file):
        parsed = outcome(format, row, rules=rules)
        reasons[parsed["reason"]] += 1
        answered += parsed["answer"] is not None
        print(json.dumps(parsed).replace("\x7f", "\\u007f"))  # JSON does not escape DEL
        if sys.stdout.closed:  # `| head`
            return
    sys.stdout.flush()
    print(_summary(name, reasons, answered), file=sys.stderr)


def outcome(format: Format, row: Mapping[str, Any], *, rules: Rules = "house") -> dict[str, Any]:
    """Return what the format reads in the `text` of a row as JSON, scored against its `golden_answers` if it has any.

    `steps` are the paper's own, with or without a search; `em` and `f1` lie in [0, 1].
    """
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


def _rows(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that can be used; raise at the first that cannot."""
    from reasonrag.storage.records import RowProblems, json_lines, read_rows

    problems = RowProblems("stdin" if source == "-" else source)
    rows = json_lines(sys.stdin.buffer, problems) if source == "-" else read_rows(Path(source), problems)
    for number, row in rows:
        golden = row.get("golden_answers")
        texts = isinstance(golden, list) and all(isinstance(answer, str) for answer in golden)
        if not isinstance(row.get("text"), str):
            problems.add("no `text`", number, row.get("text"))
        elif golden is not None and not texts:
            problems.add("`golden_answers` is no list of texts", number, golden)
        problems.check(_ADVICE)
        yield row
    problems.check(_ADVICE)


def _summary(name: str, reasons: Counter[str], answered: int) -> str:
    total = reasons.total()
    well_formed = reasons.pop("", 0)
    lines = [f"{total} rows read as {name}: {well_formed} well-formed, {answered} with an answer"]
    lines += [f"{count:>8} {reason}" for reason, count in reasons.most_common()]
    return printable("\n".join(lines))
