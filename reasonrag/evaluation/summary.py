"""Outcomes to figures: means with intervals, by kind of question, and paired differences from the first policy.

OSR and USR are ratios of sums over all known steps of a set (HiPRAG, eq. 2), not means over questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from reasonrag.core.text import Rules
from reasonrag.core.types import Question
from reasonrag.evaluation.bootstrap import Column, Interval, Ratio, intervals, subtract
from reasonrag.evaluation.judged import COUNTED_AS
from reasonrag.evaluation.metrics import METRICS, hops, kind
from reasonrag.storage.runs import versions

if TYPE_CHECKING:
    from reasonrag.evaluation.run import Outcome, PolicyResult

Figures = dict[str, Any]

# ("mean", policy, point, metric), or ("difference", policy, point, metric)
Key = tuple[str, str, int, str]

RATES = ("osr", "usr")
UNNAMED = "other"  # the kind of questions without one, where others have one


def summarize(results: Sequence[PolicyResult], questions: Sequence[Question], *, rules: Rules) -> Figures:
    """What `metrics.json` holds.

    Points of a sweep are paired by their place in it, so policies that are asked with different settings of their own
    (such as another top-k) are compared each in its own way; `baseline_setting` says which.

    Args:
        results: at least one; the first is the baseline.
        questions: of all of them.
        rules: by which they were scored, for the record.

    Returns:
        The figures of the first policy at its first setting, flat; all of them under `policies`, by policy and setting;
        `differences`, one row a policy, setting and metric; and what was run.
    """
    first = results[0]
    columns = dict(_columns(results))
    groups = _groups(questions)
    found = {
        name: intervals({key: _at(column, places) for key, column in columns.items()}, seed=first.config.seed)
        for name, places in groups.items()
    }
    policies = {
        result.name: {
            outcome.setting.name: _figures(result, point, outcome, found, groups, questions)
            for point, outcome in enumerate(result.outcomes)
        }
        for result in results
    }
    return {
        **policies[first.name][first.outcomes[0].setting.name],
        "policies": policies,
        "settings": {result.name: [o.setting.summary() for o in result.outcomes] for result in results},
        "differences": list(_differences(results, found)),
        "incomplete": list(_incomplete(results, len(questions))),
        "unjudged": list(_unjudged(results)),
        "judge": first.judge,
        "dataset": sorted({question.dataset for question in questions}),
        "split": first.config.questions.split,
        "seed": first.config.seed,
        "rules": rules,
        "content": (content := _content(results)),
        "asked_differently": list(_asked_differently(content["policies"], first.name)),
        "calls": {result.name: result.calls for result in results},
        "versions": versions(),
    }


def failures(result: PolicyResult, questions: Sequence[Question]) -> list[Figures]:
    """Every question that was set aside, with its cause."""
    return [
        {
            "setting": outcome.setting.name,
            "dataset": questions[place].dataset,
            "question_id": questions[place].id,
            "cause": cause,
        }
        for outcome in result.outcomes
        for place, cause in sorted(outcome.failures.items())
    ]


def metrics_of(result: PolicyResult) -> tuple[str, ...]:
    """Those that it has figures of."""
    return (*METRICS, *(result.judge["metrics"] if result.judge else ()))


def _columns(results: Sequence[PolicyResult]) -> Iterator[tuple[Key, Column | Ratio]]:
    """Every column that needs an interval, `[n]` over the questions."""
    baseline = results[0]
    for result in results:
        for point, outcome in enumerate(result.outcomes):
            for metric in metrics_of(result):
                yield ("mean", result.name, point, metric), _column(outcome, metric)
                if result is not baseline:
                    pair = _difference(outcome, baseline.outcomes[point], metric)
                    yield ("difference", result.name, point, metric), pair


def _column(outcome: Outcome, metric: str) -> Column | Ratio:
    return _rate(outcome, metric) if metric in RATES else _values(outcome, metric)


def _difference(outcome: Outcome, baseline: Outcome, metric: str) -> Column | Ratio:
    if metric in RATES:
        return replace(_rate(outcome, metric), minus=_rate(baseline, metric))
    return subtract(_values(outcome, metric), _values(baseline, metric))


def _values(outcome: Outcome, metric: str) -> Column:
    if metric == "lasj":
        return [found.lasj if found else None for found in outcome.verdicts]
    return [scores[metric] if scores else None for scores in outcome.scores]


def _rate(outcome: Outcome, metric: str) -> Ratio:
    steps = [found.steps(metric) if found else None for found in outcome.verdicts]
    return Ratio([s.suboptimal if s else None for s in steps], [s.known if s else None for s in steps])


def _at(column: Column | Ratio, places: Sequence[int]) -> Column | Ratio:
    return column.take(places) if isinstance(column, Ratio) else [column[place] for place in places]


def _groups(questions: Sequence[Question]) -> dict[str, list[int]]:
    """Places of all questions under "", and of each kind, where the data set names kinds."""
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(kind(question) or UNNAMED, []).append(place)
    kinds = {} if set(groups) == {UNNAMED} else dict(sorted(groups.items()))
    return {"": list(range(len(questions))), **kinds}


def _figures(
    result: PolicyResult,
    point: int,
    outcome: Outcome,
    found: Mapping[str, Mapping[Key, Interval | None]],
    groups: Mapping[str, Sequence[int]],
    questions: Sequence[Question],
) -> Figures:
    """Of one policy at one setting."""

    def metrics(group: str) -> Figures:
        return {metric: _plain(found[group]["mean", result.name, point, metric]) for metric in metrics_of(result)}

    by_kind = {
        name: {**metrics(name), "hops": _mean_hops([questions[place] for place in places]), "questions": len(places)}
        for name, places in groups.items()
        if name
    }
    scored, total = outcome.ends.total(), len(questions)
    return {
        "policy": result.name,
        "setting": outcome.setting.name,
        **metrics(""),
        "by_kind": by_kind,
        "questions": {"total": total, "scored": scored, "not_tried": total - scored - len(outcome.failures)},
        "failed": dict(sorted(Counter(outcome.failures.values()).items())),
        "ends": dict(sorted(outcome.ends.items())),
        "out_of_form": dict(sorted(outcome.out_of_form.items())),
        **({"judged": _judged(result.judge["metrics"], outcome)} if result.judge else {}),
    }


def _judged(metrics: Sequence[str], outcome: Outcome) -> Figures:
    """Of each metric how many verdicts there are, how many are unknown, and which of these are failures, by cause.

    The verdicts are on answers (attempts without one are wrong and cost no call), searches, and steps without a search.
    A step that says nothing is unknown too, and no failure. `regenerated`: queries that the policy was asked without a
    search.
    """
    verdicts = [found for found in outcome.verdicts if found is not None]
    known: dict[str, int] = {"lasj": outcome.asked["answer.asked"] - outcome.asked["answer.unknown"]}
    unknown: dict[str, int] = {"lasj": outcome.asked["answer.unknown"]}
    for metric in RATES:
        steps = [counts for found in verdicts if (counts := found.steps(metric))]
        known[metric] = sum(counts.known for counts in steps)
        unknown[metric] = sum(counts.unknown for counts in steps)
    return {
        **{
            metric: {"known": known[metric], "unknown": unknown[metric], "failed": _causes(outcome, metric)}
            for metric in metrics
        },
        "regenerated": outcome.asked["regenerated"],
    }


def _causes(outcome: Outcome, metric: str) -> dict[str, int]:
    """Failures of the judge, or of the policy when it was asked without a search, by cause."""
    prefix = f"{COUNTED_AS[metric]}."
    found = {name.removeprefix(prefix): n for name, n in outcome.asked.items() if n and name.startswith(prefix)}
    return {cause: found[cause] for cause in sorted(found) if cause not in ("asked", "unknown")}


def _differences(
    results: Sequence[PolicyResult], found: Mapping[str, Mapping[Key, Interval | None]]
) -> Iterator[Figures]:
    baseline, *others = results
    for result in others:
        for point, outcome in enumerate(result.outcomes):
            for metric in metrics_of(result):
                key = ("difference", result.name, point, metric)
                whole = found[""][key]
                yield {
                    "policy": result.name,
                    "baseline": baseline.name,
                    "setting": outcome.setting.name,
                    "baseline_setting": baseline.outcomes[point].setting.name,
                    "metric": metric,
                    **(asdict(whole) if whole else {"mean": None, "low": None, "high": None, "n": 0}),
                    "by_kind": {name: _plain(of_group[key]) for name, of_group in found.items() if name},
                }


def _incomplete(results: Sequence[PolicyResult], total: int) -> Iterator[Figures]:
    """Settings at which more questions are missing than `run.max_failed` allows."""
    for result in results:
        for outcome in result.outcomes:
            missing = total - outcome.ends.total()
            if missing > result.config.run.max_failed * total:
                yield {"policy": result.name, "setting": outcome.setting.name, "missing": missing}


def _unjudged(results: Sequence[PolicyResult]) -> Iterator[Figures]:
    """Settings at which more verdicts failed than `run.max_failed` allows: the others may be of another kind.

    It is a share of the verdicts, or of the questions where few of them have any: one of nine is no outage.
    """
    for result in results:
        for outcome in result.outcomes:
            for metric in result.judge["metrics"] if result.judge else ():
                failed = sum(_causes(outcome, metric).values())
                asked = outcome.asked[f"{COUNTED_AS[metric]}.asked"]
                if failed > result.config.run.max_failed * max(asked, len(outcome.scores)):
                    at = {"policy": result.name, "setting": outcome.setting.name, "metric": metric}
                    yield {**at, "failed": failed, "asked": asked}


def _content(results: Sequence[PolicyResult]) -> Figures:
    """Checksums of what was run, without any path."""
    return {
        **{name: results[0].content[name] for name in ("questions", "corpus")},
        "policies": {
            result.name: {
                "policy": result.content["policy"],
                "prompts": result.content["prompts"],
                "format": result.config.format.name,
                "top_p": result.config.policy.top_p,
                "max_tokens": result.config.policy.max_tokens,
                "passage_order": result.config.retrieval.passage_order,
                **({"judge_prompts": result.judge["prompts"]} if result.judge else {}),
            }
            for result in results
        },
    }


def _asked_differently(policies: Mapping[str, Figures], baseline: str) -> Iterator[str]:
    """In words, how a policy is asked otherwise than the baseline: a difference may come from that alone."""
    usual = policies[baseline]
    for name, asked in policies.items():
        changed = [key for key in asked if key != "policy" and asked[key] != usual[key]]
        if changed:
            told = ", ".join(f"{key} {asked[key]} ({usual[key]})" for key in changed)
            yield f"{name} is asked otherwise than {baseline}: {told}"


def _mean_hops(questions: Sequence[Question]) -> float | None:
    """Searches that these questions need, on average; None unless the data set says it of all of them."""
    known = [needed for question in questions if (needed := hops(question)) is not None]
    return round(fmean(known), 4) if known and len(known) == len(questions) else None


def _plain(interval: Interval | None) -> Figures | None:
    return None if interval is None else asdict(interval)
