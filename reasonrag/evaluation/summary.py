"""Outcomes to metrics: means with intervals, by kind of question, and paired differences from the first policy.

OSR and USR are ratios of sums over all known steps of a set (HiPRAG, eq. 2), not means over questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reasonrag.core.bootstrap import Column, Difference, Measure, Ratio, add_adjusted, group_intervals
from reasonrag.core.config import Config
from reasonrag.core.text import Rules, cover_match, normalize_answer
from reasonrag.core.types import Question
from reasonrag.evaluation.metrics import COUNTED_AS, METRICS, Attempt, Metric, Value, Verdicts, kind
from reasonrag.storage.folder import versions
from reasonrag.storage.questions import splits_of_names

Metrics = dict[str, Any]

# ("mean" or "difference", policy, number of the setting, metric)
Key = tuple[str, str, int, str]
Intervals = Mapping[str, Mapping[Key, Metrics | None]]  # by group of questions; "" is all of them

_MOST_LOST = 0.1  # a line warns if a larger share of the attempts loses points to their form
_MARKS = str.maketrans("<>{}[]", "      ")  # normalising would join a tag to the word in it
UNNAMED = "other"  # kind of the questions that have none, if others have one


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a sweep: temperature, step limit, passages per search, and the candidates to choose from.

    `choice` is the part of the name for them: candidates for
    each step, and the rule that keeps one of the attempts.
    `max_searches` None leaves the searches to the step limit.
    """

    temperature: float
    max_steps: int
    top_k: int
    choice: str = ""
    max_searches: int | None = None

    @property
    def name(self) -> str:
        """The name of the point in files and tables.

        >>> Setting(0.7, 8, 3).name
        't0.7_s8_k3'
        >>> Setting(1, 8, 3, "_c4_prm-of-2").name
        't1_s8_k3_c4_prm-of-2'
        >>> Setting(0, 8, 3, max_searches=2).name
        't0_s8_r2_k3'
        """
        searches = "" if self.max_searches is None else f"_r{self.max_searches}"
        return f"t{self.temperature:.12g}_s{self.max_steps}{searches}_k{self.top_k}{self.choice}"


@dataclass(slots=True)
class Outcome:
    """Scores of one policy at one setting; a question is named by its index in the list of questions."""

    setting: Setting
    values: list[dict[str, Value] | None]  # [n] `attempt_values`; None if the question failed or was not tried
    verdicts: list[Verdicts | None]  # [n]; likewise
    failures: dict[int, str] = field(default_factory=dict)  # cause of each failed question
    ends: Counter[str] = field(default_factory=Counter)  # attempts by stop reason
    out_of_form: Counter[str] = field(default_factory=Counter)  # attempts that are not well-formed, by reason
    lost: int = 0  # of these, attempts without an exact match whose last reply holds a golden answer
    asked: Counter[str] = field(default_factory=Counter)  # requests to a judge, as `Examiner.examine` counts them

    def add(self, index: int, attempt: Attempt, values: dict[str, Value]) -> None:
        """Count a finished attempt at the question at `index`."""
        self.values[index] = values
        self.verdicts[index] = attempt.verdicts
        self.ends[str(attempt.trajectory.stop_reason)] += 1
        if attempt.reading is not None and not attempt.reading.well_formed:
            self.out_of_form[attempt.reading.reason] += 1
            reply = attempt.trajectory.steps[-1].completion.text.translate(_MARKS)
            golden = attempt.trajectory.question.golden_answers
            named = [answer for answer in golden if normalize_answer(answer) not in ("yes", "no")]
            self.lost += not values["em"] and cover_match(reply, named) == 1


@dataclass(slots=True)
class PolicyResult:
    """Outcomes of one policy at all settings, in the order of the sweep."""

    name: str
    config: Config
    content: Mapping[str, str]
    outcomes: list[Outcome]
    calls: dict[str, Any]  # all calls in the policy's folder, over all processes
    judge: dict[str, Any] | None = None  # model, prompts and metrics of the judge


def summarize(results: Sequence[PolicyResult], questions: Sequence[Question], *, rules: Rules) -> Metrics:
    """Return the contents of `metrics.json` for at least one policy; the first is the baseline.

    Settings of two policies are paired by their position in the sweep,
    so policies that differ in their own settings (such as another
    top-k) can be compared; `baseline_setting` names the baseline's.

    Returns:
        The metrics of the first policy at its first setting; under `policies` the metrics of all policies
        and settings; `differences`, one row per policy, setting and metric; and the settings of the run.
    """
    first = results[0]
    splits = splits_of_names(first.config.questions.dataset or "", first.config.questions.split)
    groups = _groups(questions)
    # All columns at once: those of the same questions share their resamples, which take most of the time.
    columns = dict(_columns(results))
    intervals = {by: group_intervals(columns, of_by, seed=first.config.seed) for by, of_by in groups.items()}
    policies: dict[str, Metrics] = {result.name: {} for result in results}
    settings: dict[str, list[Metrics]] = {result.name: [] for result in results}
    incomplete: list[Metrics] = []
    unjudged: list[Metrics] = []
    failures: list[Metrics] = []
    for result, point, outcome, _ in _points(results):
        name = outcome.setting.name
        settings[result.name].append({"name": name, **asdict(outcome.setting)})
        here = {"policy": result.name, "setting": name}
        metrics: Metrics = {**here}
        names = [metric.name for metric in _computed(result)]
        for by, of_by in groups.items():
            metrics[by] = {}
            for group, members in of_by.items():
                means = intervals[by][group]
                metrics[by][group] = {name: means["mean", result.name, point, name] for name in names}
                if group:
                    metrics[by][group]["questions"] = len(members)
        scored, total = outcome.ends.total(), len(outcome.values)
        metrics |= metrics["by_kind"].pop("") | {
            "questions": {"total": total, "scored": scored, "not_tried": total - scored - len(outcome.failures)},
            "failed": dict(sorted(Counter(outcome.failures.values()).items())),
            "ends": dict(sorted(outcome.ends.items())),
            "out_of_form": dict(sorted(outcome.out_of_form.items())),
        }
        if result.judge:
            metrics["judged"] = _judged(result.judge["metrics"], outcome)
        policies[result.name][name] = metrics
        if total - scored > result.config.run.max_failed * total:
            incomplete.append(here | {"missing": total - scored, "causes": metrics["failed"]})
        unjudged += [here | row for row in _unjudged(result, outcome, metrics.get("judged", {}))]
        for index, cause in sorted(outcome.failures.items()):
            question = {"dataset": questions[index].dataset, "question_id": questions[index].id}
            failures.append(here | question | {"cause": cause})
    content = _content(results)
    return {
        **policies[first.name][first.outcomes[0].setting.name],
        "policies": policies,
        "settings": settings,
        "differences": _differences(results, intervals["by_kind"]),
        "incomplete": incomplete,
        "unjudged": unjudged,
        "failures": failures,
        "judge": first.judge,
        "dataset": sorted({question.dataset for question in questions}),
        "split": ", ".join(dict.fromkeys(splits.values())) or None,
        "splits": splits,  # of the data sets that were read by their names; the others are files
        "seed": first.config.seed,
        "rules": rules,
        "content": content,
        "asked_differently": list(asked_differently(content["policies"])),
        "lost_to_form": list(_lost_to_form(results)),
        "calls": {result.name: result.calls for result in results},
        "versions": versions(),
    }


def _points(results: Sequence[PolicyResult]) -> Iterator[tuple[PolicyResult, int, Outcome, Outcome | None]]:
    """Yield every policy at each of its settings, with the number of the setting and the baseline to compare with."""
    for result in results:
        for point, outcome in enumerate(result.outcomes):
            yield result, point, outcome, _baseline(results[0], result, point)


def _computed(result: PolicyResult) -> list[Metric]:
    """Return the metrics that a policy was evaluated by, in the order of the registry."""
    judged = result.judge["metrics"] if result.judge else ()
    return [metric for metric in METRICS.values() if not metric.judged or metric.name in judged]


def _columns(results: Sequence[PolicyResult]) -> Iterator[tuple[Key, Measure]]:
    """Yield every column that needs an interval, `[n]` over the questions."""
    for result, point, outcome, baseline in _points(results):
        for metric in _computed(result):
            column = _column(outcome, metric)
            yield ("mean", result.name, point, metric.name), column
            if baseline is not None:
                yield ("difference", result.name, point, metric.name), Difference(column, _column(baseline, metric))


def _baseline(baseline: PolicyResult, result: PolicyResult, point: int) -> Outcome | None:
    """Return the outcome to compare a policy with at a setting: the baseline's; for itself, that of its first rule."""
    # A policy with fewer settings of its own is compared at the same place again.
    there = baseline.outcomes[point % len(baseline.outcomes)]
    if result.outcomes[point] is not there:
        return there
    for outcome in baseline.outcomes:
        if replace(outcome.setting, choice=there.setting.choice) == there.setting:
            return None if outcome is there else outcome
    return None


def _column(outcome: Outcome, metric: Metric) -> Column | Ratio:
    """Return `[n]` values by question, numerators and denominators of a rate; None if the question has none."""
    columns = [[values[name] if values else None for values in outcome.values] for name in metric.parts]
    return columns[0] if metric.whole is None else Ratio(*columns)


def _groups(questions: Sequence[Question]) -> dict[str, dict[str, Sequence[int]]]:
    """Return the indices of the questions of each group.

    Those `by_kind` are all questions under "", and those of each kind if the data set names kinds;
    `by_dataset` there are groups if there are several data sets.
    """
    by_kind: dict[str, list[int]] = {}
    by_dataset: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_kind.setdefault(kind(question) or UNNAMED, []).append(index)
        by_dataset.setdefault(question.dataset, []).append(index)
    named = sorted(by_kind.items()) if set(by_kind) != {UNNAMED} else ()
    return {
        "by_kind": {"": range(len(questions)), **dict(named)},
        "by_dataset": {**by_dataset} if len(by_dataset) > 1 else {},
    }


def _lost_to_form(results: Sequence[PolicyResult]) -> Iterator[str]:
    """Yield a line for each policy and setting that loses points to the form of its replies."""
    for result, _, outcome, _ in _points(results):
        unread, scored = outcome.ends["no_answer"], outcome.ends.total()
        if max(unread, outcome.lost) > _MOST_LOST * scored:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(outcome.out_of_form.items()))
            yield (
                f"{result.name} at {outcome.setting.name} loses points to the format: "
                f"of {scored} attempts {unread} end without an answer that can be read, and {outcome.lost} score no "
                f"exact match though the last reply holds a golden answer (out of form: {reasons})"
            )


def _judged(metrics: Sequence[str], outcome: Outcome) -> Metrics:
    """Count the known and unknown verdicts of each metric, and the failures among the unknown, by cause.

    Verdicts are about answers (a missing answer is wrong and costs
    no call), searches, and steps without a search. A step without
    a statement is unknown, but not a failure. `regenerated` counts
    the queries that the policy had to answer without a search.
    """
    counts: Metrics = {}
    for metric in metrics:
        known = unknown = 0
        # Answers are counted by request: an attempt without an answer is wrong, and is not asked about.
        if metric in ("lasj", "outcome"):
            unknown = outcome.asked[f"{COUNTED_AS[metric]}.unknown"]
            known = outcome.asked[f"{COUNTED_AS[metric]}.asked"] - unknown
        for verdicts in outcome.verdicts:
            steps = {"osr": verdicts.searches, "usr": verdicts.own_steps}.get(metric) if verdicts else None
            if steps is not None:
                known += steps.known
                unknown += steps.unknown
        # Failures of the judge, or of the policy when it was asked without a search, by cause.
        failed = {}
        for name, count in sorted(outcome.asked.items()):
            detector, _, cause = name.partition(".")
            if detector == COUNTED_AS[metric] and count and cause not in ("asked", "unknown", "silent"):
                failed[cause] = count
        counts[metric] = {"known": known, "unknown": unknown, "failed": failed}
    return {**counts, "regenerated": outcome.asked["regenerated"]}


def _differences(results: Sequence[PolicyResult], intervals: Intervals) -> list[Metrics]:
    """Return the differences of all metrics; `p_adjusted` is adjusted for as many as have a value."""
    rows: list[Metrics] = []
    unknown = {"mean": None, "low": None, "high": None, "n": 0}
    for result, point, outcome, baseline in _points(results):
        for metric in _computed(result) if baseline is not None else ():
            key = ("difference", result.name, point, metric.name)
            by_group = {group: of_group[key] for group, of_group in intervals.items()}
            row = {
                "policy": result.name,
                "baseline": results[0].name,
                "setting": outcome.setting.name,
                "baseline_setting": baseline.setting.name if baseline else "",
                "metric": metric.name,
            }
            rows.append(row | (by_group.pop("") or unknown) | {"by_kind": by_group})
    add_adjusted([row for row in rows if row["mean"] is not None])
    return rows


def _unjudged(result: PolicyResult, outcome: Outcome, judged: Metrics) -> Iterator[Metrics]:
    """Yield the metrics for which more verdicts failed than `run.max_failed` allows: the known ones may be biased.

    It is a share of the verdicts, or of the questions if few
    have a verdict: one failure of nine is not an outage.
    """
    for metric in result.judge["metrics"] if result.judge else ():
        failed = sum(judged[metric]["failed"].values())
        asked = outcome.asked[f"{COUNTED_AS[metric]}.asked"]
        if failed > result.config.run.max_failed * max(asked, len(outcome.values)):
            yield {"metric": metric, "failed": failed, "asked": asked}


def _content(results: Sequence[PolicyResult]) -> Metrics:
    """Return checksums and settings of the run, without any path."""
    policies = {}
    for result in results:
        described = {"policy": result.content["policy"], **how_asked(result.config, result.content["prompts"])}
        if "prm" in result.content:
            described["prm"] = result.content["prm"]
        if result.judge:
            described["judge_prompts"] = result.judge["prompts"]
        policies[result.name] = described
    first = results[0].content
    return {"questions": first["questions"], "corpus": first["corpus"], "policies": policies}


def how_asked(config: Config, prompts: str) -> Metrics:
    """Return what decides how a policy is asked at the first of its settings; `prompts` is the format's fingerprint."""
    return {
        "prompts": prompts,
        "format": config.format.name,
        "max_steps": config.format.max_steps,
        "top_k": config.retrieval.top_k,
        "top_p": config.policy.top_p,
        "max_tokens": config.policy.max_tokens,
        "passage_order": config.retrieval.passage_order,
    }


def asked_differently(policies: Mapping[str, Metrics]) -> Iterator[str]:
    """Yield a sentence per policy that is prompted differently from the first: that alone may make a difference."""
    # Names of models differ by intention; everything else is compared.
    baseline, usual = next(iter(policies.items()))
    for name, asked in policies.items():
        if changed := [key for key in asked if key != "policy" and asked[key] != usual[key]]:
            changes = ", ".join(f"{key}={asked[key]} ({baseline}: {usual[key]})" for key in changed)
            yield f"{name} is prompted differently from {baseline}: {changes}"
