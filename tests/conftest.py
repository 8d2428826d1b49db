from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from reasonrag.core.plots import BarChart, Panel
from tests import unsynced  # noqa: F401
from tests.faults.matrix import (  # noqa: F401
    figure,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
    rounds,
)

collect_ignore = ["peers"]  # of other tools, each in an environment of its own: `make peers`
if sys.platform != "linux":
    collect_ignore += ["faults"]  # of signals, locks and disks as Linux shows them
gc.disable()  # while tests are collected and libraries imported, next to nothing is garbage


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    for child in multiprocessing.active_children():
        child.kill()  # one that a test stopped, and left, would be waited for without end


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Trainers, engines and evaluations collect garbage again and again, here not among what was there before them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plain_logs() -> Iterator[None]:
    """A command that ran in this process has sent the logs to the standard error of its own test."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and training runs write charts as text: equal charts are equal files, and nothing is drawn.

    Drawing takes a third of the time of a short evaluation. `tests/core/test_plots.py`, the tests of reports and every
    command in a process of its own draw.
    """

    def save_charts(stem: Path, charts: Sequence[Panel | BarChart]) -> list[Path]:
        assert charts
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
        for path in paths:
            path.write_text(repr(charts), encoding="utf-8")
        return paths

    monkeypatch.setattr("reasonrag.evaluation.tables.save_charts", save_charts)
    monkeypatch.setattr("reasonrag.training.run.save_charts", save_charts)
