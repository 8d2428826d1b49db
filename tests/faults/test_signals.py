"""SIGTERM and Ctrl-C in every long command: it ends by itself, says how to go on, and goes on to the same result."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import Config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import gather, validate
from reasonrag.core.types import Shard
from reasonrag.online_rl.settings import RLSettings
from reasonrag.training.settings import DPOSettings
from tests import warmed
from tests.e2e import product
from tests.faults.commands import Commands, has_begun, used_s
from tests.faults.matrix import Figure, Rounds

pytestmark = pytest.mark.slow

TERM, CTRL_C, TWICE = (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGINT)
# What each is sent in the suite; at full size it is all three.
LONG: dict[str, tuple[tuple[signal.Signals, ...], ...]] = {
    "build-tree": (TERM, CTRL_C, TWICE),
    "eval": (CTRL_C,),
    "dpo train": (TERM, TWICE),
    "index build": (CTRL_C,),
    "publish": (TERM,),
}
# The suite has others like it: one harness trains, and `tests/online_rl/test_train.py` stops it in a rollout.
FULL = ("rl train",)
SERVERS = ("index serve", "env serve")


@pytest.mark.fault("3", "SIGTERM to a server", "it exits with 143, without a traceback, while it starts and afterwards")
@pytest.mark.fault("4", "Ctrl-C to a server", "it exits with 130, without a traceback, while it starts and afterwards")
@pytest.mark.parametrize("name", SERVERS)
def test_a_signal_ends_a_server(name: str, commands: Commands, rounds: Rounds, figure: Figure) -> None:
    command, draw, tries = commands[name], random.Random(3), rounds(1, 5)
    early, wrong = 0, []
    for number in (signal.SIGTERM, signal.SIGINT):
        for _ in range(tries):
            child = command.start(command.folder / "out")
            # A server that listens uses next to no CPU time: a moment that is drawn too late is that of listening.
            cpu_s = draw.uniform(0.0, 0.3) if draw.random() < 0.5 else math.inf
            product.wait_until(
                lambda child=child, cpu_s=cpu_s: (
                    "listening" in child.printed() or child.poll() is not None or (used_s(child) or 0.0) >= cpu_s
                )
            )
            early += "listening" not in child.printed()
            child.send_signal(number)
            said = warmed.ended(child, 60).stderr
            wrong += [said] * (child.returncode != 128 + number or "Traceback" in said)
    figure(f"{name}: {2 * tries - len(wrong)} of {2 * tries} ended so, {early} of them while it started")
    assert not wrong


@pytest.mark.fault("3", "SIGTERM", "it exits with 143, without a traceback, and the same command goes on")
@pytest.mark.fault(
    "4", "Ctrl-C, once and twice", "calls in flight end (not if twice), it says how to go on and exits with 130"
)
@pytest.mark.parametrize("name", [*LONG, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_a_signal_ends_it_and_the_same_command_goes_on(
    name: str, commands: Commands, rounds: Rounds, figure: Figure
) -> None:
    command, draw, tries = commands[name], random.Random(name), rounds(1, 3)
    ended, wrong = Counter[str](), []
    for sent in (TERM, CTRL_C, TWICE) if rounds(0, 1) else LONG[name]:
        done = late = 0
        while done < tries:
            assert late < 20
            out = command.new()
            # Behind its last step a training only saves, and ends with 0: then an earlier moment is drawn.
            child = command.interrupt(out, (done + draw.uniform(0.2, 0.8)) / (tries + late), *sent)
            said, whole = child.said(), child.returncode == 0
            done, late = done + (not whole), late + whole
            drained = "Resume with:\n" in said
            if drained:
                line = said.rpartition("Resume with:\n")[2].strip().partition("\n")[0]  # the second may come behind it
                assert shlex.split(line) == ["reasonrag", *map(str, command.arguments(out))]
            if not whole:
                kind = "when the calls in flight had ended" if drained else "at once"
                ended[kind] += 1
                wrong += [said] * (child.returncode != 128 + sent[0] or "Traceback" in said or not said.strip())
            wrong += command.differing(out)
            if command.server and sent is not TWICE:
                assert command.server.paid_twice == 0, "calls in flight are waited for"
    figure(f"{name}: {', '.join(f'{count} ended {how}' for how, count in sorted(ended.items()))}; all went on")
    assert not wrong


def test_no_library_is_imported_before_signals_are_answered() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module = project["scripts"]["reasonrag"].partition(":")[0]
    code = f"import sys; old = {{*sys.modules}}; import {module}; print(*({{*sys.modules}} - old))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert theirs == {"reasonrag", "reasonrag.__main__", "reasonrag.core", "reasonrag.core.event_loop"}
    assert "asyncio" not in done.stdout.split()  # 30 ms


def with_a_full_stderr(*arguments: str) -> None:
    """Do what `reasonrag` does with a stderr that nobody reads."""
    _unread, stderr = os.pipe()
    os.set_blocking(stderr, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stderr, b"x")
    os.set_blocking(stderr, True)
    os.dup2(stderr, 2)
    warmed.reasonrag(*arguments)


@pytest.mark.fault(
    "3", "SIGTERM while stderr is full and nobody reads it", "it exits with 143", before="hung while it said so"
)
def test_sigterm_ends_a_process_whose_stderr_nobody_reads(tmp_path: Path, figure: Figure) -> None:
    arguments = ("build-tree", "--preset", "demo", "--limit", "2", "--out", str(tmp_path / "out"))
    child = warmed.Child(with_a_full_stderr, arguments, product.environment())
    try:
        product.wait_until(lambda: has_begun(child))
        child.send_signal(signal.SIGTERM)
        code = child.wait(60)
    finally:
        child.kill()
    figure(f"exit code {code}")
    assert code == 128 + signal.SIGTERM


class Busy:
    """A retriever that never lets the event loop go on."""

    fingerprint = "busy"

    def __init__(self, config: object, questions: object = None) -> None:
        return

    async def search(self, queries: Sequence[str], top_k: int) -> list[Any]:
        print("busy", flush=True)
        while True:
            sum(range(1000))

    async def aclose(self) -> None:
        return


@pytest.mark.fault(
    "3", "SIGTERM while the event loop is busy, once and twice", "it exits with 143", before="only SIGKILL ended it"
)
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_ends_a_process_whose_event_loop_is_busy(tmp_path: Path, signals: int, figure: Figure) -> None:
    busy = ("--retriever", f"python:{__name__}:Busy", "--policy", "extractive", "--dataset", "demo")
    child = warmed.Child(warmed.reasonrag, ("build-tree", *busy, "--out", str(tmp_path / "out")), product.environment())
    try:
        product.wait_until(lambda: "busy" in child.printed() or child.poll() is not None)
        for _ in range(signals):
            child.send_signal(signal.SIGTERM)
        code = child.wait(60)
    finally:
        child.kill()
    figure(f"{signals} signals: exit code {code}")
    assert code == 128 + signal.SIGTERM, child.said()


@pytest.mark.fault(
    "A18",
    "counts of 10^7, 10^30, -1 for flags that repeat work, and rates of 2^32",
    "refused in a line that names the most",
    before="memory without end and no end by SIGTERM, or a traceback",
)
def test_a_count_has_a_bound(figure: Figure) -> None:
    counts = ("search.iterations", "search.max_children", "value.rollouts", "pairs.confirm", "choice.best_of")
    refused = 0
    for model, names in (
        (Config, counts),
        (DPOSettings, ("gradient_accumulation_steps", "learning_rate", "beta", "num_train_epochs")),
        (RLSettings, ("rollout.group_size", "rollout.questions_per_step", "max_steps", "learning_rate")),
    ):
        for name in names:
            for value in (10_000_000, 2**63, 10**30, -1):
                with pytest.raises(ConfigError, match=r"(less|greater) than"):
                    validate(model, gather({}, overrides={name: value}))
                refused += 1
    with pytest.raises(ConfigError, match="is not I/S"):
        Shard.parse("0/100000000")
    figure(f"{refused + 1} of {refused + 1} refused")
