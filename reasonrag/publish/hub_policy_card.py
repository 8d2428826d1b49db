"""The Hub card of a trained policy: YAML for the Hub, and a text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reasonrag import __version__
from reasonrag.core.text import one_line, printable
from reasonrag.dpo.preferences import HUB_NAME
from reasonrag.evaluation.tables import NAMES
from reasonrag.publish.evaluation_results import Measured
from reasonrag.publish.hub_card import Yaml, escaped, fenced, mapping, number, render, versions
from reasonrag.publish.licences import UNKNOWN, source_of
from reasonrag.publish.policy import StagedPolicy
from reasonrag.publish.staged_files import settings_text
from reasonrag.storage.questions import HUB_REPOSITORY

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


def card_data(staged: StagedPolicy, *, repo_id: str, licence: str | None, measured: Measured | None) -> Yaml:
    """Return the card's YAML.

    Args:
        staged: the staged policy.
        repo_id: OWNER/NAME.
        licence: as the publisher gave it; None: the licence of the base model, if its folder names one.
        measured: its evaluation. Only metrics of these very weights enter the `model-index`.
    """
    data: Yaml = {"license": licence or staged.base_licence or UNKNOWN}
    if staged.base_on_hub:
        data |= {
            "base_model": staged.base,
            "base_model_relation": "adapter" if staged.kind == "adapter" else "finetune",
        }
    data["library_name"] = "peft" if staged.kind == "adapter" else "transformers"
    data["pipeline_tag"] = "text-generation"
    stage = str(staged.training.get("stage"))
    data["tags"] = [*_TAGS, *([stage] if stage in _STAGES else [])]
    if dataset := _dataset(staged):
        data["datasets"] = [dataset]
    if measured is not None and measured.verified:
        data["model-index"] = _model_index(repo_id, measured)
    return data


def card_body(staged: StagedPolicy, *, repo_id: str, licence: str | None, measured: Measured | None) -> str:
    """Return the card's Markdown text: how to use the policy, metrics, training, limits and licence."""
    from markupsafe import Markup

    training = staged.training
    data = {key: value for key, value in mapping(training, "data").items() if key != "lengths"}
    columns, history = _history(training)
    # Cells are escaped here: `Markup` keeps the template from escaping the tables again.
    differences = measured.differences if measured else None
    return render(
        "policy.md.j2",
        repo_id=repo_id,
        name=repo_id.partition("/")[2],
        staged=staged,
        stage=_STAGES.get(str(training.get("stage")), training.get("stage")),
        training=training,
        model=mapping(training, "model"),
        data=fenced(settings_text(data).strip(), "yaml"),
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


def _dataset(staged: StagedPolicy) -> str | None:
    """Return the Hub data set that the policy was trained on, or None if it is not on the Hub."""
    source = str(mapping(staged.training, "data").get("source") or "")
    if source_of(source).hub == HUB_REPOSITORY:
        return HUB_REPOSITORY
    hub_name = HUB_NAME.fullmatch(source) if source == mapping(staged.training, "settings").get("data") else None
    return hub_name["name"] if hub_name and "/" in hub_name["name"] else None


def _model_index(repo_id: str, measured: Measured) -> list[Yaml]:
    """Return the first setting's metrics, as the library that reads them writes them."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    metrics = measured.metrics
    names = ", ".join(printable(one_line(str(name))) for name in metrics["dataset"])[:80] or UNKNOWN
    first_setting = next(iter(metrics["policies"][measured.policy].values()))
    known = source_of(names).hub == HUB_REPOSITORY
    split = metrics.get("split")
    results = [
        EvalResult(
            task_type="question-answering",
            dataset_type=HUB_REPOSITORY if known else names,
            dataset_name=names,
            dataset_config=names if known else None,
            dataset_split=printable(one_line(split))[:40] if isinstance(split, str) else None,
            metric_type=metric,
            metric_name=NAMES[metric],
            metric_value=float(first_setting[metric]["mean"]),
        )
        for metric in _SHARES
        if first_setting.get(metric)
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
