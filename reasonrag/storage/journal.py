"""Write-ahead journal of model calls and finished trees, so that a killed run can resume.

The journal is SQLite with full sync, in WAL mode on a local disk. WAL does not work where other machines see the file,
so there it is a rollback journal, which costs more syncs. One thread writes, and commits everything that has queued up
since its last commit, so that hundreds of calls a second cost a few dozen syncs. SQLite does not notice a flipped bit
in a value, so each reply and each tree has a checksum; a call whose reply is damaged is made again. A search is a pure
function of its configuration and of the replies, so replaying the journal gives the same tree: no other state is saved.

The keys of a question's calls begin alike. So its calls lie side by side in the file, and memory holds the keys of the
questions in work alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.secrets import redact
from reasonrag.core.text import valid_unicode
from reasonrag.storage.files import is_shared

log = structlog.get_logger()

_MESSAGE_CHARS = 300
_QUESTIONS_KNOWN = 2_048  # questions whose keys are in memory, 20 kB each

# PRAGMA user_version of a new file. Before 2, keys of requests were hashes of JSON that no question preceded; before 3,
# those of greedy ones held a seed. A file keeps the keys that it began with, so that its calls are found.
_VERSION = 3

_LAYOUT = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    key BLOB PRIMARY KEY NOT NULL, kind TEXT NOT NULL, reply TEXT NOT NULL, checksum BLOB NOT NULL,
    prompt_tokens INTEGER, completion_tokens INTEGER
);
CREATE TABLE IF NOT EXISTS trees (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, rows BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (dataset, question_id)
);
CREATE TABLE IF NOT EXISTS failures (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, cause TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (dataset, question_id)
) WITHOUT ROWID;
"""

# The totals of `calls`, as adding them up reads every reply.
_TOTALS = """
CREATE TABLE usage (
    kind TEXT PRIMARY KEY, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    unknown_tokens INTEGER NOT NULL
) WITHOUT ROWID;
"""
_ADD_UP = """
DELETE FROM usage;
INSERT INTO usage SELECT kind, COUNT(*), COALESCE(SUM(prompt_tokens), 0), COALESCE(SUM(completion_tokens), 0),
    SUM(completion_tokens IS NULL) FROM calls GROUP BY kind;
"""
_ADD_TO_TOTALS = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind) DO UPDATE SET
    calls = calls + excluded.calls,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    unknown_tokens = unknown_tokens + excluded.unknown_tokens
"""

# A commit takes as much CPU time as 40 calls, so there are at most 200 a second, while several calls end during each.
# A chain of calls, each of which ends during no other's commit, never waits.
_EVERY_S = 0.005
_MOST_ROWS = 128  # of a statement: SQLite before 3.32 takes 999 values

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one kind of call. `unknown_tokens` counts the calls whose backend reported no token counts."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    unknown_tokens: int


# A row of `calls`.
_Call = tuple[str | bytes, str, str, bytes, int | None, int | None]


@dataclass(slots=True)
class _Write:
    calls: Sequence[_Call]
    statements: tuple[tuple[str, tuple[Any, ...]], ...]
    done: asyncio.Future[None]
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """The writes of one turn of an event loop."""

    writes: list[_Write]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, slots=True)
class _Calls:
    """The calls of a question that are in the file: what their keys begin with, and all of their keys."""

    prefix: bytes
    keys: set[str | bytes]

    def key(self, key: str) -> bytes:
        """Return the key in the file of a call with this key."""
        return self.prefix + bytes.fromhex(key)


class Journal:
    """The journal of one run. The caller's thread reads; a thread of the journal writes.

    Attributes:
        version: of the keys in the file; a request's is `llm.journaled.request_key` from version 2 on.
        cached_tokens: by kind of call, prompt tokens that engines took from their prefix caches, and the prompt tokens
            of the calls that say so. Of a process that was killed they are lost, both.
    """

    def __init__(self, path: Path, *, wal: bool | None = None) -> None:
        """Open or create the file. `wal` None chooses the mode by the file system.

        Raises:
            RunError: the file is damaged, or is not a journal.
        """
        self.path = path
        self._mode = "WAL" if (not is_shared(path) if wal is None else wal) else "TRUNCATE"
        self.ended_by: Exception | None = None  # what new calls raise, once they are refused
        self.at_drain: list[Callable[[Exception], None]] = []  # called with it when that begins
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._batch: _Batch | None = None  # of this turn of the event loop
        # A failed look-up costs tens of microseconds in WAL mode, and in a fresh run most look-ups fail.
        self._known: OrderedDict[str, _Calls] = OrderedDict()
        try:
            self._reader = self._connect()
            self.version = self._lay_out()
            self.cached_tokens: dict[str, list[int]] = self.meta("cached_tokens") or {}
            self._counted_cached = False
            self._reader.execute("SELECT * FROM calls LIMIT 1").fetchone()
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        self._check("meta", "trees", "failures", "usage")
        self._calls_checked = False  # they are the most of a journal, and a finished run reads none
        self._thread = threading.Thread(target=self._write_forever, name="journal", daemon=True)
        self._thread.start()

    def _lay_out(self) -> int:
        """Create the tables that are missing; return the version of the keys."""
        (tables,) = self._reader.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (version,) = self._reader.execute("PRAGMA user_version").fetchone()
        (totals,) = self._reader.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'usage'").fetchone()
        version = version if tables else _VERSION
        self._reader.executescript(
            f"{_LAYOUT}{'' if totals else _TOTALS + _ADD_UP}"
            # Earlier versions counted each call in a trigger, for a quarter of the time that storing it takes.
            f"DROP TRIGGER IF EXISTS count_call;PRAGMA user_version = {version:d};COMMIT;"
        )
        return version

    def _check(self, *tables: str) -> None:
        """Raise if the pages of a table are damaged. It reads all of them, a gigabyte a second."""
        try:
            for table in tables:
                (verdict,) = self._reader.execute(f"PRAGMA quick_check({table})").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict)
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: sqlite3.DatabaseError) -> RunError:
        return RunError(f"{self.path.name} is damaged ({error}); restore it from a copy or start in a new folder")

    def _connect(self) -> sqlite3.Connection:
        # Without WAL, reader and writer wait for each other's syncs.
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        connection.execute(f"PRAGMA journal_mode={self._mode}")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _write_forever(self) -> None:
        connection = self._connect()
        closing, busy, began = False, False, 0.0
        while not closing and (batch := self._queue.get()) is not None:
            if busy and (wait_s := began + _EVERY_S - time.monotonic()) > 0:
                time.sleep(wait_s)
            began = time.monotonic()
            batches = [batch]
            while not self._queue.empty():
                if (more := self._queue.get()) is None:
                    closing = True
                    break
                batches.append(more)
            writes = [write for batch in batches for write in batch.writes]
            busy = len(writes) > 1
            if (error := _commit(connection, writes)) is not None:
                # One value that SQLite refuses must not fail the rest of its batch.
                for write in writes:
                    write.error = _commit(connection, [write]) if len(writes) > 1 else error
            for batch in batches:
                with contextlib.suppress(RuntimeError):  # the loop is gone: stopped by a second Ctrl-C
                    batch.loop.call_soon_threadsafe(_resolve, batch.writes)
        connection.close()

    async def _write(self, *statements: tuple[str, tuple[Any, ...]], calls: Sequence[_Call] = ()) -> None:
        """Commit calls and statements, even if the task is cancelled; return when they are on disk."""
        loop = asyncio.get_running_loop()
        if self._batch is None:
            self._batch = _Batch([], loop)
            loop.call_soon(self._hand_over)  # once a turn: waking the thread costs more than most writes
        done: asyncio.Future[None] = loop.create_future()
        self._batch.writes.append(_Write(calls, statements, done))
        await done

    def _hand_over(self) -> None:
        if self._batch is not None:
            self._queue.put(self._batch)
            self._batch = None

    def close(self) -> None:
        """Commit the queued writes and close. A second call does nothing."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join()
        if self._counted_cached:
            self.put_meta("cached_tokens", self.cached_tokens)
            self._counted_cached = False
        self._reader.close()

    def drain(self, error: Exception | None = None) -> None:
        """Refuse new calls from now on, with Interrupted if no error is given.

        Calls in flight are still stored, and those in the file still replayed.
        """
        self.ended_by = self.ended_by or error or Interrupted("stopped; all finished work is kept")
        for tell in self.at_drain:
            tell(self.ended_by)

    def admit(self) -> None:
        """Raise if the run is shutting down. Called before every call that costs something.

        Raises:
            Interrupted, or another error that was given: after `drain`.
        """
        if self.ended_by is not None:
            raise self.ended_by

    def call(self, key: str, question: str = "") -> Any | None:
        """Return the reply stored under a key, as it was given to `put_call`, or None.

        Args:
            key: of the call; in hex digits if it is one of a question.
            question: whose call it is, `DATASET/ID`; "" for a call that many questions may make.

        Raises:
            RunError: the calls in the file are damaged.
        """
        if not self._calls_checked:
            self._check("calls")
            self._calls_checked = True
        calls = self._calls(question)
        stored_key = calls.key(key) if calls else key
        if calls and stored_key not in calls.keys:
            return None
        row = self._reader.execute("SELECT reply, checksum FROM calls WHERE key = ?", (stored_key,)).fetchone()
        if row is None:
            return None
        if row[1] != _checksum(stored_key, row[0]):
            log.warning("a reply in the journal is damaged; its call is made again", journal=self.path.name, key=key)
            if calls:
                calls.keys.discard(stored_key)
            return None
        return json.loads(row[0])

    async def put_call(
        self,
        key: str,
        kind: str,
        reply: Any,
        *,
        question: str = "",
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """Store a reply (JSON without NaN); return when it is on disk. `key` and `question` are those of `call`.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        calls = self._calls(question)
        stored_key = calls.key(key) if calls else key
        text = _json.encode(reply)
        row = (stored_key, kind, text, _checksum(stored_key, text), prompt_tokens, completion_tokens)
        await self._write(calls=(row,))
        if calls:
            calls.keys.add(stored_key)

    async def put_calls(self, kind: str, replies: Mapping[str, Any]) -> None:
        """Store replies by key that many questions may ask for, without token counts; otherwise as `put_call`."""
        texts = {key: _json.encode(reply) for key, reply in replies.items()}
        await self._write(calls=[(key, kind, text, _checksum(key, text), None, None) for key, text in texts.items()])

    def _calls(self, question: str) -> _Calls | None:
        """Return what is known of a question's calls, from the file if it is not in memory; None for no question."""
        if not question:
            return None
        calls = self._known.get(question)
        if calls is not None:
            self._known.move_to_end(question)
            return calls
        prefix = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest()
        keys = self._reader.execute("SELECT key FROM calls WHERE key BETWEEN ? AND ?", (prefix, prefix + b"\xff" * 17))
        calls = self._known[question] = _Calls(prefix, {key for (key,) in keys})
        if len(self._known) > _QUESTIONS_KNOWN:
            self._known.popitem(last=False)
        return calls

    def absorb(self, path: Path) -> None:
        """Copy the calls of another journal that this one lacks."""
        self._reader.execute("ATTACH DATABASE ? AS other", (str(path),))
        copy = "INSERT OR IGNORE INTO calls SELECT * FROM other.calls;"
        self._reader.executescript(f"BEGIN IMMEDIATE;{copy}{_ADD_UP}COMMIT;DETACH DATABASE other;")
        self._known.clear()

    async def put_tree(self, dataset: str, question_id: str, blob: bytes) -> None:
        """Store a finished tree in the form that `parquet.pack` gives it, and delete the question's earlier failure."""
        question_key = (dataset, question_id)
        await self._write(
            ("INSERT OR REPLACE INTO trees VALUES (?, ?, ?, ?)", (*question_key, blob, _checksum(*question_key, blob))),
            ("DELETE FROM failures WHERE dataset = ? AND question_id = ?", question_key),
        )
        self._known.pop(f"{dataset}/{question_id}", None)

    async def put_failure(self, dataset: str, question_id: str, cause: str, message: str) -> None:
        """Store why a question was set aside; the next run tries it again.

        Secrets are replaced before the message is cut: half a key would not be recognised.
        """
        shown = redact(valid_unicode(message))[:_MESSAGE_CHARS]
        row = (dataset, question_id, cause, shown)
        await self._write(("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", row))

    def count_cached(self, kind: str, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a call to `cached_tokens`, which `close` stores."""
        counts = self.cached_tokens.setdefault(kind, [0, 0])
        counts[0] += cached_tokens
        counts[1] += prompt_tokens
        self._counted_cached = True

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
        return {kind: Usage(*totals) for kind, *totals in self._reader.execute("SELECT * FROM usage ORDER BY kind")}


def _commit(connection: sqlite3.Connection, writes: list[_Write]) -> Exception | None:
    """Commit writes in one transaction; if that fails, roll it back and return the error."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        _put_calls(connection, [call for write in writes for call in write.calls])
        for write in writes:
            for statement, values in write.statements:
                connection.execute(statement, values)
        connection.execute("COMMIT")
    except Exception as error:  # any error: a writer that dies would leave every caller waiting
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            return RunError(f"the journal cannot be written ({error}); free some space, then run it again")
        return error
    return None


def _put_calls(connection: sqlite3.Connection, calls: Sequence[_Call]) -> None:
    """Insert calls and add them to the totals; replace the replies of those that are there already.

    These were damaged, or two tasks asked for them at the same time: they have been counted.
    """
    added: list[_Call] = []
    start = 0
    while start < len(calls):
        # As few statements as possible, as threads take turns at each, and of few lengths, as each is parsed once.
        count = min(1 << (len(calls) - start).bit_length() - 1, _MOST_ROWS)
        some = calls[start : start + count]
        start += count
        try:
            connection.execute(_insert(count), list(chain.from_iterable(some)))
            added += some
        except sqlite3.IntegrityError:  # undoes this statement, and no other
            added += [call for call in some if _put_call(connection, call)]
    totals: dict[str, list[int]] = {}
    for _, kind, _, _, prompt_tokens, completion_tokens in added:
        total = totals.setdefault(kind, [0, 0, 0, 0])
        total[0] += 1
        total[1] += prompt_tokens or 0
        total[2] += completion_tokens or 0
        total[3] += completion_tokens is None
    for kind, total in totals.items():
        connection.execute(_ADD_TO_TOTALS, (kind, *total))


@cache
def _insert(rows: int) -> str:
    return f"INSERT INTO calls VALUES {', '.join(['(?, ?, ?, ?, ?, ?)'] * rows)}"


def _put_call(connection: sqlite3.Connection, call: _Call) -> bool:
    """Insert a call or replace its reply; return whether it is new."""
    try:
        connection.execute(_insert(1), call)
    except sqlite3.IntegrityError:
        key, _, reply, checksum, *_ = call
        connection.execute("UPDATE calls SET reply = ?, checksum = ? WHERE key = ?", (reply, checksum, key))
        return False
    return True


def _checksum(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.digest()


def _resolve(writes: list[_Write]) -> None:
    for write in writes:
        if write.done.cancelled():
            continue
        if write.error is not None:
            write.done.set_exception(write.error)
        else:
            write.done.set_result(None)
