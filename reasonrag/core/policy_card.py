"""How a policy is to be asked, in a file beside its weights: training and inference then agree by themselves.

`reasonrag.yaml` names the format, its prompts and limit of steps, the passages per search and their order, and the
tokens of a step. Prompts that are not shipped lie beside it in `prompts/`. A folder may come from anywhere: what it
says runs no code and names no place.
"""

from __future__ import annotations

import reprlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import Tree, merge, read_yaml

POLICY_CARD = "reasonrag.yaml"
SHIPPED_PROMPTS = ("default", "brief")
# The formats of the shipped policy that speaks several; which one is named as in `demo:hiprag`.
DEMO_FORMATS = ("search_r1", "hiprag", "search_p1", "when_to_search")
_OWN_PROMPTS = "prompts"
_CARRIED = {
    "format": {"name", "prompts", "max_steps"},
    "retrieval": {"top_k", "passage_order", "max_passage_chars"},
    "policy": {"max_tokens"},
}


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """A card to be written.

    Attributes:
        text: of `reasonrag.yaml`.
        prompts: the folder of prompts of one's own; None where they are shipped.
    """

    text: str
    prompts: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Mapping[str, object]]) -> PolicyCard:
        """That of a resolved configuration, as `Config.model_dump(mode="json")` gives it."""
        carried = {
            # A format of one's own is code, which a folder may not name: it has to be asked for where it is used.
            section: {n: config[section][n] for n in sorted(names) if not str(config[section][n]).startswith("python:")}
            for section, names in _CARRIED.items()
        }
        prompts = str(carried["format"]["prompts"])
        own = None if prompts in SHIPPED_PROMPTS else prompts
        if own:
            carried["format"]["prompts"] = _OWN_PROMPTS
        head = "# How this policy was trained to be asked: the defaults wherever it is used.\n"
        return cls(head + yaml.safe_dump(carried), own)

    @classmethod
    def read(cls, folder: Path) -> PolicyCard | None:
        """That which lies in a folder; None where there is none.

        Raises:
            ConfigError: it asks for something that is not a policy's to say.
        """
        if not carried_settings(f"hf:{folder}"):
            return None
        own = folder / _OWN_PROMPTS
        return cls((folder / POLICY_CARD).read_text(encoding="utf-8"), str(own) if own.is_dir() else None)

    def write(self, folder: Path) -> None:
        """Into a folder of a policy, or of the data that one is to be trained on."""
        (folder / POLICY_CARD).write_text(self.text, encoding="utf-8")
        if self.prompts:
            _copy_prompts(Path(self.prompts), folder)


def copy_card(source: Path, folder: Path) -> bool:
    """From one policy's folder to another's; false where the first has none."""
    if not (source / POLICY_CARD).is_file():
        return False
    shutil.copyfile(source / POLICY_CARD, folder / POLICY_CARD)
    if (source / _OWN_PROMPTS).is_dir():
        _copy_prompts(source / _OWN_PROMPTS, folder)
    return True


def demo_folder(format: str = "") -> Path:
    """Where the shipped policy that speaks a format is: what follows `demo:`, "" for ReasonRAG's.

    Raises:
        ConfigError: none speaks it.
    """
    if format not in ("", "reasonrag", *DEMO_FORMATS):
        raise ConfigError(
            f"no demo policy speaks {reprlib.repr(format)}; choose demo, or one of: "
            f"{', '.join(f'demo:{name}' for name in DEMO_FORMATS)}"
        )
    return Path(__file__).parents[1] / "demo" / ("stream_policy" if format in DEMO_FORMATS else "policy")


def carried_settings(spec: object) -> Tree:
    """What the card in the folder of a policy says; nothing where there is none.

    Args:
        spec: what `--policy` names.

    Raises:
        ConfigError: the card asks for something that is not a policy's to say, or no demo policy speaks that format.
    """
    scheme, _, rest = str(spec or "").partition(":")
    scheme = scheme.lower()
    if scheme not in ("demo", "hf", "vllm") or not (scheme == "demo" or rest):
        return {}
    folder = demo_folder(rest) if scheme == "demo" else Path(rest).expanduser()
    file = folder / POLICY_CARD
    if not file.is_file():
        return {}
    tree = read_yaml(file)
    for section, values in tree.items():
        for name, value in values.items() if isinstance(values, dict) else [(None, values)]:
            known = name in _CARRIED.get(section, ()) and isinstance(value, str | int)
            if not known or str(value).startswith("python:"):
                what = section if name is None else f"{section}.{name}"
                raise ConfigError(
                    f"{file}: {reprlib.repr(what)} is not for a policy's folder to say, or not in this form; remove "
                    "it, and set it by a flag or in your own configuration"
                )
    if scheme == "demo" and rest in DEMO_FORMATS:
        merge(tree, {"format": {"name": rest}})
    return _with_own_prompts(tree, folder)


def _with_own_prompts(tree: Tree, folder: Path) -> Tree:
    name = tree.get("format", {}).get("prompts")
    if name in (None, *SHIPPED_PROMPTS):
        return tree
    if name != _OWN_PROMPTS:
        raise ConfigError(
            f"{folder / POLICY_CARD}: prompts {reprlib.repr(name)} are neither shipped ({', '.join(SHIPPED_PROMPTS)}) "
            f"nor the folder {_OWN_PROMPTS!r} beside the file; give them with --prompts"
        )
    merge(tree, {"format": {"prompts": str(folder / _OWN_PROMPTS)}})
    return tree


def _copy_prompts(source: Path, folder: Path) -> None:
    for text in source.glob("*/*.txt"):  # ROOM/NAME.txt: whoever keeps their prompts among other texts keeps those
        target = folder / _OWN_PROMPTS / text.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(text, target)
