"""Texts that a page shows in many places and holds once."""

from __future__ import annotations

import json

from reasonrag.storage.parquet import Row


class Once:
    """Things by their place in `items`, each kept once.

    >>> messages = Once()
    >>> [messages.place({"role": role}) for role in ("system", "user", "system")], len(messages.items)
    ([0, 1, 0], 2)
    """

    def __init__(self) -> None:
        self.items: list[Row] = []
        self._places: dict[str, int] = {}

    def place(self, item: Row) -> int:
        """Where the thing is; it is put there if it is new."""
        place = self._places.setdefault(json.dumps(item, sort_keys=True), len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place
