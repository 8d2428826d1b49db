"""Stage a trained policy for the Hub: weights, tokenizer, its settings file, and how it was trained.

Checkpoints, optimizer states, pickles (`*.bin`), journals and rollouts are never published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reasonrag.core.documents import named_path, parse_json, parse_yaml
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.models import ModelAddress
from reasonrag.core.settings import POLICY_CARD, read_yaml
from reasonrag.llm.model_folder import model_checksum
from reasonrag.publish.hub_card import mapping
from reasonrag.publish.licences import UNKNOWN
from reasonrag.publish.staged_files import place_json
from reasonrag.publish.verify import verify
from reasonrag.storage.files import place, write_json
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

# Keys under which transformers and peft store what a model was loaded from.
_SOURCE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
_FILES_WITH_SOURCE = (_ADAPTER, "config.json", "generation_config.json", "tokenizer_config.json")
_FOLDER_CHECKSUM = re.compile(r"[^/]+@[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class StagedPolicy:
    """A policy in the folder to upload, and what its card needs to know."""

    path: Path  # folder of the training run
    training: dict[str, Any]  # the content of its `training.json`
    kind: Literal["adapter", "merged", "full"]  # an adapter, an adapter merged into its model, or all weights
    checksums: tuple[str, ...]  # of the published weights, as evaluations name them, both merged and not merged
    base: str  # the model that the training run started from: its Hub id, or the name of a local folder
    base_on_hub: bool  # whether `base` is a Hub id
    base_licence: str | None  # as the card in the local folder of the base names it


def stage_policy(path: Path, folder: Path, *, merged: bool) -> StagedPolicy:
    """Copy what is published of a finished training run into a folder.

    Args:
        path: folder of the training run.
        folder: to fill.
        merged: publish the adapter merged into its model (`PATH/merged`), not the adapter.

    Raises:
        RunError: the training run has not finished, or nothing was merged.
        DataError: there are no weights in safetensors, its files cannot be read, or are not those that were written.
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
    base, on_hub = _base(training)
    return StagedPolicy(
        path,
        training,
        "merged" if merged else "adapter" if (path / _ADAPTER).is_file() else "full",
        tuple(model_checksum(folder) for folder in (path, path / MERGED) if folder.is_dir()),
        base,
        on_hub,
        None if on_hub else _licence(path),
    )


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


def _base(training: dict[str, Any]) -> tuple[str, bool]:
    """Return the base model's name, and whether it is a Hub id. The checksum of a local folder starts with its name."""
    model = mapping(training, "model")
    name, checksum = str(model.get("name") or UNKNOWN), str(model.get("checksum") or "")
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII)
    return name, bool(checksum and is_id and not _FOLDER_CHECKSUM.fullmatch(checksum))


def _licence(path: Path) -> str | None:
    """Return the licence in the card of the base model's local folder."""
    try:
        model = str(read_yaml(path / "config.yaml").get("model") or "")
    except ConfigError:
        return None
    address = ModelAddress.of_model(model)
    if address.scheme == "demo":
        return "apache-2.0"  # shipped with reasonrag
    return licence_of_card(named_path(model) / "README.md")


def licence_of_card(file: Path) -> str | None:
    """Return the `license` of a card if it is one plain identifier, else None."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        block = REGEX_YAML_BLOCK.search(file.read_text(encoding="utf-8"))
        data = parse_yaml(block[2]) if block else None
    except (OSError, ValueError):
        return None
    licence = data.get("license") if isinstance(data, dict) else None
    plain = isinstance(licence, str) and re.fullmatch(r"[a-z0-9][a-z0-9.+-]{1,63}", licence)
    return licence if plain and licence not in (UNKNOWN, "other") else None
