"""The Hub card of a trained policy: YAML for the Hub, and a text for people, with its part of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag import __version__
from reasonrag.core.documents import parse_json
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.models import ModelAddress
from reasonrag.core.text import one_line, printable, quoted
from reasonrag.dpo.preferences import HUB_NAME
from reasonrag.evaluation.tables import NAMES, Table, differences_table, results_table
from reasonrag.publish.hub_card import Yaml, escaped, fenced, mapping, number, render, versions
from reasonrag.publish.licences import UNKNOWN
from reasonrag.publish.policy import StagedPolicy
from reasonrag.publish.staged_files import settings_text
from reasonrag.storage.questions import HUB_REPOSITORY, splits_of_names

_TAGS = ["agentic-rag", "process-reward", "trl", "reasonrag"]
_STAGES = {
    "dpo": "direct preference optimisation",
    "sft": "supervised fine-tuning",
    "rl": "online reinforcement learning",
}
_HISTORY_ROWS = 10
# The columns of the history, by their keys in `training.json`.
_CURVES = {
    "loss": "loss",
    "rewards/margins": "reward margin",
    "rewards/accuracies": "reward accuracy",
    "mean_token_accuracy": "token accuracy",
    "rollout/reward": "reward",
    "rollout/em": "EM",
    "rollout/retrievals": "retrievals",
    "entropy": "entropy",
    "eval_loss": "held-out loss",
    "eval_rewards/accuracies": "held-out reward accuracy",
    "eval_em": "held-out EM",
}
_SHARES = ("em", "f1", "acc", "lasj")  # metrics between 0 and 1, for leaderboards
_SHOWN = ("em", "f1", "acc", "retrievals", "steps", "format_rate", "lasj", "osr", "usr")


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's part of an evaluation."""

    policy: str  # its name there
    verified: bool  # whether these very weights were evaluated; if not, a person named the policy
    datasets: list[str]
    split: Any
    read_by_name: list[str]  # the known data sets among `datasets`; the others are files
    first_setting: Mapping[str, Any]  # its metrics at the first setting
    results: Table  # means of the baseline and of this policy
    differences: Table  # paired differences of this policy from the baseline


def card(staged: StagedPolicy, *, repo_id: str, licence: str | None, measured: Measured | None) -> tuple[Yaml, str]:
    """Return the card's YAML, and its Markdown text: how to use the policy, metrics, training, limits and licence.

    Args:
        staged: the staged policy.
        repo_id: OWNER/NAME.
        licence: as the publisher gave it; None: the licence of the base model, if its folder names one.
        measured: its evaluation. Only metrics of these very weights enter the `model-index`.
    """
    from markupsafe import Markup

    training = staged.training
    stage = str(training.get("stage"))
    data: Yaml = {"license": licence or staged.base_licence or UNKNOWN}
    if staged.base_on_hub:
        relation = "adapter" if staged.kind == "adapter" else "finetune"
        data |= {"base_model": staged.base, "base_model_relation": relation}
    data["library_name"] = "peft" if staged.kind == "adapter" else "transformers"
    data["pipeline_tag"] = "text-generation"
    data["tags"] = [*_TAGS, *([stage] if stage in _STAGES else [])]
    if dataset := _dataset(staged):
        data["datasets"] = [dataset]
    if measured is not None and measured.verified:
        data["model-index"] = _model_index(repo_id, measured)

    training_data = {key: value for key, value in mapping(training, "data").items() if key != "lengths"}
    columns, history = _history(training)
    # Cells are escaped here: `Markup` keeps the template from escaping the tables again.
    differences = measured.differences if measured else None
    return data, render(
        "policy.md.j2",
        repo_id=repo_id,
        name=repo_id.partition("/")[2],
        staged=staged,
        stage=_STAGES.get(stage, training.get("stage")),
        training=training,
        model=mapping(training, "model"),
        data=fenced(settings_text(training_data).strip(), "yaml"),
        settings=fenced(settings_text(mapping(training, "settings")).strip(), "yaml"),
        columns=columns,
        history=history,
        versions=versions(training),
        measured=measured,
        results=Markup("\n".join(measured.results.markdown(escaped))) if measured else "",
        differences=Markup("\n".join(differences.markdown(escaped))) if differences and differences.rows else "",
        licence=licence or staged.base_licence,
        given=licence,
        version=__version__,
    )


def read_measured(report: Path, policy: Path, checksums: Sequence[str], named: str | None) -> Measured:
    """Return a policy's part of `REPORT/metrics.json`.

    Args:
        report: folder of an evaluation, or its `metrics.json`.
        policy: the policy's folder.
        checksums: of its weights.
        named: its name there; None: the policy with these weights, or a served one of the folder's name.

    Raises:
        ConfigError: there is no such policy, or it has other weights.
        DataError: it is not the `metrics.json` of an evaluation.
    """
    file = report / "metrics.json" if report.is_dir() else report
    try:
        metrics = parse_json(file.read_bytes())
        weights = {name: _weights(metrics, name) for name in metrics["policies"]}
        same_weights = [name for name, checksum in weights.items() if checksum in checksums]
        served = [name for name, checksum in weights.items() if checksum is None and name == policy.resolve().name]
        names = [named] if named is not None else same_weights or served
        # This builds all that the card shows, so that damaged metrics are refused here.
        measured = [_measured(metrics, name, name in same_weights) for name in names if name in weights]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise DataError(
            f"{file} is not a metrics.json of `reasonrag eval` ({type(error).__name__}); give its folder as --eval"
        ) from error
    known = ", ".join(map(quoted, weights))
    if named is not None and named not in weights:
        raise ConfigError(f"{file} has no policy {quoted(named)}; it has: {known}")
    if len(measured) != 1:
        raise ConfigError(f"{file} holds {len(measured)} policies of these weights; name one as --eval-policy: {known}")
    (one,) = measured
    if weights[one.policy] is not None and not one.verified:
        raise ConfigError(
            f"{file}: {quoted(one.policy)} was measured with weights {weights[one.policy]}, and those to publish are "
            f"{' or '.join(checksums)}; evaluate these"
        )
    return one


def _measured(metrics: Yaml, policy: str, verified: bool) -> Measured:
    """Build the tables of a policy and of the baseline, which is the first policy of the evaluation."""
    policies = next(iter(metrics["policies"])), policy
    settings = [setting for name in policies for setting in metrics["policies"][name].values()]
    shown = [metric for metric in _SHOWN if any(setting.get(metric) for setting in settings)]
    return Measured(
        policy,
        verified,
        datasets=[str(name) for name in metrics["dataset"]],
        split=metrics.get("split"),
        read_by_name=[name for name in metrics.get("splits") or {} if name != "demo"],
        first_setting=next(iter(metrics["policies"][policy].values())),
        results=results_table(metrics, shown, policies),
        differences=differences_table(metrics, shown, (policy,)),
    )


def _weights(metrics: Yaml, name: str) -> str | None:
    """Return the checksum of the folder that a policy was loaded from; None if a server answered for it."""
    address = ModelAddress.parse(str(metrics["content"]["policies"][name]["policy"]))
    name, at, checksum = address.rest.rpartition("@")
    is_folder = address.loads_weights and at and "/" not in name and len(checksum) == 12
    return checksum if is_folder else None


def _dataset(staged: StagedPolicy) -> str | None:
    """Return the Hub data set that the policy was trained on, or None if it is not on the Hub."""
    source = str(mapping(staged.training, "settings").get("data") or "")
    if staged.training.get("stage") == "rl" and splits_of_names(source, None).keys() - {"demo"}:
        return HUB_REPOSITORY
    hub_name = HUB_NAME.fullmatch(source) if source == mapping(staged.training, "data").get("source") else None
    return hub_name["name"] if hub_name and "/" in hub_name["name"] else None


def _model_index(repo_id: str, measured: Measured) -> list[Yaml]:
    """Return the first setting's metrics, as the library that reads them writes them."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    names = ", ".join(printable(one_line(name)) for name in measured.datasets)[:80] or UNKNOWN
    known = names in measured.read_by_name
    split = measured.split
    results = [
        EvalResult(
            task_type="question-answering",
            dataset_type=HUB_REPOSITORY if known else names,
            dataset_name=names,
            dataset_config=names if known else None,
            dataset_split=printable(one_line(split))[:40] if isinstance(split, str) else None,
            metric_type=metric,
            metric_name=NAMES[metric],
            metric_value=float(measured.first_setting[metric]["mean"]),
        )
        for metric in _SHARES
        if measured.first_setting.get(metric)
    ]
    index: list[Yaml] = eval_results_to_model_index(repo_id.partition("/")[2], results)
    return index


def _history(training: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and the metrics at about ten steps from the first to the last."""
    entries = training.get("history")
    metrics_by_step: dict[Any, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else ():
        known = {key: entry[key] for key in _CURVES if _is_number(entry.get(key))} if isinstance(entry, dict) else {}
        if known:
            metrics_by_step.setdefault(entry.get("step"), {}).update(known)
    keys = [key for key in _CURVES if any(key in metrics for metrics in metrics_by_step.values())]
    last = len(metrics_by_step) - 1
    every = max(1, -(-last // (_HISTORY_ROWS - 1)))
    rows = []
    for index, (step, metrics) in enumerate(metrics_by_step.items()):
        if index % every == 0 or index == last:
            rows.append([str(step), *(number(metrics[key]) if key in metrics else "–" for key in keys)])
    return [_CURVES[key] for key in keys], rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
