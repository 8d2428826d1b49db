"""The settings at which policies are evaluated: sampling temperature, step limit, passages per search."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import identity, validate

# All points of a sweep share a folder and its journal: requests that differ have different keys there.
SWEPT = ("policy.temperature", "format.max_steps", "format.max_searches", "retrieval.top_k")
_CHOICE = ("choice.candidates", "choice.best_of", "choice.rule")
# Settings of tree search, which no evaluation depends on.
_TREE_SETTINGS = ("search.", "value.", "judge.", "pairs.")
_SAFE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")  # Windows drops a last dot
_RESERVED = frozenset({"plots", "report", "report.md", "metrics.json"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a sweep: temperature, step limit, passages per search, and the candidates to choose from.

    `choice` is the part of the name for them: candidates for each step, and the rule that keeps one of the attempts.
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


def sweep(
    config: Config,
    *,
    temperatures: Sequence[float] | None = None,
    max_steps: Sequence[int] | None = None,
    max_searches: Sequence[int] | None = None,
    top_ks: Sequence[int] | None = None,
    rules: Sequence[str] | None = None,
) -> list[tuple[Setting, Config]]:
    """Return every combination with its configuration; settings that are not swept stay as configured.

    Raises:
        ConfigError: a value is out of range.
    """
    points = itertools.product(
        temperatures or (config.policy.temperature,),
        max_steps or (config.format.max_steps,),
        max_searches or (config.format.max_searches,),
        top_ks or (config.retrieval.top_k,),
        (rules or (config.choice.rule,)) if config.choice.best_of > 1 else ("",),
    )
    configs = {}
    for temperature, turns, searches, top_k, rule in points:
        tree = config.model_dump(mode="json")
        candidates = f"_c{config.choice.candidates}" if config.choice.candidates > 1 else ""
        tree["choice"]["rule"] = rule or config.choice.rule
        kept = f"_{rule}-of-{config.choice.best_of}" if rule else ""
        setting = Setting(temperature, turns, top_k, candidates + kept, searches)
        tree["policy"]["temperature"] = setting.temperature
        tree["format"] |= {"max_steps": setting.max_steps, "max_searches": searches}
        tree["retrieval"]["top_k"] = setting.top_k
        configs[setting] = validate(Config, tree)
    return list(configs.items())


def varying(config: Config) -> list[str]:
    """Return the settings that may differ within the folder of one policy."""
    return [*SWEPT, *_CHOICE, *(name for name in identity(config) if name.startswith(_TREE_SETTINGS))]


def folder_name(text: str) -> str:
    """Return a safe folder name for a policy's address or path.

    >>> folder_name("hf:out/my policy/"), folder_name("http://host:8000/v1")
    ('my-policy', 'http-host-8000-v1')
    """
    last = text if "://" in text else re.split(r"[:/\\]", text.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-._")[:64] or "policy"


def check_names(names: Iterable[str]) -> None:
    """Check that the names of policies can be names of folders.

    Raises:
        ConfigError: no name is given, one cannot be a folder, or two differ only in case.
    """
    seen: dict[str, str] = {}
    for name in names:
        if not _SAFE_NAME.fullmatch(name) or name in _RESERVED or PureWindowsPath(name).is_reserved():
            raise ConfigError(
                f"policy name {name!r} cannot be a folder; use up to 64 letters, digits, `.`, `_` and `-`, and none of "
                f"{', '.join(sorted(_RESERVED))}"
            )
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise ConfigError(f"policies {other!r} and {name!r} would share a folder on some systems; rename one")
    if not seen:
        raise ConfigError("no policy to evaluate; name at least one with --policy")
