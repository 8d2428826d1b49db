"""Write-ahead journal of model calls and finished trees, so that a killed run can resume.

The journal is SQLite with full sync, in WAL mode on a local disk. WAL does not work where other machines see the file,
so there it is a rollback journal, which costs more syncs. One thread writes, and commits everything that has queued up
since its last commit, so that hundreds of calls a second cost a few dozen syncs. SQLite does not notice a flipped bit
in a value, so each reply and each tree has a checksum; a call whose reply is damaged is made again. A search is a pure
function of its configuration and of the replies, so replaying the journal gives the same tree: no other state is saved.

The keys of a question's calls begin alike. So its calls lie side by side in the file, and memory holds the keys of the
questions in work alone.

What holds for every journal:

- A reply is on disk before it is used, even if its task is cancelled.
- What is damaged is not used. A reply or a tree whose checksum differs is made again. All else has one checksum, which
  is renewed with each tree (of calls since then, a flipped token count is not noticed), and pages and indexes of a
  table are checked before it is read: a file that differs is refused.
- What is gone is not paid for again in silence. `FILE-guard` holds the number of calls. If fewer are left, because a
  `-wal` file was deleted, or the journal was cut or replaced by an older one, it is refused. Each commit looks whether
  both files are still those that were opened, and the run ends if one is not. SQLite has the `-wal` file open still,
  so all that is in it is moved into the journal.
- A full disk loses nothing. The guard file takes up room that is then given to the calls in flight: they are stored,
  and no others begin. Without that room on the disk, no call is made.
- An error is a RunError that names the file, and says whether the disk or the file is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import queue
import shutil
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.secrets import excerpt
from reasonrag.core.watch import Watch, end
from reasonrag.storage.files import is_shared

log = structlog.get_logger()

_QUESTIONS_KNOWN = 2_048  # questions whose keys are in memory, 20 kB each

_VERSION = 5  # PRAGMA user_version: of the layout, and of the keys (`llm.journaled.request_key`)

_LAYOUT = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE calls (
    key BLOB PRIMARY KEY NOT NULL, kind TEXT NOT NULL, reply TEXT NOT NULL, checksum BLOB NOT NULL,
    prompt_tokens INTEGER, completion_tokens INTEGER
);
CREATE TABLE trees (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, rows BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (dataset, question_id)
);
CREATE TABLE failures (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, cause TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (dataset, question_id)
) WITHOUT ROWID;
-- The totals of the first calls, as adding them up reads every reply. Calls are never deleted, so their number is the
-- `rowid` of the last one.
CREATE TABLE usage (
    kind TEXT PRIMARY KEY, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    unknown_tokens INTEGER NOT NULL
) WITHOUT ROWID"""
_TOTALS = """
SELECT kind, SUM(calls), SUM(prompt_tokens), SUM(completion_tokens), SUM(unknown_tokens) FROM (
    SELECT * FROM usage UNION ALL
    SELECT kind, 1, COALESCE(prompt_tokens, 0), COALESCE(completion_tokens, 0), completion_tokens IS NULL FROM calls
    WHERE rowid > (SELECT COALESCE(SUM(calls), 0) FROM usage)
) GROUP BY kind
"""
# One that is there was damaged, or two tasks asked for it at a time.
_PUT_CALL = """
INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET reply = excluded.reply, checksum = excluded.checksum
"""
_ADD_UP = f"INSERT OR REPLACE INTO usage SELECT * FROM ({_TOTALS}) EXCEPT SELECT * FROM usage"

# Nothing else would notice a flipped bit in the rows of these queries. So `meta` has their checksum, under this key.
_CHECKSUM = "checksum"
_UNDER_CHECKSUM = (
    "PRAGMA user_version",
    # ANALYZE adds tables of its own, which change no result.
    "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_stat*' "
    "ORDER BY type, name",
    f"SELECT * FROM meta WHERE key != '{_CHECKSUM}' ORDER BY key",
    "SELECT * FROM usage ORDER BY kind",
)

# A commit takes as much CPU time as 40 calls, so there are at most 200 a second, while several calls end during each.
# A chain of calls, each of which ends during no other's commit, never waits.
_EVERY_S = 0.005

_NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # the second one, where memory cannot be mapped to the disk
_ROOM = 4 << 20  # bytes that the guard file takes up: a few hundred calls with ids and log-probabilities
_DIGITS = 20  # of the number in it

_TEXT = partial(str, encoding="utf-8", errors="surrogateescape")  # of damaged text, the checksum differs
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one kind of call. `unknown_tokens` counts the calls whose backend reported no token counts."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    unknown_tokens: int


_Statement = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class _Write:
    statements: tuple[_Statement, ...]
    done: asyncio.Future[BaseException | None] | None  # with why it failed; None if no task waits
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Writes of one turn of an event loop, or of `put_meta`; `ended` when each is stored, or has its error."""

    writes: list[_Write]
    ended: Future[None]


class Journal:
    """The journal of one run. The caller's thread reads; a thread of the journal writes.

    Attributes:
        cached_tokens: by kind of call, prompt tokens that engines took from their prefix caches, and the prompt tokens
            of the calls that say so. Of a process that was killed they are lost, both.
    """

    def __init__(self, path: Path, *, wal: bool | None = None) -> None:
        """Open or create the file. `wal` None chooses the mode by the file system.

        Raises:
            RunError: the file is damaged, or is no journal of this version.
        """
        self.path = path
        self._mode = "WAL" if (not is_shared(path) if wal is None else wal) else "TRUNCATE"
        self.ended_by: Exception | None = None  # what new calls raise, once they are refused
        self.at_drain: list[Callable[[Exception], None]] = []  # called with it when that begins
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._batch: _Batch | None = None  # of this turn of the event loop
        # A failed look-up costs tens of microseconds in WAL mode, and in a fresh run most look-ups fail.
        self._known: OrderedDict[str, tuple[bytes, set[bytes]]] = OrderedDict()
        self._writer: sqlite3.Connection | None = None  # of the thread
        self._guard_path = path.with_name(f"{path.name}-guard")
        self._guard: int | None = None  # the open file, once something is written
        self._over: Exception | None = None  # why nothing more is paid for: the disk is full, or the file is gone
        if not path.exists():
            self._guard_path.unlink(missing_ok=True)
        with contextlib.ExitStack() as refused:
            try:
                self._reader = refused.enter_context(contextlib.closing(self._connect()))
                self._lay_out()
                files = (path, path.with_name(f"{path.name}-wal"))
                self._opened = {file: file.stat() for file in files if file.exists()}
            except (sqlite3.Error, UnicodeDecodeError) as error:  # the second if SQLite's message quotes damaged text
                raise self._failed(error) from error
            self._check("meta", "trees", "failures", "usage")
            self._calls_checked = False  # they are the most of a journal, and a finished run reads none
            self.cached_tokens: dict[str, list[int]] = self.meta("cached_tokens") or {}
            refused.pop_all()
        self._watch = Watch("the journal", RunError, self._write_forever)

    def _lay_out(self) -> None:
        """Create the tables of a new file; check what is in another one."""
        with self._reader as reader:
            reader.execute("BEGIN IMMEDIATE")
            if reader.execute("SELECT 1 FROM sqlite_master").fetchone():
                (version,) = reader.execute("PRAGMA user_version").fetchone()
                if version != _VERSION:
                    raise RunError(
                        f"{self.path} is a journal of layout {version}, and this version of reasonrag has {_VERSION}; "
                        "go on with the version that began it, or choose a new folder for --out"
                    )
                checksum = reader.execute("SELECT value FROM meta WHERE key = ?", (_CHECKSUM,)).fetchone()
                if checksum != (_checksum_of(reader),):
                    raise sqlite3.DatabaseError("layout, settings or totals are not those that were stored")
            else:
                for statement in _LAYOUT.split(";"):
                    reader.execute(statement)
                reader.execute(f"PRAGMA user_version = {_VERSION}")
                _put_checksum(reader)
            left, stored = _count(reader), self._stored()
            if left < stored:
                self._check("calls")
                raise RunError(
                    f"{self.path} holds {left} of the {stored} calls that were stored: it was cut or replaced, or its "
                    "-wal file was deleted; bring that back, or, to go on with what is left and pay for the others "
                    f"again, delete {self._guard_path.name}"
                )

    def _stored(self) -> int:
        """Return how many calls the guard file says were stored; 0 if there is none."""
        try:
            return int(self._guard_path.read_bytes()[:_DIGITS].strip(b"\0") or 0)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise RunError(f"{self._guard_path} is damaged; delete it to go on without its number of calls") from error

    def _check(self, *tables: str) -> None:
        """Raise if pages or indexes of a table are damaged. It reads all of them, a gigabyte a second."""
        for table in tables:
            for (verdict,) in self._rows(f"PRAGMA integrity_check({table})"):
                if verdict != "ok":
                    raise self._failed(sqlite3.DatabaseError(verdict))

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; raise RunError if they cannot be read."""
        try:
            yield from self._reader.execute(query, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _row(self, query: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        return next(self._rows(query, values), None)

    def _failed(self, error: Exception) -> Exception:
        """Return an error of the disk or the file as a RunError, any other one as it is."""
        outside = isinstance(error, OSError | sqlite3.OperationalError) and _code(error) != sqlite3.SQLITE_ERROR
        if outside:
            reason, free = getattr(error, "strerror", None) or error, shutil.disk_usage(self.path.parent).free
            return RunError(
                f"{self.path} cannot be used ({reason}; {free // 1024:,} kB are free on its disk, and it needs "
                f"{_ROOM // 1024:,}); mend that, then run the same command again: what was paid for is kept"
            )
        if isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError):
            return RunError(f"{self.path} is damaged ({error}); restore it from a copy or start in a new folder")
        return error

    def _connect(self) -> sqlite3.Connection:
        # Without WAL, reader and writer wait for each other's syncs.
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=60)
        connection.text_factory = _TEXT
        connection.execute(f"PRAGMA journal_mode={self._mode}")
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _write_forever(self) -> None:
        busy, began = False, 0.0
        batches: list[_Batch | None] = []
        while None not in batches:
            batches = [self._queue.get()]
            if busy and (wait_s := began + _EVERY_S - time.monotonic()) > 0:
                time.sleep(wait_s)
            began = time.monotonic()
            batches += [self._queue.get() for _ in range(self._queue.qsize())]
            work = [batch for batch in batches if batch is not None]
            writes = [write for batch in work for write in batch.writes]
            busy = len(writes) > 1
            self._store(writes)
            self._watch.beat()
            end([batch.ended for batch in work], None)
        if self._writer is not None:
            self._writer.close()

    def _store(self, writes: Sequence[_Write]) -> None:
        """Commit writes in one transaction; if that fails, whatever the error, each in one, and note the error of each.

        One value that SQLite refuses must not fail the rest of its batch, and callers wait for this thread.
        """
        statements = [statement for write in writes for statement in write.statements]
        try:
            if statements:
                if (gone := self._gone()) == self.path and self._over is not None:
                    raise self._over  # SQLite would write on, into a file without a name
                self._writer = self._writer or self._connect()
                self._commit(self._writer, *statements)
                if gone is not None:
                    self._writer.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        except Exception as error:
            if self._writer is not None:
                self._writer.close()  # undoes what ROLLBACK may not have
                self._writer = None
            for write in writes if len(writes) > 1 else ():
                self._store([write])
            if len(writes) == 1:
                writes[0].error = self._failed(error)

    def _gone(self) -> Path | None:
        """Return the file that is no longer the one that was opened, if any; then nothing more is paid for."""
        for file, opened in self._opened.items():
            if not (file.exists() and os.path.samestat(file.stat(), opened)):
                advice = "bring it back, or begin anew in another folder"
                if file != self.path:
                    advice = "its calls are kept, and the same command goes on"
                self._over = self._over or RunError(
                    f"{file} was deleted or replaced while this process wrote to it; {advice}"
                )
                return file
        return None

    def _commit(self, connection: sqlite3.Connection, *statements: _Statement) -> None:
        """Execute statements in one transaction; on a full disk, in the room that the guard file has.

        Raises:
            RunError: the disk or the file is at fault.
        """
        try:
            if self._guard is None:
                self._guard = self._open_guard()
            try:
                stored = _transact(connection, statements)
            except sqlite3.Error as error:
                if self._over is not None or _code(error) not in _NO_SPACE:
                    raise
                self._over = self._failed(error)
                os.ftruncate(self._guard, _DIGITS)
                stored = _transact(connection, statements)
            with contextlib.suppress(OSError):  # not before the commit: too small a number does no harm
                os.pwrite(self._guard, b"%020d" % stored, 0)
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error

    def _open_guard(self) -> int:
        """Open the guard file and give it its size; raise OSError if the disk has no room for it."""
        guard = os.open(self._guard_path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(guard, 0, _ROOM)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.ftruncate(guard, _DIGITS)
                os.close(guard)
                raise
        return guard

    async def _write(self, *statements: _Statement) -> None:
        """Commit statements, even if the task is cancelled; return when they are on disk."""
        loop = asyncio.get_running_loop()
        if self._batch is None:
            self._batch = batch = _Batch([], Future())
            # With the batch in it, this would be a cycle, which holds the replies until garbage is collected.
            batch.ended.add_done_callback(partial(self._tell, loop, batch.writes))
            loop.call_soon(self._hand_over)  # once a turn: waking the thread costs more than most writes
        done: asyncio.Future[BaseException | None] = loop.create_future()
        self._batch.writes.append(_Write(statements, done))
        if (error := await done) is not None:
            raise error

    def _hand_over(self) -> None:
        if self._batch is not None:
            self._watch.add(self._batch.ended)
            self._queue.put(self._batch)
            self._batch = None

    def _tell(self, loop: asyncio.AbstractEventLoop, writes: Sequence[_Write], ended: Future[None]) -> None:
        """Let the callers of a batch go on, on their loop."""

        def resolve() -> None:
            if self._over is not None:
                self.drain(self._over)
            for write in writes:
                if write.done and not write.done.done():  # cancelled
                    write.done.set_result(write.error or ended.exception())

        with contextlib.suppress(RuntimeError):  # the loop is gone: stopped by a second Ctrl-C
            loop.call_soon_threadsafe(resolve)

    def close(self) -> None:
        """Commit the queued writes and close. A second call does nothing.

        Raises:
            RunError: the thread that writes hangs, or has died.
        """
        self._hand_over()
        try:
            if self._guard is not None:
                self.put_meta("cached_tokens", self.cached_tokens)
        finally:
            self._queue.put(None)
            try:
                self._watch.add(self._watch.ended).result()
            finally:
                self._reader.close()
                if self._guard is not None:
                    os.ftruncate(self._guard, _DIGITS)
                    os.close(self._guard)
                    self._guard = None

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
        stored_key, known = self._stored_key(key, question)
        if known is not None and stored_key not in known:
            return None
        row = self._row("SELECT reply, checksum FROM calls WHERE key = ?", (stored_key,))
        if row is None:
            return None
        if row[1] != _checksum(stored_key, row[0]):
            log.warning("a reply in the journal is damaged; its call is made again", journal=self.path.name, key=key)
            if known is not None:
                known.discard(stored_key)
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
        stored_key, known = self._stored_key(key, question)
        await self._write(_put_call(stored_key, kind, reply, prompt_tokens, completion_tokens))
        if known is not None:
            known.add(stored_key)

    async def put_calls(self, kind: str, replies: Mapping[str, Any]) -> None:
        """Store replies by key that many questions may ask for, without token counts; otherwise as `put_call`."""
        await self._write(*[_put_call(key, kind, reply) for key, reply in replies.items()])

    def _stored_key(self, key: str, question: str) -> tuple[Any, set[bytes] | None]:
        """Return the key in the file of a call, and all such keys of its question, which are read once."""
        if not question:
            return key, None
        if question not in self._known:
            prefix = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest()
            keys = self._rows("SELECT key FROM calls WHERE key BETWEEN ? AND ?", (prefix, prefix + b"\xff" * 17))
            self._known[question] = prefix, {key for (key,) in keys}
            if len(self._known) > _QUESTIONS_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(question)
        prefix, known = self._known[question]
        return prefix + bytes.fromhex(key), known

    def absorb(self, path: Path) -> None:
        """Copy the calls of another journal that this one lacks."""
        self._row("ATTACH DATABASE ? AS other", (str(path),))
        self._commit(self._reader, ("INSERT OR IGNORE INTO calls SELECT * FROM other.calls", ()))
        self._row("DETACH DATABASE other")
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
        """Store why a question was set aside; the next run tries it again."""
        row = (dataset, question_id, cause, excerpt(message))
        await self._write(("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?)", row))

    def count_cached(self, kind: str, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a call to `cached_tokens`, which `close` stores."""
        counts = self.cached_tokens.setdefault(kind, [0, 0])
        counts[0] += cached_tokens
        counts[1] += prompt_tokens

    def put_meta(self, key: str, value: Any) -> None:
        """Store a small JSON value; it is on disk when this returns."""
        row = (key, json.dumps(value))
        if self._row("SELECT 1 FROM meta WHERE key = ? AND value = ?", row) is not None:
            return
        write = _Write((("INSERT OR REPLACE INTO meta VALUES (?, ?)", row),), None)
        batch = _Batch([write], Future())
        self._queue.put(batch)
        self._watch.add(batch.ended).result()
        if self._over is not None:
            self.drain(self._over)
        if write.error is not None:
            raise write.error

    def meta(self, key: str) -> Any | None:
        """Return a value stored by `put_meta`, or None."""
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(row[0]) if row else None

    @staticmethod
    def old_facts(path: Path) -> dict[str, Any]:
        """Return what a journal of version 0.1.0 holds about its run; empty if it cannot be read.

        Nothing is written and no commit waited for, as another process may be at work on the file.
        """
        query = f"SELECT key, value FROM meta WHERE key != '{_CHECKSUM}'"
        with (
            contextlib.suppress(sqlite3.Error, ValueError),
            contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as connection,
        ):
            return {key: json.loads(value) for key, value in connection.execute(query)}
        return {}

    def finished(self) -> set[tuple[str, str]]:
        """Return (dataset, question id) of every question whose tree is stored and undamaged."""
        undamaged = set()
        for dataset, question_id, blob, checksum in self._rows("SELECT * FROM trees"):
            if checksum == _checksum(dataset, question_id, blob):
                undamaged.add((dataset, question_id))
            else:
                log.warning("a tree in the journal is damaged; it is built again", question=question_id)
        return undamaged

    def tree(self, dataset: str, question_id: str) -> bytes | None:
        """Return what `put_tree` stored for a question, or None if that is nothing or is damaged."""
        query = "SELECT rows, checksum FROM trees WHERE dataset = ? AND question_id = ?"
        row = self._row(query, (dataset, question_id))
        return None if row is None or row[1] != _checksum(dataset, question_id, row[0]) else bytes(row[0])

    def failures(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (dataset, question id, cause, message) of every question that was set aside."""
        yield from self._rows("SELECT * FROM failures ORDER BY dataset, question_id")

    def usage(self) -> dict[str, Usage]:
        """Return the totals by kind of call."""
        return {kind: Usage(*totals) for kind, *totals in self._rows(_TOTALS)}


def _transact(connection: sqlite3.Connection, statements: Sequence[_Statement]) -> int:
    """Execute statements in one transaction; return the number of all calls."""
    calls = [values for statement, values in statements if statement is _PUT_CALL]
    others = [statement for statement in statements if statement[0] is not _PUT_CALL]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_PUT_CALL, calls)  # threads take turns at each statement
        for statement, values in others:
            connection.execute(statement, values)
        if others:
            _put_checksum(connection)
        return _count(connection)


def _put_call(
    key: str | bytes, kind: str, reply: Any, prompt_tokens: int | None = None, completion_tokens: int | None = None
) -> _Statement:
    text = _json.encode(reply)
    return _PUT_CALL, (key, kind, text, _checksum(key, text), prompt_tokens, completion_tokens)


def _count(connection: sqlite3.Connection) -> int:
    """Return the number of calls."""
    return int(connection.execute("SELECT MAX(rowid) FROM calls").fetchone()[0] or 0)


def _put_checksum(connection: sqlite3.Connection) -> None:
    """Add up the calls that are not in the totals, and store the checksum, if it has changed."""
    connection.execute(_ADD_UP)
    upsert = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    connection.execute(f"{upsert} WHERE value != excluded.value", (_CHECKSUM, _checksum_of(connection)))


def _checksum_of(connection: sqlite3.Connection) -> str:
    """Return the checksum of what no other one covers."""
    return _checksum(repr([connection.execute(query).fetchall() for query in _UNDER_CHECKSUM])).hex()


def _code(error: Exception) -> int:
    """Return SQLite's primary code of an error, 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _checksum(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape"))
        digest.update(b"\0")
    return digest.digest()
