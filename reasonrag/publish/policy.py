"""Stage a trained policy for the Hub: weights, tokenizer, its settings file, how it was trained, and its card.

Checkpoints, optimizer states, pickles (`*.bin`), journals and rollouts are never published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reasonrag.core.config import POLICY_CARD
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.models import ModelAddress
from reasonrag.core.table import inert_markdown
from reasonrag.core.text import one_line, parse_json, printable, quoted
from reasonrag.dpo.preferences import HUB_NAME
from reasonrag.evaluation.metrics import METRICS
from reasonrag.evaluation.tables import differences_table, results_table
from reasonrag.llm.model_folder import model_checksum
from reasonrag.publish.card import UNKNOWN, Yaml, fenced_yaml, mapping, place_json, render
from reasonrag.publish.verify import verify
from reasonrag.storage.files import place, write_json
from reasonrag.storage.questions import HUB_REPOSITORY, splits_of_names
from reasonrag.training.folder import MERGED, SUMMARY, check_trained, finished, without_places, written_files

_ADAPTER = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_MODEL = (
    *(*_WEIGHTS, _ADAPTER, "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", POLICY_CARD, "prompts/*/*.txt"),
)
_CURVES = "curves.svg"
OWNED = (*_MODEL, _CURVES, SUMMARY)

_TAGS = ["agentic-rag", "process-reward", "trl", "reasonrag"]
_STAGES = {
    "dpo": "direct preference optimisation",
    "sft": "supervised fine-tuning",
    "rl": "online reinforcement learning",
}
_SHARES = ("em", "f1", "acc", "lasj")  # metrics between 0 and 1, for leaderboards
# Keys under which transformers and peft store the source of a model.
_SOURCE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
_FILES_WITH_SOURCE = (_ADAPTER, "config.json", "generation_config.json", "tokenizer_config.json")
_FOLDER_CHECKSUM = re.compile(r"[^/]+@[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class StagedPolicy:
    """A policy in the folder to upload, and facts for its card."""

    training: dict[str, Any]  # the content of its `training.json`
    kind: Literal["adapter", "merged", "full"]  # an adapter, an adapter merged into its model, or all weights
    base: str  # the model that the training run started from: its Hub id, or the name of a local folder
    base_on_hub: bool  # whether `base` is a Hub id
    has_curves: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's part of an evaluation."""

    policy: str  # its name there
    verified: bool  # whether these very weights were evaluated; if not, a person named the policy
    datasets: str  # their names
    split: str
    first_setting: Mapping[str, Any]  # its metrics at the first setting
    results: str  # Markdown: means of the baseline and of this policy
    differences: str  # Markdown: paired differences of this policy from the baseline; empty if it has no baseline


def stage_policy(path: Path, folder: Path, *, merged: bool) -> StagedPolicy:
    """Copy the published files of a finished training run into a folder.

    Args:
        path: folder of the training run.
        folder: to fill.
        merged: publish the adapter merged into its model (`PATH/merged`), not the adapter.

    Raises:
        RunError: the training run has not finished, or nothing was merged.
        DataError: it has no weights in safetensors, its files cannot be read, or they changed since training.
    """
    training = finished(path)
    if training is None:
        raise RunError(
            f"{path} holds no finished training run ({SUMMARY} is missing or cannot be read); the same command "
            "finishes it"
        )
    check_trained(path)
    weights = path / MERGED if merged else path
    if merged and not (weights / "config.json").is_file():
        raise RunError(f"{path} has no folder {MERGED}; train with --merge, or publish without --merged")
    if not any(any(weights.glob(name)) for name in _WEIGHTS[:-1]):
        raise DataError(f"{weights} holds no weights in safetensors (pickles are not published); save them so")
    for pattern in _MODEL:
        for source in weights.glob(pattern):
            if source.is_file():
                _place_model_file(source, folder / source.relative_to(weights))
    if (path / _CURVES).is_file():
        place(path / _CURVES, folder / _CURVES)
    place_json(training | {"files": written_files(folder)}, folder / SUMMARY)
    verify(folder).refuse_grave()
    model = mapping(training, "model")
    base, checksum = str(model.get("name") or UNKNOWN), str(model.get("checksum") or "")
    # The checksum of a local folder starts with its name.
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base, re.ASCII) and not _FOLDER_CHECKSUM.fullmatch(checksum)
    on_hub = bool(checksum and is_id)
    kind: Literal["adapter", "merged", "full"] = "full"
    if (path / _ADAPTER).is_file():
        kind = "merged" if merged else "adapter"
    return StagedPolicy(training, kind, base, on_hub, (path / _CURVES).is_file())


def _place_model_file(source: Path, target: Path) -> None:
    """Link a file, unless it holds the path of another model on this machine: then write it with the last name only."""
    if source.name in _FILES_WITH_SOURCE:
        try:
            settings = parse_json(source.read_bytes())
            names = {key: without_places(settings[key]) for key in _SOURCE_KEYS if isinstance(settings.get(key), str)}
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{source} cannot be read ({type(error).__name__}); train again, or mend it") from error
        if any(settings[key] != value for key, value in names.items()):
            write_json(target, settings | names)
            return
    place(source, target)


def policy_card(
    staged: StagedPolicy, *, repo_id: str, licence: str | None, measured: Measured | None
) -> tuple[Yaml, str]:
    """Return the card's YAML, and its Markdown text.

    Args:
        staged: the staged policy.
        repo_id: OWNER/NAME.
        licence: as the publisher gave it; None: it is unknown.
        measured: its evaluation. Only metrics of these very weights enter the `model-index`.
    """
    training, name = staged.training, repo_id.partition("/")[2]
    stage = str(training.get("stage"))
    settings, trained_on = mapping(training, "settings"), mapping(training, "data")
    data: Yaml = {"license": licence or UNKNOWN}
    if staged.base_on_hub:
        relation = "adapter" if staged.kind == "adapter" else "finetune"
        data |= {"base_model": staged.base, "base_model_relation": relation}
    data["library_name"] = "peft" if staged.kind == "adapter" else "transformers"
    data["pipeline_tag"] = "text-generation"
    data["tags"] = [*_TAGS, *([stage] if stage in _STAGES else [])]
    source = str(settings.get("data") or "")
    hub_name = HUB_NAME.fullmatch(source) if source == trained_on.get("source") else None
    if stage == "rl" and splits_of_names(source, None).keys() - {"demo"}:
        data["datasets"] = [HUB_REPOSITORY]
    elif hub_name and "/" in hub_name["name"]:
        data["datasets"] = [hub_name["name"]]
    if measured is not None and measured.verified:
        data["model-index"] = [{"name": name, "results": [_result(measured)]}]
    return data, render(
        kind="policy",
        repo_id=repo_id,
        name=name,
        staged=staged,
        stage=_STAGES.get(stage, stage),
        summary=training,
        data=fenced_yaml({key: value for key, value in trained_on.items() if key != "lengths"}),
        settings=fenced_yaml(settings),
        measured=measured,
        licence=licence,
    )


def _result(measured: Measured) -> Yaml:
    """Return the metrics at the first setting as an entry of the card's `model-index`."""
    metrics = []
    for metric in _SHARES:
        if measured.first_setting.get(metric):
            value = float(measured.first_setting[metric]["mean"])
            metrics.append({"type": metric, "name": METRICS[metric].label, "value": value})
    dataset = {"type": measured.datasets, "name": measured.datasets, "split": measured.split}
    return {"task": {"type": "question-answering"}, "dataset": dataset, "metrics": metrics}


def read_measured(report: Path, policy: Path, named: str | None) -> Measured:
    """Return a policy's part of `REPORT/metrics.json`.

    Args:
        report: folder of an evaluation, or its `metrics.json`.
        policy: the policy's folder.
        named: its name there; None: the policy with these weights, or a served one of the folder's name.

    Raises:
        ConfigError: it holds no such policy, or one with other weights.
        DataError: it is not the `metrics.json` of an evaluation.
    """
    # An evaluation names the weights that it loaded, merged or not.
    checksums = [model_checksum(folder) for folder in (policy, policy / MERGED) if folder.is_dir()]
    file = report / "metrics.json" if report.is_dir() else report
    try:
        metrics = parse_json(file.read_bytes())
        weights = {name: _weights(metrics, name) for name in metrics["policies"]}
        same_weights = [name for name, checksum in weights.items() if checksum in checksums]
        served = [name for name, checksum in weights.items() if checksum is None and name == policy.resolve().name]
        names = [named] if named is not None else same_weights or served
        # The tables of the card are built here, so that damaged metrics are refused here.
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
            f"{file}: {quoted(one.policy)} was measured with weights {weights[one.policy]}, and the weights to publish "
            f"are {' or '.join(checksums)}; evaluate these"
        )
    return one


def _measured(metrics: Yaml, policy: str, verified: bool) -> Measured:
    """Build the tables of a policy and of the baseline, which is the first policy of the evaluation."""
    policies = next(iter(metrics["policies"])), policy
    differences = differences_table(metrics, "card", (policy,))
    return Measured(
        policy,
        verified,
        datasets=printable(one_line(", ".join(map(str, metrics["dataset"]))))[:80] or UNKNOWN,
        split=printable(one_line(str(metrics.get("split"))))[:40],
        first_setting=next(iter(metrics["policies"][policy].values())),
        results="\n".join(results_table(metrics, "card", policies).markdown(inert_markdown)),
        differences="\n".join(differences.markdown(inert_markdown)) if differences.rows else "",
    )


def _weights(metrics: Yaml, name: str) -> str | None:
    """Return the checksum of the folder that a policy was loaded from; None if a server answered for it."""
    address = ModelAddress.parse(str(metrics["content"]["policies"][name]["policy"]))
    name, at, checksum = address.rest.rpartition("@")
    is_folder = address.loads_weights and at and "/" not in name and len(checksum) == 12
    return checksum if is_folder else None
