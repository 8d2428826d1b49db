"""A small invented seafaring world: 30 pages and 16 questions that end-to-end tests can build trees from in seconds."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ship, year of launch, captain; captain's town of birth, town's river.
_SHIPS = (
    ("Orlandis", 1871, "Benna Ruvik"),
    ("Quillfane", 1888, "Tomas Eskel"),
    ("Maravand", 1902, "Idris Polwen"),
    ("Sælvig Star", 1866, "Hanne Dröst"),
    ("Tessarine", 1911, "Orrin Caddow"),
    ("Brackenhope", 1859, "Lise Amberley"),
    ("Volanthe", 1897, "Piet Harrowgill"),
    ("Ostrava Queen", 1880, "Nadia Vellmar"),
    ("Kestrelmoor", 1919, "Jonas Ibarrund"),
    ("Wyndelow", 1874, "Freya Tolmark"),
)
_TOWNS = (
    ("Harnmouth", "Ebber"),
    ("Sildpool", "Vasse"),
    ("Karrowick", "Ebber"),
    ("Dunmarrow", "Ilse"),
    ("Ferrisgate", "Tarn"),
)
_TRADES = ("tea", "timber", "whale oil", "salt", "iron ore")


def _town(captain: int) -> tuple[str, str]:
    return _TOWNS[captain % len(_TOWNS)]


def pages() -> list[dict[str, str]]:
    """FlashRAG rows: ten ships, ten captains, five towns, four rivers and a harbour that says little."""
    rows = []
    for number, (ship, year, captain) in enumerate(_SHIPS):
        town, _ = _town(number)
        trade = _TRADES[number % len(_TRADES)]
        rows.append(
            (
                f"{ship}",
                f"{ship} is a sailing ship that was launched in {year}. It carried {trade} for years. "
                f"The captain of {ship} was {captain}.",
            )
        )
        rows.append(
            (
                captain,
                f"{captain} was a captain who was born in {town} in {year - 35}. "
                f"{captain} commanded {ship} and wrote {1 + number % 4} books about the sea.",
            )
        )
    for number, (town, river) in enumerate(_TOWNS):
        rows.append(
            (
                town,
                f"{town} is a harbour town on the river {river}. {town} has {3 + number} lighthouses. "
                f"Its market sells {_TRADES[number]}.",
            )
        )
    for number, river in enumerate(dict.fromkeys(river for _, river in _TOWNS)):
        rows.append((river, f"{river} is a river that is {90 + 45 * number} miles long. It freezes in hard winters."))
    rows.append(("Harbour", "A harbour shelters ships. Captains and ships wait there for the wind."))
    return [{"id": f"p{n}", "contents": f"{title}\n{text}"} for n, (title, text) in enumerate(rows)]


def questions() -> list[dict[str, Any]]:
    """FlashRAG rows: one hop, two hops, three hops, comparison, yes or no."""
    rows: list[tuple[str, list[str]]] = []
    for number, (ship, year, captain) in enumerate(_SHIPS[:4]):
        town, _ = _town(number)
        rows.append((f"Who was the captain of {ship}?", [captain]))
        rows.append((f"In which town was the captain of {ship} born?", [town]))
        rows.append((f"When was {ship} launched?", [str(year), f"in {year}"]))
    rows.append(("Which ship was launched first, Orlandis or Quillfane?", ["Orlandis"]))
    rows.append(("Were Benna Ruvik and Lise Amberley born in the same town?", ["yes"]))
    rows.append(("How many lighthouses does the town where Nadia Vellmar was born have?", ["5"]))
    rows.append(("On which river lies the town where the captain of Kestrelmoor was born?", ["Ilse"]))
    return [{"id": f"q{n}", "question": q, "golden_answers": a, "metadata": {}} for n, (q, a) in enumerate(rows)]


@dataclass(frozen=True)
class World:
    """The files of the world, and a cache folder that keeps tests out of the user's."""

    questions: Path
    corpus: Path
    cache: Path

    @classmethod
    def write(cls, folder: Path) -> World:
        """Write the files below `folder`."""
        world = cls(folder / "sea.jsonl", folder / "corpus.jsonl", folder / "cache")
        write_jsonl(world.questions, questions())
        write_jsonl(world.corpus, pages())
        return world

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `build-tree`: where questions and corpus are."""
        return self.flags_but()

    def flags_but(self, *others: str | Path) -> tuple[str, ...]:
        """Those flags, but the ones among others."""
        named = {"--dataset": self.questions, "--corpus": self.corpus, "--set": f"retrieval.cache={self.cache}"}
        kept = ((flag, str(value)) for flag, value in named.items() if flag == "--set" or flag not in others)
        return tuple(itertools.chain(*kept))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
