"""Ctrl-C drains and says how to go on; a second one stops at once; SIGTERM drains too."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.e2e.world import World

SETTINGS = ("--iterations", "12", "--seed", "7", "--concurrency", "8")


def arguments(world: World, server: ExtractiveServer, out: Path) -> tuple[str, ...]:
    return (*world.flags, *server.flags, *SETTINGS, "--out", str(out))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_drains_and_the_printed_command_goes_on(
    number: signal.Signals, exit_code: int, world: World, finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with ExtractiveServer(latency_s=0.05) as server:
        child = product.start("build-tree", *arguments(world, server, out))
        product.wait_until(lambda: len(server.requests) >= 100)
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=60)
        asked = len(server.requests)
        assert child.returncode == exit_code
        assert "Traceback" not in stderr
        assert stdout == ""
        assert not (out / "pairs").exists()
        resume = next(line for line in stderr.splitlines() if line.strip().startswith("reasonrag build-tree"))
        assert shlex.split(resume)[1:] == ["build-tree", *arguments(world, server, out)]
        assert server.in_flight == 0  # they were waited for, not dropped
        done = product.run(*shlex.split(resume)[1:])
    assert done.returncode == 0
    print(f"{number.name} after {asked} calls, {len(server.requests)} in all, paid twice {server.paid_twice}")
    assert server.paid_twice == 0
    counts = ("prompt_tokens", "completion_tokens")
    assert product.without(product.tree_rows(out), *counts) == product.without(product.tree_rows(finished_run), *counts)


def test_a_second_interrupt_stops_at_once(world: World, tmp_path: Path) -> None:
    with ExtractiveServer(latency_s=600.0) as server:
        child = product.start("build-tree", *arguments(world, server, tmp_path / "run"))
        product.wait_until(lambda: len(server.requests) >= 8)
        child.send_signal(signal.SIGINT)
        product.wait_until(lambda: "again to stop now" in child.said())  # draining: the calls take ten minutes
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
        assert server.paid.total() == 0
    assert child.returncode == 130
    assert "Traceback" not in stderr


def test_two_signals_at_once_stop_without_a_traceback(world: World, tmp_path: Path) -> None:
    with ExtractiveServer(latency_s=600.0) as server:
        child = product.start("build-tree", *arguments(world, server, tmp_path / "run"))
        product.wait_until(lambda: len(server.requests) >= 8)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=60)
    assert child.returncode in (130, 143)
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.4, 0.7, 1.0, 1.3])
def test_an_interrupt_while_it_starts_shows_no_traceback(wait_s: float, world: World, tmp_path: Path) -> None:
    with ExtractiveServer(latency_s=0.2) as server:
        child = product.start("build-tree", *arguments(world, server, tmp_path / "run"))
        time.sleep(wait_s)
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert stdout == ""
