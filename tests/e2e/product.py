"""The product as a user meets it: the `reasonrag` script in a process of its own, and what it leaves on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reasonrag.core.types import Message, Prompt
from reasonrag.demo.reader import ExtractiveLLM
from reasonrag.llm.base import Sampling
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests import warmed
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.stubs import Fault, Script

REASONRAG = str(Path(sys.executable).with_name("reasonrag"))
Row = dict[str, Any]


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without those that choose a model or carry a key; no Hub, one thread."""
    mine = {"REASONRAG_POLICY", "REASONRAG_JUDGE", "OPENAI_API_KEY", "PYTHONHASHSEED"}
    kept = {name: value for name, value in os.environ.items() if name not in mine}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | changes


def start(*args: str | Path, fresh: bool = False, **env: str) -> warmed.Child | subprocess.Popen[str]:
    """Start `reasonrag` with these arguments: forked from a process that has everything imported, or a `fresh` one."""
    if not fresh and args[0] == "papers":
        return warmed.Child(warmed.papers, tuple(map(str, args[1:])), environment(**env))
    if not fresh:
        return warmed.Child(warmed.reasonrag, tuple(map(str, args)), environment(**env))
    command = [REASONRAG, *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment(**env)
    )


def run(
    *args: str | Path, fresh: bool = False, timeout_s: float = 120.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `reasonrag` to its end."""
    return warmed.ended(start(*args, fresh=fresh, **env), timeout_s)


def build(
    *args: str | Path, fresh: bool = False, timeout_s: float = 120.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `reasonrag build-tree`, which has to succeed."""
    done = run("build-tree", *args, fresh=fresh, timeout_s=timeout_s, **env)
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"nothing after {timeout_s:g} s"
        time.sleep(0.002)


def tree_rows(out: Path) -> list[Row]:
    """Node rows of a run, page checksums verified."""
    return list(read_shards(out / "trees", "nodes", tree_schema()))


def pair_rows(out: Path, *splits: str) -> list[Row]:
    """Pairs of a run, train then test unless one of them is asked for; a split may have no file."""
    there = [split for split in splits or ("train", "test") if any((out / "pairs").glob(f"{split}-*.parquet"))]
    return [row for split in there for row in read_shards(out / "pairs", split, pair_schema())]


def summary(out: Path) -> dict[str, Any]:
    """`run.json` of a run."""
    found: dict[str, Any] = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return found


def file_digests(out: Path) -> dict[str, str]:
    """Name to SHA-256 of every Parquet file of a run."""
    files = sorted(out.glob("*/*.parquet"))
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def without(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Rows without some columns."""
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


def extractive_reply(request: Row) -> str:
    """What the extractive policy writes when asked over HTTP."""
    prompt = Prompt(tuple(Message(m["role"], m["content"]) for m in request["messages"]), stop=tuple(request["stop"]))
    answering = ExtractiveLLM().complete(prompt, Sampling(temperature=request["temperature"], seed=request.get("seed")))
    try:
        answering.send(None)  # it never waits for anything
    except StopIteration as answered:
        return str(answered.value.text)
    raise AssertionError("the extractive policy waited for something")


class ExtractiveServer(FakeOpenAI):
    """The extractive policy behind an OpenAI-compatible server that keeps the accounts.

    Attributes:
        paid: answers written, by the content of the request; a client that has gone is charged all the same.
    """

    def __init__(self, *, latency_s: float = 0.0, faults: Script | Iterable[Fault | None] = (), **more: Any) -> None:
        self.paid: Counter[str] = Counter()
        models = ({"id": "extractor", **more},)
        super().__init__(extractive_reply, faults, latency_s=latency_s, models=models, edit=self._charge)

    def _charge(self, request: Row, answer: Row) -> None:
        self.paid[json.dumps(request, sort_keys=True)] += 1

    def forget(self) -> None:
        """Begin the accounts anew."""
        self.paid.clear()
        self.requests.clear()

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `build-tree`: use this server."""
        return ("--policy", self.base_url, "--policy-model", "extractor")

    @property
    def paid_twice(self) -> int:
        """Answers beyond the first, over all requests."""
        return self.paid.total() - len(self.paid)
