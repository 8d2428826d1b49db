"""What an evaluation leaves in its folder, beside trajectories and journals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.text import Rules
from reasonrag.core.types import Question
from reasonrag.evaluation.report import write_report
from reasonrag.evaluation.run import PolicyResult
from reasonrag.evaluation.summary import failures, summarize
from reasonrag.storage.runs import write_text


def save(results: Sequence[PolicyResult], questions: Sequence[Question], out: Path, *, rules: Rules) -> dict[str, Any]:
    """Write `metrics.json` of the evaluation and of each policy, `report.md` and plots; returns the first of them."""
    figures = summarize(results, questions, rules=rules)
    for result in results:
        own = {
            "policy": result.name,
            "content": result.content,
            "seed": result.config.seed,
            "rules": rules,
            "judge": result.judge,
            "settings": figures["policies"][result.name],
            "failures": failures(result, questions),
            "calls": result.calls,
            "versions": figures["versions"],
        }
        _write(out / result.name / "metrics.json", own)
    write_report(figures, out)
    _write(out / "metrics.json", figures)  # last: where it is, the rest is too
    return figures


def _write(path: Path, figures: dict[str, Any]) -> None:
    write_text(path, json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
