"""An own format: a growing turn with other tags, `<ask>` for a query and `<facts>` for what was found.

    reasonrag build-tree --set format.name=python:examples.own_format:AskFormat --dataset questions.jsonl ...

A format with one growing turn (`append_only`) is a subclass of `StreamFormat`: name the tags, write the instruction.
A format with other prompts implements the protocol `reasonrag.Format`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reasonrag import PromptSet, StreamFormat


class AskFormat(StreamFormat):
    """`<think>`, `<ask>`, `<facts>`, `<answer>`; well-formed is `think (ask facts think)* answer`."""

    name = "ask"
    search = "ask"
    found = "facts"
    stops = ("</ask>", "</answer>")

    def __init__(self, prompts: PromptSet | None = None, **settings: Any) -> None:
        """Read the instruction that lies beside this file, whatever prompt set the configuration names."""
        super().__init__(PromptSet(Path(__file__).parent / "prompts"), **settings)
