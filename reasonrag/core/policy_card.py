"""`reasonrag.yaml`, saved next to a policy's weights: the format, prompts and limits that it was trained with.

They are the defaults wherever the policy is used (`core.settings.carried_settings` reads them). Prompts that are not
shipped are saved in `prompts/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.documents import to_yaml
from reasonrag.core.models import ModelAddress
from reasonrag.core.settings import (
    CARRIED,
    OWN_PROMPTS,
    POLICY_CARD,
    PROMPTS_FINGERPRINT,
    SHIPPED_PROMPTS,
    carried_settings,
)


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """The settings that a policy's folder carries.

    Attributes:
        text: content of `reasonrag.yaml`.
        prompts: folder of custom prompts; None if the prompts are shipped ones.
    """

    text: str
    prompts: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Mapping[str, object]], fingerprint: str | None = None) -> PolicyCard:
        """Return the card of a resolved configuration, as `Config.model_dump(mode="json")` gives it.

        `fingerprint` is that of the format: the shipped prompts may be others in another version.
        """
        carried: dict[str, Any] = {}
        for section, names in CARRIED.items():
            values = {name: value for name in sorted(names) if (value := config[section].get(name)) is not None}
            # A custom format is code, which a downloaded folder must not name: the user has to ask for it.
            carried[section] = {n: value for n, value in values.items() if not str(value).startswith("python:")}
        prompts = str(carried["format"]["prompts"])
        own = None if prompts in SHIPPED_PROMPTS else prompts
        if own:
            carried["format"]["prompts"] = OWN_PROMPTS
        if fingerprint:
            carried[PROMPTS_FINGERPRINT] = fingerprint
        head = "# How this policy was trained to be asked: the defaults wherever it is used.\n"
        return cls(head + to_yaml(dict(sorted(carried.items()))), own)

    @classmethod
    def read(cls, folder: Path) -> PolicyCard | None:
        """Return the card of a folder; None if it has none.

        Raises:
            ConfigError: the card sets something that a policy's folder may not set.
        """
        if not carried_settings(ModelAddress("hf", str(folder))):
            return None
        own = folder / OWN_PROMPTS
        return cls((folder / POLICY_CARD).read_text(encoding="utf-8"), str(own) if own.is_dir() else None)

    def write(self, folder: Path) -> None:
        """Write the card into the folder of a policy, or of the data that one will be trained on."""
        (folder / POLICY_CARD).write_text(self.text, encoding="utf-8")
        if self.prompts:
            _copy_prompts(Path(self.prompts), folder)


def copy_card(source: Path, folder: Path) -> bool:
    """Copy the card and its prompts from one policy's folder to another's; return whether there is one."""
    if not (source / POLICY_CARD).is_file():
        return False
    shutil.copyfile(source / POLICY_CARD, folder / POLICY_CARD)
    if (source / OWN_PROMPTS).is_dir():
        _copy_prompts(source / OWN_PROMPTS, folder)
    return True


def _copy_prompts(source: Path, folder: Path) -> None:
    for text in source.glob("*/*.txt"):  # FORMAT/NAME.txt; other texts of the folder stay there
        target = folder / OWN_PROMPTS / text.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(text, target)
