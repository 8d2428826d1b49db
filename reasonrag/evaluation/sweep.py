"""The points at which policies are evaluated: sampling temperature, step limit, passages per search."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import identity, merge, validate

# Points of one sweep share a folder, and its calls: what they ask differs by content wherever it differs at all.
SWEPT = ("policy.temperature", "format.max_steps", "retrieval.top_k")
# Sections that say how trees are built: no evaluation depends on them.
_OF_TREES = ("search.", "value.", "judge.", "pairs.")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = frozenset({"plots", "report", "report.md", "metrics.json"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a sweep."""

    temperature: float
    max_steps: int
    top_k: int

    @property
    def name(self) -> str:
        """How it is called in files and tables.

        >>> Setting(0.7, 8, 3).name
        't0.7_s8_k3'
        """
        return f"t{self.temperature:.12g}_s{self.max_steps}_k{self.top_k}"

    def apply(self, config: Config) -> Config:
        """The configuration at this point.

        Raises:
            ConfigError: a value out of range.
        """
        tree = config.model_dump(mode="json")
        merge(
            tree,
            {
                "policy": {"temperature": self.temperature},
                "format": {"max_steps": self.max_steps},
                "retrieval": {"top_k": self.top_k},
            },
        )
        return validate(Config, tree)

    def summary(self) -> dict[str, float | int | str]:
        """For JSON."""
        return {"name": self.name, **asdict(self)}


def sweep(
    config: Config,
    *,
    temperatures: Sequence[float] | None = None,
    max_steps: Sequence[int] | None = None,
    top_ks: Sequence[int] | None = None,
) -> list[tuple[Setting, Config]]:
    """Every combination, each with its configuration; what is not swept stays as configured.

    Raises:
        ConfigError: a value out of range.
    """
    points = itertools.product(
        temperatures or (config.policy.temperature,),
        max_steps or (config.format.max_steps,),
        top_ks or (config.retrieval.top_k,),
    )
    settings = list(dict.fromkeys(Setting(*point) for point in points))
    return [(setting, setting.apply(config)) for setting in settings]


def varying(config: Config) -> list[str]:
    """Settings that may differ within the folder of one policy."""
    return [*SWEPT, *(name for name in identity(config) if name.startswith(_OF_TREES))]


def folder_name(text: str) -> str:
    """A safe folder name made of a policy's spec or path.

    >>> folder_name("hf:out/my policy/"), folder_name("http://host:8000/v1")
    ('my-policy', 'http-host-8000-v1')
    """
    last = text if "://" in text else re.split(r"[:/\\]", text.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-._")[:64] or "policy"


def check_names(names: Iterable[str]) -> None:
    """Names of policies are folder names.

    Raises:
        ConfigError: none is given, one cannot be a folder, or two differ by case alone.
    """
    seen: dict[str, str] = {}
    for name in names:
        if not _SAFE_NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(
                f"policy name {name!r} cannot be a folder; use up to 64 letters, digits, `.`, `_` and `-`, and none of "
                f"{', '.join(sorted(_RESERVED))}"
            )
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise ConfigError(f"policies {other!r} and {name!r} would share a folder on some systems; rename one")
    if not seen:
        raise ConfigError("no policy to evaluate; name at least one with --policy")


def check_alike(configs: Mapping[str, Config]) -> None:
    """Policies are compared on the same draw of questions and with the same seeds.

    Raises:
        ConfigError: their seeds differ.
    """
    seeds = {config.seed for config in configs.values()}
    if len(seeds) > 1:
        raise ConfigError(f"policies have seeds {sorted(seeds)}; differences are paired, give all of them one seed")
