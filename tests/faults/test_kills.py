"""SIGKILL at any moment costs nothing but the calls in flight: the same command goes on and ends with the same result.

Moments are drawn over the whole life of a process, its start and its end included. A kill counts if the process died of
it; where it came after the end, one more whole run is compared.
"""

from __future__ import annotations

import random
import signal

import pytest

from tests.faults.commands import IN_FLIGHT, Commands
from tests.faults.matrix import Figure, Rounds

pytestmark = pytest.mark.slow

KILLS = {  # at full size
    "build-tree": 40,
    "index build": 10,
    "dpo train": 15,
    "rl train": 15,
    "eval": 5,
    "publish": 5,
}
# In the suite, `test_run_folders.py` kills these in the middle, and `tests/online_rl/test_train.py` a training.
FULL = ("index build", "publish", "rl train")


@pytest.mark.fault(
    "1",
    "SIGKILL at a random moment, resume",
    "the result of a run that nothing interrupted; only calls in flight twice",
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in KILLS]
)
def test_killed_at_a_random_moment_it_ends_with_the_same_result(
    name: str, commands: Commands, rounds: Rounds, figure: Figure
) -> None:
    command, draw, tries = commands[name], random.Random(5), rounds(1, KILLS[name])
    kills = unwritten = late = most = 0
    differing = []
    while kills < tries:
        assert late <= tries + 20
        out = command.new()
        # One in each part of the life: still uniform, and no part is left out.
        child = command.interrupt(out, (kills + draw.random()) / tries, signal.SIGKILL)
        assert child.returncode in (-signal.SIGKILL, 0), child.said()
        kills += child.returncode != 0
        late += child.returncode == 0
        unwritten += not out.exists() or not any(path.is_file() for path in out.rglob("*"))
        if names := command.differing(out):
            differing.append((child.returncode, *names))
        most = max(most, command.server.paid_twice if command.server else 0)
    calls = f", at most {most} of {command.whole.calls} calls paid twice with {IN_FLIGHT} in flight"
    when = f"{unwritten} kills before anything was written, {late} more came after the end"
    same = f"{kills - len(differing)} of {kills} gave the same result"
    figure(f"{name}: {same}{calls if command.server else ''} ({when})")
    assert not differing
    assert most <= IN_FLIGHT


@pytest.mark.fault("2", "five SIGKILLs in one run", "the same result; each kill pays at most the calls in flight again")
def test_killed_five_times_it_pays_for_nothing_but_what_was_in_flight(
    commands: Commands, rounds: Rounds, figure: Figure
) -> None:
    command, draw, tries = commands["build-tree"], random.Random(2), rounds(1, 20)
    kills = twice = most = same = 0
    for _ in range(tries):
        out = command.new()
        for _ in range(5):  # a resumed run has a part of the life left
            kills += command.interrupt(out, draw.uniform(0.1, 0.5), signal.SIGKILL).returncode != 0
        same += not command.differing(out)
        assert command.server
        twice += command.server.paid_twice
        most = max(most, command.server.paid_twice)
    calls = tries * command.whole.calls
    figure(
        f"{same} of {tries} runs gave the same result after {kills} kills; {twice} of {calls} calls paid twice "
        f"({twice / calls:.1%}), at most {most} in a run, whose kills met {5 * IN_FLIGHT} in flight"
    )
    assert same == tries and most <= 5 * IN_FLIGHT
