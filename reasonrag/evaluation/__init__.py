"""Policies to scored trajectories, and a report: how good, how many searches, how sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import Config
from reasonrag.core.text import Rules

if TYPE_CHECKING:
    from reasonrag.evaluation.judged import Judging
    from reasonrag.evaluation.run import Show


def evaluate(
    configs: Mapping[str, Config],
    out: Path,
    *,
    temperatures: Sequence[float] | None = None,
    max_steps: Sequence[int] | None = None,
    top_ks: Sequence[int] | None = None,
    rules: Rules = "house",
    judging: Judging | None = None,
    show: Show | None = None,
) -> dict[str, Any]:
    """Run policies on their questions, at every combination of settings, and report.

    Calls that an earlier evaluation in the same folder has paid for are not made again, whatever its settings were.

    Args:
        configs: by name, which is the name of a folder in `out`; the first policy is the baseline. All of them share
            questions, corpus and seed.
        out: the evaluation's folder.
        temperatures: to sweep; as configured where None. 0 is greedy.
        max_steps: likewise, actions of a trajectory.
        top_ks: likewise, passages per search.
        rules: of EM, F1 and ACC.
        judging: a judge, and which of LasJ, OSR and USR it is asked for; none of them where None.
        show: a context manager that is entered, within the event loop, around the work of each policy. It is given the
            `Evaluation`: `progress` to show, `drain` to call on Ctrl-C.

    Returns:
        What `metrics.json` holds. `incomplete` names the settings at which more questions are missing than
        `run.max_failed` allows, `unjudged` those at which more verdicts are.

    Raises:
        Interrupted: `drain` was called; the same call goes on from there.
        ConfigError, DataError, RunError, LLMError, RetrievalError: one clear line.
    """
    from reasonrag.evaluation.run import Evaluation
    from reasonrag.evaluation.save import save

    evaluation = Evaluation(
        configs,
        out,
        temperatures=temperatures,
        max_steps=max_steps,
        top_ks=top_ks,
        rules=rules,
        judging=judging,
    )
    results = evaluation.run(show)
    return save(results, evaluation.questions, out, rules=rules)
