"""What models, passages and tables of strangers hold, printed by the real command on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reasonrag.storage.files import write_text
from reasonrag.storage.parquet import write_parquet
from reasonrag.storage.tables import tree_schema
from tests.e2e import product
from tests.e2e.world import write_jsonl
from tests.fakes.model_server import FakeOpenAI
from tests.report.hostile import rows, write_run

COLOUR = "\x1b[38;5;201m"  # which no style of ours uses
ATTACKS = (
    f"{COLOUR}pink\x1b[0m",
    "\x1b]8;;http://evil.example/\x1b\\link\x1b]8;;\x07",  # OSC 8
    "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07",  # the window's title, the clipboard
    "\x1bP+q\x1b\\\x1bc",  # DCS, reset
    "\x9b2J\x9d0;owned\x9c\x85",  # the same and a new line in C1
    "abc\u202egnp.exe\u2066\u200e\u2028\u2029\ufeff",
    "over\rwritten\b\b\x7f\x0b\x0c\x00",
    "[red]markup[/red][link=http://evil.example/]shown[/link]",
)
HOSTILE = "".join(ATTACKS)
LEGIBLE = (
    "�[38;5;201mpink�[0m",
    "�]8;;http://evil.example/�",
    "abc�gnp.exe",
    "[red]markup[/red][link=http://evil.exampl",
)
STYLING = re.compile(r"\x1b\[[0-9;]*m")
PANEL = re.compile(r"\x1b\[\?25[lh]|\r?\x1b\[(?:2K|1A)")  # how a panel is drawn over itself; no attack has these


def on_a_terminal(*args, columns=4000):
    """Run `reasonrag` on a terminal of that width; its exit code, and what it wrote without styling and panels."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    raw = termios.tcgetattr(theirs)
    raw[1] &= ~termios.OPOST  # else each line would end with a carriage return
    termios.tcsetattr(theirs, termios.TCSANOW, raw)
    unset = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"}
    environment = {name: value for name, value in product.environment().items() if name not in unset}
    child = subprocess.Popen(
        [product.REASONRAG, *map(str, args)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # EIO is the end of a terminal
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    text = written.decode("utf-8")
    assert COLOUR not in text
    return child.wait(), STYLING.sub("", PANEL.sub("", text)), len(STYLING.findall(text))


def change_summary(run, **changes):
    """Give `run.json` other values."""
    summary = json.loads((run / "run.json").read_text(encoding="utf-8"))
    write_text(run / "run.json", json.dumps(summary | changes))


def acting(text):
    """The characters that do something to a terminal, or to the order of others on it."""
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Tables that `build-tree` never wrote: text stands even where there are names of ours."""
    tree = rows(15, question_id="q", dataset=HOSTILE, text=HOSTILE)
    run = write_run(tmp_path_factory.mktemp("strange") / "run", [tree], text=HOSTILE)
    names = ("origin", "stage", "action", "stop_reason", "finish_reason")
    attacked = [row | dict.fromkeys(names, HOSTILE) for row in tree]
    write_parquet(run / "trees" / "nodes-00000-of-00001.parquet", attacked, tree_schema())
    (pairs,) = (run / "pairs").glob("*.parquet")
    table = pq.read_table(pairs)
    for name in ("chosen_type", "rejected_type", "dataset"):
        column = pa.array([HOSTILE] * len(table), pa.string())
        table = table.set_column(table.schema.get_field_index(name), name, column)
    write_parquet(pairs, table.to_pylist(), table.schema)
    used = {"calls": 1, "prompt_tokens": None, "completion_tokens": None, "cost": None}
    change_summary(run, seconds=1.0, calls={HOSTILE: used})
    return run


def test_figures_of_a_stranger_do_not_act_on_the_terminal(strange):
    code, text, _ = on_a_terminal("show", strange)
    assert (code, acting(text)) == (0, set()), text
    for name in ("failed", "malformed", "with pairs"):
        assert re.search(f"{name}:? {re.escape(LEGIBLE[0])}", text), name
    assert text.count(LEGIBLE[-1]) >= 5


@pytest.fixture
def world(tmp_path):
    """Flags of `build-tree` for a data set and a corpus that attack."""
    question = {"id": "q0", "question": f"Who? {HOSTILE}", "golden_answers": [HOSTILE], "metadata": {}}
    passages = [{"id": f"p{n}", "contents": f"Title {n}\n{HOSTILE} pink link"} for n in range(3)]
    files = write_jsonl(tmp_path / "questions.jsonl", [question]), write_jsonl(tmp_path / "corpus.jsonl", passages)
    cache = f"retrieval.cache={tmp_path / 'cache'}"
    return "--dataset", files[0], "--corpus", files[1], "--set", cache, "--iterations", "4"


def test_a_tree_shows_what_a_hostile_model_writes_as_text(world, tmp_path):
    def reply(request):
        tag = "evidence" if "</evidence>" in request["stop"] else "query" if request["seed"] % 2 else "answer"
        return f"{HOSTILE}<{tag}>{HOSTILE}</{tag}>"

    with FakeOpenAI(reply) as server:
        policy = ("--policy", server.base_url, "--policy-model", "fake")
        product.build(*world, *policy, "--out", tmp_path / "run")
    code, text, styled = on_a_terminal("show", tmp_path / "run", "q0")
    assert (code, acting(text)) == (0, set()), text
    assert styled > 0 and "─ " in text
    for legible in LEGIBLE:
        assert legible in text
