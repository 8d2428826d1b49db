"""What surrounds a process changes no row: clock, time zone, language, terminal, home, temporary folder, hash seed."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from tests import warmed
from tests.e2e import product
from tests.faults.commands import IN_FLIGHT, Commands
from tests.faults.matrix import Figure, Rounds
from tests.ports import keep_port, refuses

pytestmark = pytest.mark.slow

LIMITS = {
    "build-tree": [
        *(("RLIMIT_FSIZE", kb << 10) for kb in (64, 4, 400)),
        *(("RLIMIT_NOFILE", files) for files in (14, 16, 18)),
        ("RLIMIT_AS", 0),  # with a little more, libraries in C abort the process, as after a SIGKILL
    ],
    "index build": [("RLIMIT_FSIZE", 4 << 10)],
    "dpo train": [*(("RLIMIT_FSIZE", kb << 10) for kb in (8, 64))],
}
UNSET = ("HOME", "TMPDIR", "TERM", "LANG", "USER")
SURROUNDINGS: dict[str, dict[str, str]] = {
    "TZ": {"TZ": "Pacific/Chatham"},
    "LC_ALL=C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "NO_COLOR": {"NO_COLOR": "1", "TERM": "dumb"},
    "no HOME, TMPDIR, TERM, LANG, USER": {},
    "PYTHONHASHSEED": {"PYTHONHASHSEED": "1"},
}


def with_a_jumping_clock(*arguments: str) -> None:
    """Do what `reasonrag` does while the time of day jumps by up to a day with every look at it."""
    now, draw = time.time, random.Random(1)
    time.time = lambda: now() + draw.uniform(-86_400, 86_400)  # type: ignore[assignment]
    time.time_ns = lambda: int(time.time() * 1e9)
    warmed.reasonrag(*arguments)


def with_few_files(*arguments: str) -> None:
    """Do what `reasonrag` does where a shell lets a process have 32 files open, as macOS lets it have 256."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    warmed.reasonrag(*arguments)


def without_gpu_memory(*arguments: str) -> None:
    """Do what `reasonrag` does where the GPU has no memory for a training step."""
    import torch

    def backward(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has less.")

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    warmed.reasonrag(*arguments)


def within_limits(limit: str, most: int, *arguments: str) -> None:
    """Do what `reasonrag` does within a limit of `LIMITS`; that of memory counts from what the process has by now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most += pages * resource.getpagesize() if limit == "RLIMIT_AS" else 0
    resource.setrlimit(getattr(resource, limit), (most, most))
    warmed.reasonrag(*arguments)


@pytest.mark.fault("40", "another time zone, locale, terminal, hash seed; no HOME, no TMPDIR", "the same rows")
@pytest.mark.fault("40", "a clock that jumps by a day, and is set back before the run is resumed", "the same rows")
def test_what_surrounds_a_process_changes_no_row(commands: Commands, rounds: Rounds, figure: Figure) -> None:
    command = commands["build-tree"]
    names = list(SURROUNDINGS)[rounds(3, 0) :]
    differing = {}
    for name in names:
        out = command.new()
        environment = product.environment(**SURROUNDINGS[name])
        if name.startswith("no "):
            environment = {key: value for key, value in environment.items() if key not in UNSET}
        arguments = tuple(map(str, command.arguments(out)))
        if name == "PYTHONHASHSEED":
            done = product.run(*arguments, fresh=True, **SURROUNDINGS[name])
        else:
            done = warmed.run(warmed.reasonrag, *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        differing[name] = command.differing(out)
    out = command.new()
    assert command.server
    server, half = command.server, command.whole.calls // 2
    with server.holding(half):  # or it might end before it is killed
        child = warmed.Child(with_a_jumping_clock, tuple(map(str, command.arguments(out))), product.environment())
        product.wait_until(lambda: len(server.requests) >= half or child.poll() is not None)
        child.kill()
        assert child.wait(60) == -signal.SIGKILL, child.said()
    for path in out.rglob("*"):
        os.utime(path, (time.time() + 86_400,) * 2)  # as if it was written tomorrow
    differing["clock"] = command.differing(out)
    same = [name for name, names in differing.items() if not names]
    figure(f"{len(same)} of {len(differing)} with the same rows: {', '.join(differing)}")
    assert len(same) == len(differing), differing


@pytest.mark.fault(
    "40",
    "`ulimit -n`, `-f` and `-v` that are too low for the command",
    "one line, exit code 2; without the limit the same command goes on, and repeats calls in flight alone",
    before="-v: a traceback, or 'damaged' where a table was read; -n: warnings about coroutines",
)
def test_limits_that_are_too_low(commands: Commands, rounds: Rounds, figure: Figure) -> None:
    twice, stopped, differing = 0, 0, []
    for name, of_command in LIMITS.items():
        command, limits = commands[name], of_command[: rounds(1, 7)]
        for limit, most in limits:
            out = command.new()
            arguments = (limit, most, *map(str, command.arguments(out)))
            done = warmed.run(within_limits, *arguments, environment=product.environment())
            said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert (done.returncode, len(said)) == (2, 1), f"{limit} {most}: {done.returncode} {done.stderr[-2000:]}"
            assert not re.search(r"Traceback|Warning|damaged", done.stderr), done.stderr
            differing += [(name, limit, most, *names) for names in [command.differing(out)] if names]
            twice += command.server.paid_twice if command.server else 0
            stopped += 1 if command.server else 0
        figure(f"{name}: {len(limits)} of {len(limits)} ended in one line")
    figure(f"{twice} calls repeated after {stopped} stops, {IN_FLIGHT} in flight at each")
    assert not differing and twice <= stopped * IN_FLIGHT


@pytest.mark.fault(
    "40",
    "SIGSTOP for longer than a request may take, then SIGCONT, as a scheduler does",
    "what was answered meanwhile is read: no question fails, no call is made twice",
    before="8 of 12 questions failed (timeout), exit code 1",
)
def test_a_process_that_was_stopped_loses_no_call(commands: Commands, figure: Figure) -> None:
    command = commands["build-tree"]
    out = command.new()
    assert command.server
    server, early, limit_s = command.server, command.whole.calls // 4, 4.0
    stop_s = limit_s + 2.2  # late timers tell from 2 s on
    flags = (*map(str, command.arguments(out)), "--set", f"policy.timeout_s={limit_s}")
    with server.holding(early):
        child = warmed.Child(warmed.reasonrag, flags, product.environment())
        product.wait_until(lambda: len(server.requests) >= early or child.poll() is not None)
        child.stop()
    time.sleep(stop_s)
    child.send_signal(signal.SIGCONT)
    done = warmed.ended(child, 60)
    twice, differing = server.paid_twice, command.differing(out)
    figure(f"stopped for {stop_s:g} s with a limit of {limit_s:g} s: exit code {done.returncode}, {twice} calls twice")
    assert (done.returncode, twice, differing) == (0, 0, [])


@pytest.mark.fault(
    "40",
    "RANK and WORLD_SIZE left over from an earlier launch, so a training waits for processes that do not exist",
    "it says so at once, and SIGTERM ends it",
    before="half an hour without a word, and signals had no effect",
)
def test_a_training_that_waits_for_other_processes(commands: Commands, figure: Figure) -> None:
    command = commands["dpo train"]
    with keep_port() as kept:
        port = kept.getsockname()[1]
        launch = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        child = product.start(*command.arguments(command.new()), **launch)
        product.wait_until(lambda: not refuses(port))  # torch waits there for the second process
        child.send_signal(signal.SIGTERM)
        done = warmed.ended(child, 30)
    figure(f"exit code {done.returncode}: {done.stderr.splitlines()[0]}")
    assert done.returncode == -signal.SIGTERM and "one of 2 processes, which wait" in done.stderr


@pytest.mark.fault(
    "40",
    "`ulimit -n` below the number of connections",
    "as many files as the user may open are used: no question fails",
    before="calls failed (unreachable: too many open files), then a traceback",
)
def test_connections_are_not_bounded_by_the_shells_limit_of_files(commands: Commands, figure: Figure) -> None:
    command = commands["build-tree"]
    assert command.server
    flags = (*map(str, command.arguments(out := command.new())), "--concurrency", "64", "--set", "policy.timeout_s=2")
    command.server.forget()
    done = warmed.run(with_few_files, *flags, environment=product.environment())
    figure(f"32 files: exit code {done.returncode}")
    assert (done.returncode, command.differing(out)) == (0, [])


def test_a_training_that_finds_no_memory_on_the_gpu_says_so_in_one_line(commands: Commands) -> None:
    command = commands["dpo train"]
    arguments = map(str, command.arguments(command.folder / "refused"))
    done = warmed.run(without_gpu_memory, *arguments, environment=product.environment())
    errors = [line for line in done.stderr.splitlines() if "memory" in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: the GPU has no memory left; what is finished is kept")
