"""What checks export: finished runs over questions of the demo world, made once by our own environment."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
FOLDER = ROOT / "build" / "peers" / "world"


def reasonrag(*words: object) -> None:
    """Run a command of ours, in our environment; its output goes to stderr."""
    subprocess.run([PYTHON, "-m", "reasonrag", *map(str, words)], cwd=ROOT, check=True, stdout=2)


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """Run a server of ours in this environment; yield its address."""
    server = subprocess.Popen([sys.executable, "-m", "reasonrag", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        yield server.stdout.readline().split()[2]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 128 + signal.SIGTERM


def run(policy: str, *, limit: int = 100, iterations: int = 6) -> Path:
    """Return a finished run of two data sets: `hotpotqa`, a name that trainers know, and `mine`."""
    out, files = FOLDER / policy.replace(":", "-"), FOLDER / "files"
    if not (out / "run.json").exists():
        if not files.exists():
            reasonrag("export", "demo", "--to", "flashrag", "--out", files)
            rows = (files / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            for name, part in (("hotpotqa", rows[:100]), ("mine", rows[100:200])):
                (files / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
        searched = (
            "--dataset",
            f"{files / 'hotpotqa.jsonl'},{files / 'mine.jsonl'}",
            "--corpus",
            files / "corpus.jsonl",
        )
        size = ("--limit", limit, "--iterations", iterations, "--seed", 0)
        reasonrag("build-tree", *searched, "--policy", policy, *size, "--out", out)
    return out


def answered(run: Path) -> Iterator[tuple[str, float, tuple[str, str]]]:
    """Yield the text, the exact match and the question of every finished trajectory of a growing turn."""
    import pyarrow.dataset

    columns = ["dataset", "question_id", "prefix", "text", "em"]
    for row in pyarrow.dataset.dataset(run / "trees").to_table(columns=columns).to_pylist():
        if row["em"] is not None:
            yield row["prefix"] + row["text"], row["em"], (row["dataset"], row["question_id"])


def opened_twice(turn: str) -> bool:
    """Return whether an answer holds another opening tag: the scorers of others read from the first one on."""
    return any("<answer>" in answer for answer in re.findall("(?s)<answer>(.*?)</answer>", turn))
