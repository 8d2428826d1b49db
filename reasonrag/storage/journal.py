"""Write-ahead journal of model calls and finished trees, so that a killed run can resume.

The journal is SQLite with full sync, in WAL mode on a local disk. WAL does not work where other machines see the file,
so there it is a rollback journal, which costs more syncs. One thread writes, and commits everything that has queued up
since its last commit, so that hundreds of calls a second cost a few dozen syncs. SQLite does not notice a flipped bit
in a value, so each reply and each tree has a checksum; a call whose reply is damaged is made again. A search is a pure
function of its configuration and of the replies, so replaying the journal gives the same tree: no other state is saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.secrets import redact
from reasonrag.core.text import valid_unicode
from reasonrag.storage.files import is_shared

log = structlog.get_logger()

_MESSAGE_CHARS = 300

_LAYOUT = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, reply TEXT NOT NULL, checksum BLOB NOT NULL,
    prompt_tokens INTEGER, completion_tokens INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trees (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, rows BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (dataset, question_id)
);
CREATE TABLE IF NOT EXISTS failures (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, cause TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (dataset, question_id)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one kind of call. `unknown_tokens` counts the calls whose backend reported no token counts."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    unknown_tokens: int


@dataclass(slots=True)
class _Write:
    statements: list[tuple[str, tuple[Any, ...]]]
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class Journal:
    """The journal of one run. The caller's thread reads; a thread of the journal writes."""

    def __init__(self, path: Path, *, wal: bool | None = None) -> None:
        """Open or create the file. `wal` None chooses the mode by the file system.

        Raises:
            RunError: the file is damaged, or is not a journal.
        """
        self.path = path
        self._mode = "WAL" if (not is_shared(path) if wal is None else wal) else "TRUNCATE"
        self.draining = False  # whether new calls are refused
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        try:
            self._reader = self._connect()
            self._reader.executescript(_LAYOUT)
            (verdict,) = self._reader.execute("PRAGMA quick_check").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            # A failed look-up costs a third of a millisecond in WAL mode, and in a fresh run most look-ups fail.
            self._known = {key for (key,) in self._reader.execute("SELECT key FROM calls")}
        except sqlite3.DatabaseError as error:
            raise RunError(
                f"{path.name} is damaged ({error}); restore it from a copy or start in a new folder"
            ) from error
        self._thread = threading.Thread(target=self._write_forever, name="journal", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        # Without WAL, reader and writer wait for each other's syncs.
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        connection.execute(f"PRAGMA journal_mode={self._mode}")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _write_forever(self) -> None:
        connection = self._connect()
        while (write := self._queue.get()) is not None:
            batch = [write]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    self._queue.put(None)  # close once this batch is on disk
                    break
                batch.append(more)
            error = _commit(connection, batch)
            for item in batch:
                # One value that SQLite refuses must not fail the rest of its batch.
                failure = _commit(connection, [item]) if error and len(batch) > 1 else error
                with contextlib.suppress(RuntimeError):  # the loop is gone: stopped by a second Ctrl-C
                    item.loop.call_soon_threadsafe(_resolve, item.done, failure)
        connection.close()

    async def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Write(list(statements), done, loop))
        # A queued write is committed even if its task is cancelled.
        await asyncio.shield(done)

    def close(self) -> None:
        """Commit the queued writes and close. A second call does nothing."""
        self._queue.put(None)
        self._thread.join()
        self._reader.close()

    def drain(self) -> None:
        """Refuse new calls from now on; calls in flight are still stored."""
        self.draining = True

    def admit(self) -> None:
        """Raise if the run is shutting down. Called before every call that costs something.

        Raises:
            Interrupted: after `drain`.
        """
        if self.draining:
            raise Interrupted

    def call(self, key: str) -> Any | None:
        """Return the reply stored under a key, as it was given to `put_call`, or None."""
        if key not in self._known:
            return None
        reply, checksum = self._reader.execute("SELECT reply, checksum FROM calls WHERE key = ?", (key,)).fetchone()
        if checksum != _checksum(key, reply):
            log.warning("a reply in the journal is damaged; its call is made again", journal=self.path.name, key=key)
            self._known.discard(key)
            return None
        return json.loads(reply)

    async def put_call(
        self, key: str, kind: str, reply: Any, *, prompt_tokens: int | None = None, completion_tokens: int | None = None
    ) -> None:
        """Store a reply (JSON without NaN); return when it is on disk.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        text = json.dumps(reply, ensure_ascii=False, allow_nan=False)
        row = (key, kind, text, _checksum(key, text), prompt_tokens, completion_tokens)
        await self._write(("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?)", row))
        self._known.add(key)

    async def put_tree(self, dataset: str, question_id: str, blob: bytes) -> None:
        """Store a finished tree in the form that `parquet.pack` gives it, and delete the question's earlier failure."""
        question_key = (dataset, question_id)
        await self._write(
            ("INSERT OR REPLACE INTO trees VALUES (?, ?, ?, ?)", (*question_key, blob, _checksum(*question_key, blob))),
            ("DELETE FROM failures WHERE dataset = ? AND question_id = ?", question_key),
        )

    async def put_failure(self, dataset: str, question_id: str, cause: str, message: str) -> None:
        """Store why a question was set aside; the next run tries it again.

        Secrets are replaced before the message is cut: half a key would not be recognised.
        """
        shown = redact(valid_unicode(message))[:_MESSAGE_CHARS]
        row = (dataset, question_id, cause, shown)
        await self._write(("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", row))

    def put_meta(self, key: str, value: Any) -> None:
        """Store a small JSON value; it is on disk when this returns."""
        self._reader.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def meta(self, key: str) -> Any | None:
        """Return a value stored by `put_meta`, or None."""
        row = self._reader.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def finished(self) -> set[tuple[str, str]]:
        """Return (dataset, question id) of every question whose tree is stored and undamaged."""
        undamaged = set()
        for dataset, question_id, blob, checksum in self._reader.execute("SELECT * FROM trees"):
            if checksum == _checksum(dataset, question_id, blob):
                undamaged.add((dataset, question_id))
            else:
                log.warning("a tree in the journal is damaged; it is built again", question=question_id)
        return undamaged

    def tree(self, dataset: str, question_id: str) -> bytes | None:
        """Return what `put_tree` stored for a question, or None if that is nothing or is damaged."""
        row = self._reader.execute(
            "SELECT rows, checksum FROM trees WHERE dataset = ? AND question_id = ?", (dataset, question_id)
        ).fetchone()
        if row is None or row[1] != _checksum(dataset, question_id, row[0]):
            return None
        blob: bytes = row[0]
        return blob

    def failures(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (dataset, question id, cause, message) of every question that was set aside."""
        yield from self._reader.execute("SELECT * FROM failures ORDER BY dataset, question_id")

    def usage(self) -> dict[str, Usage]:
        """Return the totals by kind of call."""
        rows = self._reader.execute(
            "SELECT kind, COUNT(*), COALESCE(SUM(prompt_tokens), 0), COALESCE(SUM(completion_tokens), 0),"
            " SUM(completion_tokens IS NULL) FROM calls GROUP BY kind ORDER BY kind"
        )
        return {kind: Usage(*totals) for kind, *totals in rows}


def _commit(connection: sqlite3.Connection, batch: list[_Write]) -> Exception | None:
    """Commit a batch in one transaction; if that fails, roll it back and return the error."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for item in batch:
            for statement, values in item.statements:
                connection.execute(statement, values)
        connection.execute("COMMIT")
    except Exception as error:  # any error: a writer that dies would leave every caller waiting
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            return RunError(f"the journal cannot be written ({error}); free some space, then run it again")
        return error
    return None


def _checksum(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.digest()


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if error is not None and not done.cancelled():
        done.set_exception(error)
    elif not done.cancelled():
        done.set_result(None)
