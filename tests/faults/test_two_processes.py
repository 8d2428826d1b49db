"""Two processes on one folder: the second is refused and told who has it, or waits; a dead process holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warmed
from tests.e2e import product
from tests.faults.commands import Command, Commands
from tests.faults.matrix import Figure

pytestmark = pytest.mark.slow

REFUSED = [
    "build-tree",
    "publish",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("eval", "dpo train", "rl train")),
]


def begun(command: Command) -> tuple[Path, warmed.Child]:
    """Return a folder, and the process that is in the middle of its work there, and stopped: it keeps what it holds."""
    for number in range(10):
        out = command.new()
        child = command.begin(out, 0.5 - number / 20)
        child.stop()
        if child.poll() is None and holds_a_lock(child.pid):
            return out, child
        child.kill()  # it was about to end
    raise AssertionError("it ended each time")


def holds_a_lock(pid: int | None) -> bool:
    fields = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return ["FLOCK", str(pid)] in [[kind, owner] for _, kind, _, _, owner, *_ in fields]


@pytest.mark.fault("10", "two processes on one folder", "the second is refused with the pid; a dead one holds nothing")
@pytest.mark.parametrize("name", REFUSED)
def test_a_second_process_is_refused_until_the_first_one_is_dead(name: str, commands: Commands, figure: Figure) -> None:
    command = commands[name]
    out, first = begun(command)
    second = command.start(out)
    code, said = second.wait(60), second.said()
    first.kill()
    first.wait(60)
    refused = code == 2 and f"in use by another process (pid {first.pid} on " in said and "Traceback" not in said
    figure(f"{name}: {'refused in one line, which names the pid' if refused else f'exit code {code}'}")
    assert refused, said
    assert not command.differing(out)


@pytest.mark.fault("10", "two processes build one index", "the second waits, and builds it when the first one is dead")
def test_a_second_build_of_an_index_waits_until_the_first_one_is_dead(commands: Commands, figure: Figure) -> None:
    command = commands["index build"]
    out, first = begun(command)
    second = command.start(out)
    product.wait_until(lambda: "waiting" in second.said() or second.poll() is not None)
    waited = second.poll() is None
    first.kill()
    first.wait(60)
    assert second.wait(120) == 0, second.said()
    figure(next(line for line in second.said().splitlines() if "waiting" in line).replace(str(command.folder), "DIR"))
    assert waited and not command.differing(out)
