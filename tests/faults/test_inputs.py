"""What people hand in: settings, rows, texts and names that nobody should have written."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import ConfigError, DataError, ReasonRAGError
from reasonrag.core.settings import named_path, parse_assignment
from reasonrag.core.text import parse_json, redact
from reasonrag.dpo.preferences import Unusable, read_row
from reasonrag.evaluation.run import check_names
from reasonrag.formats import open_format
from reasonrag.publish.hub import check_target
from reasonrag.storage.questions import load_questions
from tests import warmed
from tests.e2e import product
from tests.e2e.world import World, questions, write_jsonl
from tests.faults.matrix import Figure, Rounds
from tests.faults.test_surroundings import within_limits

Fuzz = Callable[[st.SearchStrategy[Any], Callable[[Any], object], int], int]


@pytest.fixture
def fuzz(rounds: Rounds) -> Fuzz:
    """Return a function that tries a check on values of a strategy: 25 in the suite, `many` in a full run."""

    def run(values: st.SearchStrategy[Any], check: Callable[[Any], object], many: int) -> int:
        tried = rounds(25, many)
        phases = (Phase.generate,) if tried < many else (Phase.generate, Phase.shrink)
        profile = settings(
            max_examples=tried,
            phases=phases,
            deadline=None,
            database=None,
            derandomize=tried < many,
            suppress_health_check=list(HealthCheck),
        )
        profile(given(values)(lambda value: check(value)))()
        return tried

    return run


# --- Settings ---


def _bomb(levels: int, width: int) -> str:
    """YAML that stands for `width ** levels` texts."""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


BOMBS = {
    "9 levels of 10 aliases": _bomb(9, 10),
    "100,000 brackets": "[" * 100_000,
    "nested lists": "- " * 100_000,
    "a number of base 60": ":".join("1" * 400_000),
    "a number of a million digits": "9" * 1_000_000,
    "10 MB": "# " + "x" * 10_000_000,
    "a key twice": "seed: 1\nsearch: {iterations: 2}\nseed: 3",
    "a key twice on one line": "search: {iterations: 2, iterations: 3}",
    "code": "!!python/object/apply:os.system ['true']",
    "a half of a character": '"\\ud800": 1',
    "60,000 values": "- a\n" * 60_000,
    "a long key over many values": f"? {'k' * 500_000}\n: {{{', '.join(f'a{n}: 1' for n in range(20_000))}}}",
}


@pytest.mark.fault(
    "A6",
    "YAML bombs, and keys that stand twice, as --config",
    "one clear line each, at a bounded cost; both lines of a key are named",
    before="no end in 60 s; the last of two keys counts",
)
def test_yaml_that_would_never_end(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    file, said, seconds = tmp_path / "c.yaml", {}, {}
    for name, text in list(BOMBS.items())[: rounds(len(BOMBS) - 2, len(BOMBS))]:
        file.write_text(text)
        began = time.process_time()
        with pytest.raises(ConfigError) as refused:
            load_config(file=file)
        said[name], seconds[name] = str(refused.value), time.process_time() - began
    slowest = max(seconds, key=lambda name: seconds[name])
    figure(f"{len(said)} of {len(said)} refused; at most {seconds[slowest]:.1f} CPU s ({slowest})")
    assert all("\n" not in line and len(line) < 700 for line in said.values())
    assert "'seed' stands in it twice, in line 1 and in line 3" in said["a key twice"]
    assert "write the value out" in said["9 levels of 10 aliases"]
    for text in ('{"id": "q", "id": "r"}', '{"a": {"b": 1, "b": 1}}'):
        with pytest.raises(ValueError, match="stands in it twice"):
            parse_json(text)


_ODD = ["", "~", "~nobody/x", "hf:" + "a" * 5000, "python:", "python:..:x", "python:os:", "demo:x", "\0", "\ud800", "."]
_ODD += ["http://", "https://u@h", "0x", "1_0", "1:2", ".inf", "<<", "=", "!!int", "&a", "*a", "{", "a=b=c", "${HOME}"]
_TEXTS = st.text(max_size=20) | st.sampled_from(_ODD)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS | st.integers(), inner, max_size=4),
    max_leaves=12,
)
_KEYS = [
    (section, name)
    for section, field in Config.model_fields.items()
    for name in getattr(field.annotation, "model_fields", ())
]
_TREES = st.dictionaries(
    st.sampled_from([*Config.model_fields, "x"]),
    _VALUES | st.dictionaries(st.sampled_from([name for _, name in _KEYS]) | _TEXTS, _VALUES, max_size=4),
    max_size=4,
)


@pytest.mark.fault("fuzz", "any YAML, JSON or flag as settings", "a configuration, or one ConfigError in one line")
def test_any_settings(tmp_path: Path, fuzz: Fuzz, figure: Figure) -> None:
    file = tmp_path / "c.yaml"
    outcomes = {"read": 0, "refused": 0}

    def load(**source: Any) -> None:
        try:
            config = load_config(**source)
            outcomes["read"] += 1
        except ConfigError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
            return
        with suppress(ReasonRAGError):  # what a configuration names need not exist
            open_format(config)

    def tree(value: Any) -> None:
        file.write_text(yaml.safe_dump(value, allow_unicode=True), encoding="utf-8")
        load(file=file)

    def text(value: str) -> None:
        file.write_bytes(value.encode("utf-8", "surrogatepass"))
        load(file=file)
        with suppress(ValueError):
            parse_json(value)

    def flag(pair: tuple[tuple[str, str], str]) -> None:
        (section, name), value = pair
        with suppress(ConfigError):
            key, parsed = parse_assignment(f"{section}.{name}={value}")
            load(overrides={key: parsed})
        load(overrides={f"{section}.{name}": value})

    marks = st.sampled_from(
        [*"{}[]&*!|>'\"%@`,?:-#\n\t \\0a1=<~", "<<", "---", "...", "- ", ": ", "\ud800", "\x00", "é"]
    )
    tried = fuzz(_TREES, tree, 1500)
    tried += fuzz(st.lists(marks, max_size=40).map("".join) | st.text(), text, 4000)
    tried += fuzz(st.tuples(st.sampled_from(_KEYS), _TEXTS | _VALUES.map(str)), flag, 1500)
    figure(f"{tried:,} inputs: {outcomes['read']:,} read, {outcomes['refused']:,} refused, 0 other errors")


# --- Rows of others ---

_NAMES = ["id", "question", "golden_answers", "answers", "answer", "metadata", "choices", "prompt", "chosen"]
_NAMES += ["rejected", "instruction", "input", "chosen_action_type", "rejected_action_type", "layer", "tools"]
_NAMES += ["depth", "margin"]
_MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), _TEXTS | st.sampled_from(["user", "assistant"])),
    max_size=3,
)
_ROWS = st.dictionaries(st.sampled_from(_NAMES) | _TEXTS, _VALUES | _MESSAGES, max_size=8)
_ASKED = st.fixed_dictionaries(
    {"id": _TEXTS, "question": _TEXTS, "golden_answers": _VALUES}, optional={"metadata": _VALUES}
)


@pytest.mark.fault(
    "fuzz", "any rows as questions: JSON lines, JSON, Parquet", "questions, or one DataError in one line"
)
def test_any_questions(tmp_path: Path, fuzz: Fuzz, figure: Figure) -> None:
    outcomes = {"read": 0, "refused": 0}

    def load(path: Path) -> None:
        try:
            found = load_questions(str(path))
            outcomes["read"] += 1
            assert len({question.id for question in found}) == len(found) > 0
        except DataError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1

    def lines(rows: list[Any]) -> None:
        path = tmp_path / "q.jsonl"
        path.write_text(
            "\n".join(json.dumps(row) if not isinstance(row, str) else row for row in rows), "utf-8", "replace"
        )
        load(path)
        (tmp_path / "q.json").write_text(json.dumps(rows), encoding="utf-8")
        load(tmp_path / "q.json")

    def parquet(rows: list[dict[str, Any]]) -> None:
        try:
            table = pa.Table.from_pylist([{str(key): value for key, value in row.items()} for row in rows])
            pq.write_table(table, tmp_path / "q.parquet")
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
            return  # no such table can be written
        load(tmp_path / "q.parquet")

    tried = fuzz(st.lists(_ASKED | _ROWS | _TEXTS, max_size=4), lines, 1500)
    tried += fuzz(st.lists(_ASKED | _ROWS, min_size=1, max_size=3), parquet, 1000)
    figure(f"{tried:,} files: {outcomes['read']:,} read, {outcomes['refused']:,} refused, 0 other errors")


@pytest.mark.fault("fuzz", "any rows of pairs", "a pair, or one error that says why not")
def test_any_import(fuzz: Fuzz, figure: Figure) -> None:
    def row(value: dict[str, Any]) -> None:
        with suppress(Unusable):
            assert read_row("", value).sides.chosen

    tried = fuzz(_ROWS, row, 3000)
    figure(f"{tried:,} inputs, 0 other errors")


@pytest.mark.fault(
    "27", "a line of 65 MiB as text, gzip and in a tar archive", "refused, and no more of it is unpacked"
)
def test_a_line_without_an_end(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    line, archived = b"x" * (65 << 20), io.BytesIO()
    packed = {"q.jsonl.gz": gzip.compress(line, 1), "q.jsonl": line}
    if rounds(1, 2) > 1:
        with tarfile.open(fileobj=archived, mode="w") as archive:
            entry = tarfile.TarInfo("q.jsonl")
            entry.size = len(line)
            archive.addfile(entry, io.BytesIO(line))
        packed["tar.jsonl.gz"] = gzip.compress(archived.getvalue(), 1)
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="row 1 has more than 64 MiB"):
            load_questions(str(tmp_path / name))
    figure(f"{len(packed)} of {len(packed)} refused; the smallest has {min(map(len, packed.values())):,} bytes")


@pytest.mark.fault(
    "27",
    "60 MB of blank lines in 60 kB, 100 MB of rows, or of what stands behind them, in 100 kB, a pipe",
    "refused in a line after a megabyte of blank lines, or 64 MiB of what unpacks too well",
    before="19 s of CPU time before the first word, memory for each row, or no end",
)
def test_a_file_of_nothing_much(tmp_path: Path, figure: Figure) -> None:
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w") as archive:
        entry = tarfile.TarInfo("q.jsonl")
        entry.size = 10
        archive.addfile(entry, io.BytesIO(b"\n" * 10))
    archived.write(bytes(100 << 20))
    files = {
        "blank.jsonl.gz": (gzip.compress(b"\n" * 60_000_000, 1), "1 MiB of blank lines"),
        "blank.jsonl": (b" \n" * 600_000, "1 MiB of blank lines"),
        "rows.jsonl.gz": (gzip.compress((b"[%s]\n" % (b" " * (1 << 20))) * 100, 9), "200 times its size"),
        "tar.jsonl.gz": (gzip.compress(archived.getvalue(), 9), "200 times its size"),
    }
    for name, (data, said) in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=said):
            load_questions(str(tmp_path / name))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="not a file; give one of"):
        load_questions(str(tmp_path / "pipe.jsonl"))
    figure(f"{len(files) + 1} of {len(files) + 1} refused; the smallest has {len(files['blank.jsonl.gz'][0]):,} bytes")


@pytest.mark.fault(
    "27",
    "a .json file of 10 GB, or one that is larger than `ulimit -v`: trajectories, questions, a corpus",
    "one line with its size and what to write instead, exit code 2",
    before="a MemoryError, or no memory left for the machine",
)
@pytest.mark.parametrize(("gb", "room"), [(10, 4 << 30), (1, 1 << 28)])
def test_a_json_file_that_fits_into_no_memory(
    gb: int, room: int, tmp_path: Path, rounds: Rounds, figure: Figure
) -> None:
    file = tmp_path / "large.json"
    file.touch()
    os.truncate(file, gb * 10**9)
    commands = [
        ("build-tree", "--policy", "demo", "--dataset", file, "--corpus", tmp_path / "no.jsonl", "--dry-run"),
        ("index", "build", "--kind", "bm25", "--corpus", file, "--out", tmp_path / "index"),
    ][: rounds(1, 2)]
    for command in commands:
        arguments = ("RLIMIT_AS", room, *map(str, command))
        done = warmed.run(within_limits, *arguments, environment=product.environment())
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, len(said)) == (2, 1) and "Traceback" not in done.stderr, done.stderr
        assert f"large.json: a .json file of {gb}.0 GB is too large" in said[0] and "row by row" in said[0]
    figure(f"{gb} GB: {len(commands)} of {len(commands)} ended in this line")


# --- Secrets in a text ---

_SECRET = "aB3dE5fG7hJ9kL2mN4pQ6rS8tU0vW1xY3zA5bC7d"
_PLANTED = [f"hf_{_SECRET[:34]}", f"ghp_{_SECRET[:36]}", f"sk-ant-api03-{_SECRET}-{_SECRET}"]
_PLANTED += [f"sk-proj-{_SECRET}{_SECRET}", f"xoxb-123456789012-{_SECRET[:24]}", f"glpat-{_SECRET[:20]}"]
_PLANTED += [f"AIza{_SECRET[:35]}", "AKIAQ3EGRWZB7XKLMN2P"]


@pytest.mark.fault("fuzz", "secrets in any text", "none survives, a second pass changes nothing")
def test_any_text_around_a_secret(fuzz: Fuzz, figure: Figure) -> None:
    around = st.text(max_size=40) | st.sampled_from(
        ["Authorization: Bearer ", "https://me:", "?key=", "\\n", "%20", "-----BEGIN"]
    )

    def check(parts: tuple[str, str, str]) -> None:
        before, secret, after = parts
        # A letter or digit that follows or precedes makes another word of it, which has no shape.
        text = f"{before} {secret} {after}"
        clean = redact(text)
        assert secret not in clean
        assert redact(clean) == clean

    tried = fuzz(st.tuples(around, st.sampled_from(_PLANTED), around), check, 10_000)
    figure(f"{tried:,} texts, 0 secrets left")


# --- Names that become paths ---

HOSTILE = ["../../outside", "/tmp/outside-abs", "a/../../outside", "..", ".", "CON", "nul", "com1.txt", "a."]
HOSTILE += ["a\\..\\b", "~root", "x" * 10_000, "a\nb", "\u202egpj", "-rf", "$(touch outside)", "a b", "%2e%2e%2f"]
HOSTILE += ["..%00"]


def _listing(folder: Path) -> Iterator[tuple[str, bool, int]]:
    for path in folder.rglob("*"):
        yield str(path), path.is_symlink(), path.stat().st_size


@pytest.mark.fault(
    "36",
    "names that become paths: ../../x, absolute, NUL, 10 kB, reserved by Windows",
    "refused, or made plain; nothing outside is written",
)
def test_nothing_is_written_outside(world: World, tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    cage = tmp_path / "a" / "b" / "out"
    cage.mkdir(parents=True)
    ids = [*HOSTILE, "nul\0byte"]
    rows = [
        row | {"id": ids[n % len(ids)] + ("" if n < len(ids) else str(n))} for n, row in enumerate(questions() * 4)
    ][: len(ids)]
    asked = write_jsonl(tmp_path / "..-CON.jsonl", rows)
    watched = set(_listing(tmp_path))
    run = cage / "run"
    product.build(
        *world.flags_but("--dataset"), "--dataset", asked, "--policy", "extractive", "--iterations", "2", "--out", run
    )
    commands: list[tuple[str | Path, ...]] = [("report", run)]
    commands += [("export", run, "--to", "llamafactory", "--out", cage / "factory")]
    commands += [("publish", run, "--repo-id", "me/x", "--dry-run", "--allow", "path")]
    for args in commands[: rounds(1, len(commands))]:
        done = product.run(*args)
        assert done.returncode == 0, done.stderr
    repositories = [f"me/{name}" for name in HOSTILE if not name.isalnum() and name != "com1.txt"]
    for name in HOSTILE:
        with pytest.raises(ConfigError):
            check_names([name])
    for name in repositories:
        with pytest.raises(ConfigError):
            check_target(name, None)
    outside = {entry for entry in set(_listing(tmp_path)) - watched if not entry[0].startswith(str(tmp_path / "a"))}
    inside = [Path(entry[0]) for entry in _listing(cage)]
    commands_run = rounds(1, len(commands)) + 1
    figure(f"{len(rows)} ids through {commands_run} commands: {len(outside)} files outside")
    figure(f"{len(HOSTILE)} names of policies and {len(repositories)} of repositories refused")
    assert not outside
    assert not Path("/tmp/outside-abs").exists() and not (tmp_path / "outside").exists()
    assert all(path.resolve().is_relative_to(cage) for path in inside)
    assert all(len(os.fsencode(path.name)) < 200 for path in inside)


@pytest.mark.fault("36", "the same as paths that a setting names", "one line, exit code 2")
def test_paths_that_cannot_be(tmp_path: Path, figure: Figure) -> None:
    texts = ["~nobody-here/x", "a" * 300, "\0", "\ud800", "/".join(["a" * 200] * 30)]
    for text in texts:
        with pytest.raises(ConfigError, match="cannot be used as a path"):
            named_path(text)
    figure(f"{len(texts)} of {len(texts)} refused")
