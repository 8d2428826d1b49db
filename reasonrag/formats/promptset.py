"""Named sets of instruction texts: `default` for real models, `brief` for the demo's tiny one, or a folder of yours."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError

_SHIPPED = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A folder of texts, `ROOM/NAME.txt`."""

    folder: Path

    @classmethod
    def find(cls, name: str = "default") -> PromptSet:
        """The shipped set of that name, or the folder at that path.

        Raises:
            ConfigError: there is neither.
        """
        shipped = sorted(p.name for p in _SHIPPED.iterdir() if p.is_dir())
        if name in shipped:
            return cls(_SHIPPED / name)
        if not Path(name).is_dir():
            raise ConfigError(f"prompt set {name!r} is neither a folder nor one of {', '.join(shipped)}")
        return cls(Path(name))

    def text(self, name: str) -> str:
        """The text at `name`, such as `reasonrag/reasoning`, without blanks around it.

        Raises:
            ConfigError: the set has no such text.
        """
        path = self.folder / f"{name}.txt"
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"prompt set {self.folder.name!r} has no readable {name}.txt ({error.__class__.__name__}); "
                f"copy {_SHIPPED.name}/default and edit it"
            ) from error


def fingerprint(*texts: str) -> str:
    """16 hex digits that change with any of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
