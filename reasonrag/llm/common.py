"""What the backends share: a name without a path, text up to its stop string, reading an overflow message."""

from __future__ import annotations

import re
from pathlib import Path

_OVERFLOW = re.compile(
    r"context[_ ](?:length|size|window)|maximum (?:model|sequence|input) length|max_model_len|prompt is too long",
    re.IGNORECASE,
)


def public_name(path_or_name: str) -> str:
    """How a model is called in run identities: a hub name as it is, a folder by its last part.

    >>> public_name("Qwen/Qwen2.5-7B-Instruct"), public_name("/models/mine/"), public_name("./out/policy")
    ('Qwen/Qwen2.5-7B-Instruct', 'mine', 'policy')
    """
    path = Path(path_or_name).expanduser()
    if path.is_absolute() or path_or_name.startswith(".") or path.is_dir():
        return path.resolve().name
    return path_or_name


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """`text` up to and including the stop string that is complete first; None where it holds none.

    >>> cut_at_stop("<query>Jaws</query> and <answer>", ("</answer>", "</query>"))
    '<query>Jaws</query>'
    """
    ends = [at + len(mark) for mark in stop if mark and (at := text.find(mark)) >= 0]
    return text[: min(ends)] if ends else None


def overflows_context(message: str) -> bool:
    """Whether an error message says that prompt and completion do not fit the model's context.

    >>> overflows_context("This model's maximum context length is 512 tokens.")
    True
    """
    return bool(_OVERFLOW.search(message))
