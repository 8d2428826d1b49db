"""A training's folder: who may write it, which training it holds, whether that one is finished.

OUT/
├── config.yaml            the resolved settings
├── checkpoints/           what a killed training goes on from
├── model.safetensors ...  the trained model, or its adapter
├── merged/                the adapter merged into its model, if asked for
├── reasonrag.yaml         how the policy was trained to be asked
├── curves.svg, curves.png
└── training.json          settings, data, figures, versions: there once the training is finished
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reasonrag.core.errors import RunError
from reasonrag.core.settings import differences, dump, identity
from reasonrag.storage.files import claim_folder, lock, read_json, write_json, write_text
from reasonrag.training.checkpoints import checkpoints_folder, last_checkpoint
from reasonrag.training.settings import TrainSettings

SUMMARY = "training.json"
_IDENTITY = "identity.json"
_URL = re.compile(r"\b([a-z][a-z0-9+.-]*)://\S*", re.IGNORECASE)
_HOST = re.compile(r"(?<![\w.])(?:localhost|\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?(?![\w.])")


@contextlib.contextmanager
def training_folder(out: Path) -> Iterator[None]:
    """Create the folder, or see that a training may be in it, and hold it.

    Raises:
        RunError: another process writes there, or it holds something else.
    """
    claim_folder(out, "training", already_ours=held_identity(out) is not None, ignore=("checkpoints",))
    with lock(out / ".lock"):
        checkpoints_folder(out).mkdir(exist_ok=True)
        yield


def describe(stage: str, settings: TrainSettings, *, content: str, model: str) -> dict[str, Any]:
    """All that can change what comes out of a training, flat, as JSON reads it back.

    Args:
        stage: dpo or sft.
        settings: what cannot change the result is left out.
        content: checksum of the data.
        model: checksum of the model that it begins with.
    """
    described = {"stage": stage, **without_places(identity(settings)), "content.data": content, "content.model": model}
    restored: dict[str, Any] = json.loads(json.dumps(described, sort_keys=True))
    return restored


def digest(described: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that name a training."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def check_same(out: Path, described: Mapping[str, Any]) -> None:
    """See that the folder holds this training, or nothing worth keeping.

    Raises:
        RunError: it holds another one; its settings that differ are named.
    """
    before = held_identity(out)
    if before is None or (last_checkpoint(out) is None and not (out / SUMMARY).exists()):
        return
    if changes := differences(before, described):
        raise RunError(
            f"{out} holds a different training run ({changes}); go back to that, or choose a new folder for --out"
        )


def bind(out: Path, settings: TrainSettings, described: Mapping[str, Any]) -> None:
    """From now on the folder is this training's."""
    write_json(checkpoints_folder(out) / _IDENTITY, dict(sorted(described.items())), indent=1)
    write_text(out / "config.yaml", dump(settings))


def finished(out: Path) -> dict[str, Any] | None:
    """`training.json` of a finished training; None where there is none."""
    summary = read_json(out / SUMMARY)
    return summary if summary and isinstance(summary.get("identity"), dict) else None


def held_identity(out: Path) -> dict[str, Any] | None:
    """Which training the folder holds; None where it holds none."""
    held = read_json(checkpoints_folder(out) / _IDENTITY)
    if held is not None:
        return held
    summary = finished(out)
    return summary["identity"] if summary else None


def without_places(value: Any) -> Any:
    """The same tree, in which no text says where on a machine or in a network something is.

    A path from the root, from home or from here is shown by its last name, also behind a scheme; a URL by its scheme.

    >>> without_places({"judge": {"spec": "http://10.0.0.1:8000/v1"}, "url": ["https://corpus.example"]})
    {'judge': {'spec': 'http://…'}, 'url': ['https://…']}
    >>> without_places(["~/.cache/reasonrag", "hf:/models/mine/", "Qwen/Qwen2.5-7B", "demo:hiprag", 0.5])
    ['reasonrag', 'hf:mine', 'Qwen/Qwen2.5-7B', 'demo:hiprag', 0.5]
    """
    if isinstance(value, Mapping):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(inner) for inner in value]
    return _without_place(value) if isinstance(value, str) else value


def _without_place(text: str) -> str:
    text = _HOST.sub("…", _URL.sub(r"\1://…", text))
    if text.startswith(("/", "~", "./", "../")):
        return Path(text).name or text
    scheme, colon, rest = text.partition(":")
    return f"{scheme}:{_without_place(rest)}" if colon and "://" not in text else text
