"""The journal, harmed as disks and people harm it: what was stored is read as it was, made again, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from reasonrag.core.errors import RunError
from reasonrag.storage.journal import Journal, Usage
from tests.faults.matrix import Figure, Rounds

QUESTIONS, CALLS = 6, 8
KEYS = {f"{number:02x}{call:030x}": f"d/q{number}" for number in range(QUESTIONS) for call in range(CALLS)}


async def fill(journal: Journal) -> None:
    """Store calls and trees as a run does: the last question has none of its tree yet."""
    for number in range(QUESTIONS):
        for key, question in KEYS.items():
            if question == f"d/q{number}":
                reply = [{"text": f"reply {key} " + "word " * random.Random(key).randrange(40)}]
                await journal.put_call(key, "policy", reply, question=question, tokens=(40, 9))
        if number < QUESTIONS - 1:
            await journal.put_tree("d", f"q{number}", random.Random(number).randbytes(700))
    await journal.put_call("1f" * 16, "judge", ["of no question"])
    await journal.put_failure("d", "q5", "timeout", "no answer")


@dataclass(frozen=True)
class Kept:
    """What a journal returns."""

    usage: dict[str, Any]
    trees: dict[str, bytes | None]
    replies: dict[str, Any]
    said: int  # lines about damage

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Read everything in a journal; raise RunError if it is refused."""
        with capture_logs() as logs, contextlib.closing(Journal(path)) as journal:
            trees = {question: journal.tree(dataset, question) for dataset, question in sorted(journal.finished())}
            replies = {key: journal.call(key, question) for key, question in KEYS.items()}
            replies["judge"] = journal.call("1f" * 16)
            list(journal.failures())  # the next run tries these again, and writes others
            return cls(journal.usage(), trees, replies, len(logs))

    def harm(self, whole: Kept) -> str:
        """How this differs from an unharmed journal: "harmless", "made again", or "SILENT"."""
        if self == whole:
            return "harmless"
        kept = all(reply in (None, whole.replies[key]) for key, reply in self.replies.items())
        kept = kept and self.trees.items() <= whole.trees.items()
        policy = self.usage.get("policy", Usage(0, 0, 0, 0))
        counted = (policy.prompt_tokens, policy.completion_tokens) == (40 * policy.calls, 9 * policy.calls)
        return "made again" if kept and counted else "SILENT"


def seen(folder: Path, whole: Kept) -> str:
    """What comes of opening a harmed journal: how it differs, or "refused"."""
    try:
        return Kept.read(folder / "journal.sqlite").harm(whole)
    except RunError as error:
        assert str(folder / "journal.sqlite") in str(error)
        return "refused"


def fresh(source: Path, target: Path) -> Path:
    """Copy a folder in place of an older copy."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a journal that was closed."""
    folder = tmp_path_factory.mktemp("closed")
    with contextlib.closing(Journal(folder / "journal.sqlite")) as journal:
        asyncio.run(fill(journal))
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, copied before it was closed: what SIGKILL leaves, with all but the layout in the -wal file."""
    folder, copy = tmp_path_factory.mktemp("open"), tmp_path_factory.mktemp("killed") / "copy"
    with contextlib.closing(Journal(folder / "journal.sqlite")) as journal:
        asyncio.run(fill(journal))
        shutil.copytree(folder, copy)
    return copy


@pytest.fixture(scope="module")
def whole(closed: Path, killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """What an unharmed journal returns."""
    kept = [
        Kept.read(fresh(source, tmp_path_factory.mktemp("whole") / "copy") / "journal.sqlite")
        for source in (closed, killed)
    ]
    assert kept[0] == kept[1] and len(kept[0].trees) == QUESTIONS - 1 and not kept[0].said
    return kept[0]


@pytest.mark.fault(
    "A10",
    "a random bit of the journal, one of its schema among them",
    "refused in one line, made again, or no effect",
    before="traceback (no such column), 1 of 36 flips",
)
def test_a_flipped_bit(closed: Path, killed: Path, whole: Kept, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    draw, flips = random.Random(18), rounds(40, 600)
    for source, file in ((closed, "journal.sqlite"), (killed, "journal.sqlite-wal")):
        found = Counter[str]()
        for number in range(flips // 2):
            folder = fresh(source, tmp_path / "copy")
            raw = bytearray((folder / file).read_bytes())
            bits = 8 * (len(raw) if number else 4096)  # the first page holds the schema
            bit = draw.randrange(bits)
            raw[bit // 8] ^= 1 << bit % 8
            (folder / file).write_bytes(raw)
            found[seen(folder, whole)] += 1
        figure(f"{file}: {flips // 2} flips, " + ", ".join(f"{count} {what}" for what, count in found.most_common()))
        assert not found["SILENT"]


@pytest.mark.fault(
    "8",
    "the journal or its -wal file is cut, -wal or -shm deleted",
    "refused, or the calls that are gone are made again",
)
def test_a_journal_that_is_cut(
    closed: Path, killed: Path, whole: Kept, tmp_path: Path, rounds: Rounds, figure: Figure
) -> None:
    cuts = rounds(6, 20)
    for source, file in ((closed, "journal.sqlite"), (killed, "journal.sqlite-wal")):
        size, found = (source / file).stat().st_size, Counter[str]()
        for place in (1, *(round(number * size / cuts) for number in range(1, cuts))):
            folder = fresh(source, tmp_path / "copy")
            os.truncate(folder / file, place)
            found[seen(folder, whole)] += 1
        figure(f"{file} cut at {cuts} places: " + ", ".join(f"{count} {what}" for what, count in found.most_common()))
        assert not found["SILENT"] and not found["harmless"]
    gone = {}
    for files in (("-wal",), ("-shm",), ("-wal", "-shm")):
        folder = fresh(killed, tmp_path / "copy")
        for file in files:
            (folder / f"journal.sqlite{file}").unlink()
        gone[" and ".join(files)] = seen(folder, whole)
    figure(f"deleted after a kill: {', '.join(f'{files} {what}' for files, what in gone.items())}")
    assert gone == {"-wal": "made again", "-shm": "harmless", "-wal and -shm": "made again"}


class Torn(sqlite3.Connection):
    """A connection whose COMMIT fails, and its ROLLBACK, too, as on a disk that goes away."""

    def __exit__(self, *raised: object) -> Any:
        raise sqlite3.OperationalError("disk I/O error")


class FailingJournal(Journal):
    """A journal whose writer gets no connection at first, then one that tears."""

    connections = 0

    def _connect(self, busy_s: float = 60.0) -> sqlite3.Connection:
        self.connections += 1
        if self.connections == 2:
            raise sqlite3.OperationalError("unable to open database file")
        kind = Torn if self.connections == 3 else sqlite3.Connection
        return sqlite3.connect(self.path, isolation_level=None, factory=kind, check_same_thread=False)


@pytest.mark.fault(
    "A2",
    "the journal's writer gets no connection, then one whose COMMIT and ROLLBACK fail",
    "the calls of that moment get an error; the next ones are stored",
    before="hung: 2 of 2; the thread had died",
)
def test_a_writer_whose_connection_fails_opens_another_one(tmp_path: Path, figure: Figure) -> None:
    async def put(journal: Journal) -> list[str]:
        said = []
        for key in ("a", "b", "c"):
            try:
                await asyncio.wait_for(journal.put_call(key, "policy", [key]), 60)
                said.append("stored")
            except RunError as error:
                said.append(str(error))
        return said

    with contextlib.closing(FailingJournal(tmp_path / "journal.sqlite")) as journal:
        first, second, third = asyncio.run(put(journal))
        stored = journal.usage()["policy"].calls
    figure(f"2 calls failed, 1 stored by connection {journal.connections}; 0 hung")
    assert "unable to open" in first and "disk I/O error" in second and third == "stored" and stored == 1
