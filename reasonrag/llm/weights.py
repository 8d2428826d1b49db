"""Whether the weights of a model are finite numbers: of one in memory, or in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reasonrag.core.errors import DataError


def first_not_finite(model: Any) -> str | None:
    """Return the name of the first parameter of a torch model that holds NaN or an infinity, or None.

    Of a model that is spread over processes, this looks at the part of this one.
    """
    for name, weight in model.named_parameters():
        if not _is_finite(weight.to_local() if hasattr(weight, "to_local") else weight):
            return str(name)
    return None


def check_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, of which one at a time is read.

    Raises:
        DataError: one holds NaN or an infinity, which it names; or the file is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as held:
            names = held.keys()
            for name in names:
                if not _is_finite(held.get_tensor(name)):
                    raise DataError(f"{file.name}: {name} holds NaN or infinities")
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: it was removed meanwhile
        raise DataError(f"{file.name} is no safetensors file, or damaged", quoting=error) from error
    return len(names)


def _is_finite(tensor: Any) -> bool:
    """Return whether every number of a torch tensor is finite: smallest and largest are, in a tenth of the time."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    comparable = tensor.float() if tensor.element_size() == 1 else tensor  # torch compares no floats of 8 bits
    return bool(torch.isfinite(torch.stack(torch.aminmax(comparable.detach()))).all())
