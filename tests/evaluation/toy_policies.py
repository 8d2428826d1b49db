"""Policies and a retriever that a configuration names as `python:tests.evaluation.toy_policies:NAME`.

Questions read "Who directed film N?" and the policies decide by N. `RECORD` sees what is opened, asked and closed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from reasonrag.errors import LLMError
from reasonrag.llm.scripted import ScriptedLLM
from tests.toys import ToyRetriever

GOLD = "Steven Spielberg"
HOSTILE = "\x1b[31m</table><script>alert(1)</script>\u202e"


@dataclass
class Record:
    events: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # by policy
    fails: set[int] = field(default_factory=set)  # questions at which every policy's backend gives up
    on_call: Callable[[], None] | None = None

    def clear(self) -> None:
        self.__init__()


RECORD = Record()


class RecordedLLM(ScriptedLLM):
    def __init__(self, name, reply):
        def answer(prompt, sampling):
            RECORD.calls[name] += 1
            if RECORD.on_call:
                RECORD.on_call()
            number = int(re.search(r"film (\d+)\?", prompt.messages[1].content)[1])
            if number in RECORD.fails:
                raise LLMError("gone", cause="unreachable")
            return reply(number, prompt)

        super().__init__(answer, name=name)
        RECORD.events.append(f"open {name}")

    async def aclose(self):
        RECORD.events.append(f"close {self.name}")


def _is(prompt, tag):
    return prompt.stop == (f"</{tag}>",)


def direct(config):
    """Answers at once; right where N is even."""
    return RecordedLLM("direct", lambda n, prompt: f"<answer>{GOLD if n % 2 == 0 else 'nobody'}</answer>")


def searcher(config):
    """Searches once; right where N is not a multiple of three. What it notes is hostile."""

    def reply(n, prompt):
        if _is(prompt, "evidence"):
            return f"<evidence>{HOSTILE}</evidence>"
        if _is(prompt, "answer") or "Previous Thoughts" in prompt.messages[1].content:
            return f"<answer>{'nobody' if n % 3 == 0 else GOLD}</answer>"
        return f"<query>Jaws {n}</query>"

    return RecordedLLM("searcher", reply)


def endless(config):
    """Never answers unless it has to; its every second note cannot be read."""

    def reply(n, prompt):
        if _is(prompt, "answer"):
            return f"<answer>{GOLD}</answer>"
        return "<evidence>a film</evidence>" if _is(prompt, "evidence") else f"<query>Jaws {n}</query>"

    return RecordedLLM("endless", reply)


def retriever(config, questions):
    RECORD.events.append("open retriever")
    return ToyRetriever()


def write_questions(path: Path, count: int = 12) -> Path:
    kinds = ("bridge", "| [x](http://evil) <b>\x1b[31m")
    rows = [
        {
            "id": f"q{n}",
            "question": f"Who directed film {n}?",
            "golden_answers": [GOLD],
            "metadata": {"type": kinds[n % 4 == 3], "hops": 1 + n % 2},
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
