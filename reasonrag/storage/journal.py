"""The journal of a run: every model call and finished tree in one SQLite file, so that a killed run can resume.

A search is a pure function of its configuration and of the replies: replaying the journal gives the same
tree, and no other state is saved.

- A reply is on disk before it is used, even if its task is cancelled.
- Every record has a checksum, because SQLite does not notice a flipped bit in a value. A damaged reply or tree is
  reported and made again; damaged pages and indexes make the whole file unusable, and the error names it.
- Calls that were cut off (a deleted `-wal` file, an older copy of the journal) are made again.
- On a full disk the calls in flight are lost, and no others begin.

SQLite runs with full sync, in WAL mode on a local disk. WAL does not work on a disk that machines share,
so there it is a rollback journal, which needs more syncs. One thread writes, and commits everything that
has queued up since its last commit, so that hundreds of calls a second cost a few dozen syncs.

The keys of a question's calls begin alike. So its calls are neighbours in the file, and memory holds only
the keys of the questions in work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.text import excerpt

log = structlog.get_logger()

_QUESTIONS_KNOWN = 2_048  # questions with their keys in memory, 20 kB each

_VERSION = 7  # PRAGMA user_version: of the layout, and of the keys (`llm.journaled.request_key`)

# File systems of one machine's disks, as Linux names them. All others may be shared by machines.
_LOCAL = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"])

# The reply stands last: adding up the counts then reads none of the pages that only replies fill.
# `checksum` is over key and reply; `counts_sum` shows a flipped bit in a count.
_LAYOUT = """
CREATE TABLE calls (
    key BLOB PRIMARY KEY NOT NULL, kind TEXT NOT NULL, prompt_tokens INTEGER, completion_tokens INTEGER,
    counts_sum INTEGER, checksum BLOB NOT NULL, reply TEXT NOT NULL
);
CREATE TABLE trees (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, rows BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (dataset, question_id)
);
CREATE TABLE failures (
    dataset TEXT NOT NULL, question_id TEXT NOT NULL, cause TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (dataset, question_id)
) WITHOUT ROWID
"""
_SUM = "COALESCE({}, -1) + 3 * COALESCE({}, -1)"
# A key that exists already was damaged, or two tasks asked at the same time.
_PUT_CALL = f"""
INSERT INTO calls VALUES (?1, ?2, ?3, ?4, {_SUM.format("?3", "?4")}, ?5, ?6)
ON CONFLICT (key) DO UPDATE SET reply = excluded.reply, checksum = excluded.checksum
"""
_TOTALS = f"""
SELECT kind, COUNT(*), COALESCE(SUM(prompt_tokens), 0), COALESCE(SUM(completion_tokens), 0),
    SUM(completion_tokens IS NULL)
FROM calls WHERE counts_sum IS NULL OR counts_sum = {_SUM.format("prompt_tokens", "completion_tokens")}
GROUP BY kind
"""

# A commit takes as much CPU time as 40 calls, so there are at most 200 a second, while several calls end
# during each. A chain of calls, each of which ends during no other's commit, never waits.
_EVERY_S = 0.005
_BUSY_S, _BUSY_AT_END_S = 60.0, 5.0  # for another process that has the file locked; once the run is shutting down

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Usage(NamedTuple):
    """Totals of one kind of call.

    Attributes:
        unknown_tokens: calls without token counts from the backend.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    unknown_tokens: int


_Statement = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class _Write:
    statements: tuple[_Statement, ...]
    done: asyncio.Future[None]
    error: Exception | None = None


class Journal:
    """The journal of one run. The caller's thread reads; a thread of the journal writes."""

    def __init__(self, path: Path, *, wal: bool | None = None) -> None:
        """Open or create the file. `wal` None chooses the mode by the file system.

        Raises:
            RunError: the file is damaged, or is not a journal of this version.
        """
        self.path = path
        self._mode = "WAL" if (not is_shared(path) if wal is None else wal) else "TRUNCATE"
        self.ended_by: Exception | None = None  # what new calls raise, once they are refused
        self.at_drain: list[Callable[[Exception], None]] = []  # called with it when that begins
        # Writes for the next commit, and the event loop that
        # waits for one. Only that loop's thread touches them.
        self._pending: list[_Write] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        # A failed look-up costs tens of microseconds in WAL mode, and in a fresh run most look-ups fail.
        self._known: OrderedDict[str, tuple[bytes, set[bytes]]] = OrderedDict()
        self._calls_checked = False  # they are most of a journal, and a finished run reads none
        self._writer: sqlite3.Connection | None = None  # of the thread
        with contextlib.ExitStack() as on_error:
            try:
                self._reader = on_error.enter_context(contextlib.closing(self._connect()))
                self._lay_out()
            except (sqlite3.Error, UnicodeDecodeError) as error:  # the second if SQLite's message quotes damaged text
                raise self._explained(error) from error
            self._check("trees", "failures")
            on_error.pop_all()
        self._opened = path.stat()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def _lay_out(self) -> None:
        """Create the tables of a new file, or check the version of an old one."""
        with self._reader as reader:
            # Two processes may open a new file at once: the second one waits here, and finds the tables.
            reader.execute("BEGIN IMMEDIATE")
            (version,) = reader.execute("PRAGMA user_version").fetchone()
            if not reader.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _LAYOUT.split(";"):
                    reader.execute(statement)
            elif version != _VERSION:
                raise RunError(
                    f"{self.path} was begun by a version with layout {version}, and this version of reasonrag reads "
                    f"layout {_VERSION}; go on with the version that began it, or choose a new folder for --out"
                )
            elif reader.execute("SELECT 1 FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone():
                raise sqlite3.DatabaseError("it holds views or triggers, which no version of reasonrag wrote")
            reader.execute(f"PRAGMA user_version = {_VERSION}")

    def _check(self, *tables: str) -> None:
        """Raise if pages or indexes of a table are damaged. It reads all of them, a gigabyte a second."""
        for table in tables:
            for (verdict,) in self._rows(f"PRAGMA integrity_check({table})"):
                if verdict != "ok":
                    raise self._explained(sqlite3.DatabaseError(verdict))

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; raise RunError if they cannot be read."""
        try:
            yield from self._reader.execute(query, values)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _row(self, query: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        return next(self._rows(query, values), None)

    def _explained(self, error: Exception) -> Exception:
        """Return an error of the disk or the file as a RunError, any other one as it is."""
        # The low byte is the kind of error. An OperationalError of the kind SQLITE_ERROR is a wrong
        # statement: ours, or what a damaged schema makes of it.
        code = _code(error)
        if code == sqlite3.SQLITE_BUSY:
            return RunError(
                f"{self.path} is locked by another process ({error}), such as a database browser; close it, then run "
                "the same command again; no stored call is lost"
            )
        if isinstance(error, OSError) or (isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR):
            free = shutil.disk_usage(self.path.parent).free
            return RunError(
                f"{self.path} cannot be used ({error}; {free // 1024:,} kB are free on its disk); mend that, then run "
                "the same command again; no stored call is lost"
            )
        if isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError):
            return RunError(f"{self.path} is damaged ({error}); restore it from a copy or start in a new folder")
        return error

    def _connect(self, busy_s: float = _BUSY_S) -> sqlite3.Connection:
        # Without WAL, reader and writer wait for each other's syncs.
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=busy_s, check_same_thread=False)
        connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")  # damage shows in the checksum
        connection.execute(f"PRAGMA journal_mode={self._mode}")
        # With NORMAL, WAL syncs at checkpoints only, and a
        # power cut would take calls that were used already.
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _store(self, writes: Sequence[_Write]) -> None:
        """Commit writes in one transaction; if that fails, commit each alone, and note the error of each.

        One value that SQLite refuses must not fail the rest of its batch.
        """
        if not writes:
            return
        try:
            # SQLite would write on, into a file without a name.
            if not (self.path.exists() and os.path.samestat(self.path.stat(), self._opened)):
                raise RunError(
                    f"{self.path} was deleted or replaced while this process wrote to it; bring it back, or begin "
                    "again in another folder"
                )
            self._commit([statement for write in writes for statement in write.statements])
        except Exception as error:
            if self._writer is not None:
                # Closing undoes what a failed ROLLBACK has not.
                self._writer.close()
                self._writer = None
            for write in writes:
                if len(writes) == 1 or _code(error) == sqlite3.SQLITE_BUSY:
                    write.error = self._explained(error)
                else:
                    self._store([write])

    def _commit(self, statements: Sequence[_Statement]) -> None:
        """Commit statements, and wait while another process has the file locked, but not for long in a shutdown."""
        begun = time.monotonic()
        while True:
            try:
                self._writer = self._writer or self._connect(busy_s=1.0)
                return _commit(self._writer, statements)
            except sqlite3.OperationalError as error:
                waited_s, most_s = time.monotonic() - begun, _BUSY_S if self.ended_by is None else _BUSY_AT_END_S
                if _code(error) != sqlite3.SQLITE_BUSY or waited_s > most_s:
                    raise

    async def _write(self, *statements: _Statement) -> None:
        """Commit statements, even if the task is cancelled; return when they are on disk."""
        loop = asyncio.get_running_loop()
        write = _Write(statements, loop.create_future())
        self._pending.append(write)
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._begin_commit)  # with all writes of this turn
        await write.done

    def _begin_commit(self) -> None:
        writes, self._pending, loop = self._pending, [], self._loop
        if loop is None or not writes:
            self._loop = None
            return
        next_commit = time.monotonic() + _EVERY_S * (len(writes) > 1)

        def committed(commit: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: stopped by a second Ctrl-C
                loop.call_soon_threadsafe(self._end_commit, writes, next_commit)

        self._thread.submit(self._store, writes).add_done_callback(committed)

    def _end_commit(self, writes: Sequence[_Write], next_commit: float) -> None:
        """Let the callers of some writes go on; begin the next commit when it is due."""
        for write in writes:
            if isinstance(write.error, RunError):
                self.drain(write.error)  # nothing more is paid for that could not be stored
        for write in writes:
            # Its task was cancelled; the call is stored all the same.
            if write.done.done():
                continue
            if write.error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(write.error)
        asyncio.get_running_loop().call_later(max(next_commit - time.monotonic(), 0), self._begin_commit)

    def close(self) -> None:
        """Commit the pending writes and close. A second call does nothing."""
        self._thread.shutdown()
        writes, self._pending = self._pending, []
        self._store(writes)
        if self._writer is not None:
            self._writer.close()
        self._reader.close()

    def drain(self, error: Exception | None = None) -> None:
        """Refuse new calls from now on, with Interrupted if no error is given.

        Calls in flight are still stored, and calls in the file are still replayed.
        """
        self.ended_by = self.ended_by or error or Interrupted("stopped; all finished work is kept")
        for notify in self.at_drain:
            notify(self.ended_by)

    def admit(self) -> None:
        """Raise what `drain` was given, or Interrupted, if the run is shutting down. Called before every paid call."""
        if self.ended_by is not None:
            raise self.ended_by

    def call(self, key: str, question: str = "") -> Any | None:
        """Return the reply stored under a key, as it was given to `put_call`, or None.

        Args:
            key: of the call; in hex digits if it belongs to a question.
            question: the question of the call, `DATASET/ID`; "" for a call that many questions may make.

        Raises:
            RunError: the calls in the file are damaged.
        """
        if not self._calls_checked:
            self._check("calls")
            self._calls_checked = True
        stored_key, known = self._stored_key(key, question)
        if known is not None and stored_key not in known:
            return None
        row = self._row("SELECT checksum, reply FROM calls WHERE key = ?", (stored_key,))
        if row is None:
            return None
        if row[0] != _checksum(stored_key, row[1]):
            log.warning("a reply in the journal is damaged; its call is made again", journal=self.path.name, key=key)
            if known is not None:
                known.discard(stored_key)
            return None
        return json.loads(row[1])

    async def put_call(
        self, key: str, kind: str, reply: Any, *, question: str = "", tokens: Sequence[int | None] = (None, None)
    ) -> None:
        """Store a reply (JSON without NaN); return when it is on disk.

        Args:
            key: as for `call`.
            kind: of the call.
            reply: what `call` returns.
            question: as for `call`.
            tokens: of the prompt and of the completion.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        stored_key, known = self._stored_key(key, question)
        await self._write(_put_call(stored_key, kind, reply, tokens))
        if known is not None:
            known.add(stored_key)

    async def put_calls(self, kind: str, replies: Mapping[str, Any]) -> None:
        """Store replies by key that many questions may ask for, without token counts; otherwise as `put_call`."""
        await self._write(*[_put_call(key, kind, reply) for key, reply in replies.items()])

    def _stored_key(self, key: str, question: str) -> tuple[Any, set[bytes] | None]:
        """Return the key of a call in the file, and all such keys of its question, which are read once."""
        if not question:
            return key, None
        if question not in self._known:
            # A key is eight bytes of its question, then sixteen
            # of the request: this range holds all of a question.
            prefix = hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest()
            keys = self._rows("SELECT key FROM calls WHERE key BETWEEN ? AND ?", (prefix, prefix + b"\xff" * 17))
            self._known[question] = prefix, {key for (key,) in keys}
            if len(self._known) > _QUESTIONS_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(question)
        prefix, known = self._known[question]
        return prefix + bytes.fromhex(key), known

    async def put_tree(self, dataset: str, question_id: str, blob: bytes) -> None:
        """Store a finished tree, packed by `parquet.pack`, and delete the question's earlier failure."""
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

    def finished(self) -> set[tuple[str, str]]:
        """Return (dataset, question id) of every question with an undamaged tree."""
        undamaged = set()
        for dataset, question_id, blob, checksum in self._rows("SELECT * FROM trees"):
            if checksum == _checksum(dataset, question_id, blob):
                undamaged.add((dataset, question_id))
            else:
                log.warning("a tree in the journal is damaged; it is built again", question=question_id)
        return undamaged

    def tree(self, dataset: str, question_id: str) -> bytes | None:
        """Return what `put_tree` stored for a question, or None if it is missing or damaged."""
        query = "SELECT rows, checksum FROM trees WHERE dataset = ? AND question_id = ?"
        row = self._row(query, (dataset, question_id))
        return None if row is None or row[1] != _checksum(dataset, question_id, row[0]) else bytes(row[0])

    def failures(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (dataset, question id, cause, message) of every question that was set aside."""
        yield from self._rows("SELECT * FROM failures ORDER BY dataset, question_id")

    def usage(self) -> dict[str, Usage]:
        """Return the totals by kind of call. Calls with damaged counts are left out, with a warning."""
        totals = {kind: Usage(*values) for kind, *values in self._rows(_TOTALS)}
        (calls,) = self._row("SELECT COUNT(*) FROM calls") or (0,)
        if damaged := calls - sum(total.calls for total in totals.values()):
            log.warning("token counts in the journal are damaged; their calls are left out", calls=damaged)
        return totals


def _code(error: Exception) -> int:
    """Return the kind of an error of SQLite; 0 if it is another one's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _commit(connection: sqlite3.Connection, statements: Sequence[_Statement]) -> None:
    """Execute statements in one transaction."""
    calls = [values for statement, values in statements if statement is _PUT_CALL]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_PUT_CALL, calls)  # threads take turns at each statement
        for statement, values in statements:
            if statement is not _PUT_CALL:
                connection.execute(statement, values)


def _put_call(key: str | bytes, kind: str, reply: Any, tokens: Sequence[int | None] = (None, None)) -> _Statement:
    text = _json.encode(reply)
    return _PUT_CALL, (key, kind, *tokens, _checksum(key, text), text)


def _checksum(*parts: object) -> bytes | None:
    """Return the checksum of texts and bytes; None, which no row holds, if a damaged row has something else."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if not isinstance(part, str | bytes):
            return None
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape"))
        digest.update(b"\0")
    return digest.digest()


def is_shared(path: Path) -> bool:
    """Return whether other machines may see this path: whether its disk is not local, as far as Linux knows."""
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return False
    # In a folder's name, "\\040" is a blank.
    kinds = {folder.encode().decode("unicode_escape"): kind for _, folder, kind, *_ in map(str.split, mounts)}
    path = path.resolve()
    mounted = next((kinds[str(folder)] for folder in (path, *path.parents) if str(folder) in kinds), None)
    return mounted not in _LOCAL
