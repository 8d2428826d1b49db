"""A judge that cannot be read costs values, never questions, and is never taken for a score of 0."""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import product
from tests.e2e.world import World
from tests.fakes.model_server import FakeOpenAI
from tests.faults.matrix import Figure

REMINDER = "Reply with this line only"
UNREADABLE = "I would rather not say; there are 3 flaws in 2 steps."
ITERATIONS = 24


def draw(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class Judge(FakeOpenAI):
    """Scores by the hash of what it reads; `unreadable` says which replies hold no score.

    Attributes:
        lost: verdicts of which no reply could be read.
        spoilt: replies without a score.
    """

    def __init__(self, unreadable: Callable[[product.Row], bool]) -> None:
        self.spoilt = 0
        self._unreadable, self._given = unreadable, 0
        super().__init__(self._verdict, models=("judge",))

    def _verdict(self, request: product.Row) -> str:
        if self._unreadable(request):
            self.spoilt += 1
            return UNREADABLE
        self._given += 1
        return f"The steps lead somewhere. So the score is {draw(request['messages'][1]['content']):.2f}"

    @property
    def lost(self) -> int:
        verdicts = sum(REMINDER not in request["messages"][1]["content"] for request in self.requests)
        return verdicts - self._given

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--value", "judge", "--judge", self.base_url, "--judge-model", "judge")


def run_with(judge: Judge, world: World, out: Path) -> tuple[dict[str, product.Row], list[product.Row]]:
    """Summary and node rows of a run in which nothing may be lost."""
    product.build(
        *(*world.flags, "--policy", "extractive", *judge.flags),
        *("--iterations", str(ITERATIONS), "--seed", "7", "--out", out),
    )
    summary, rows = product.summary(out), product.tree_rows(out)
    print(
        f"{len(judge.requests)} judge calls, {judge.spoilt} unreadable ({judge.spoilt / len(judge.requests):.1%}), "
        f"{judge.lost} verdicts lost, {summary['trees']['iterations_without_value']} iterations without a value, "
        f"{summary['questions']['finished']} of {summary['questions']['total']} questions, "
        f"{summary['pairs']['total']} pairs"
    )
    assert summary["questions"] == {"total": 16, "finished": 16, "failed": {}}
    assert summary["calls"]["judge"]["calls"] == len(judge.requests)
    return summary, rows


def check_counts(judge: Judge, summary: dict[str, product.Row], rows: list[product.Row]) -> None:
    """Every lost verdict is an iteration without a value, and so is each later visit to an end that lost its own."""
    without = summary["trees"]["iterations_without_value"]
    roots = [row for row in rows if row["node_id"] == 0]
    assert without == sum(row["visits"] - row["valued"] for row in roots)
    ends_lost = [row for row in rows if row["stop_reason"] and not row["valued"]]
    assert without == judge.lost + sum(row["visits"] - 1 for row in ends_lost)
    assert all(row["value"] is None for row in rows if not row["valued"])


@pytest.mark.fault("23", "1 % and 20 % of a judge's replies hold no score", "no question lost, no value made up")
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_unreadable_replies_lose_no_question(share: float, world: World, tmp_path: Path, figure: Figure) -> None:
    with Judge(lambda request: draw("spoilt", request["messages"], request["seed"]) < share) as judge:
        summary, rows = run_with(judge, world, tmp_path / "run")
    figure(f"{judge.spoilt} of {len(judge.requests)} replies unreadable, {judge.lost} values missing, 0 questions lost")
    assert share / 3 < judge.spoilt / len(judge.requests) < share * 3
    check_counts(judge, summary, rows)


def test_a_judge_that_is_always_unreadable_leaves_values_missing(world: World, tmp_path: Path) -> None:
    with Judge(lambda request: True) as judge:
        summary, rows = run_with(judge, world, tmp_path / "run")
    assert {row["valued"] for row in rows} == {0}
    assert {row["value"] for row in rows} == {None}
    assert summary["trees"]["iterations_without_value"] == sum(row["visits"] for row in rows if row["node_id"] == 0)
    assert any(row["spre"] is not None for row in rows)  # rewards of pairs come from the answers, not from the judge


def test_a_verdict_on_an_answer_that_a_kill_9_interrupts_is_not_paid_twice(world: World, tmp_path: Path) -> None:
    paid = Counter[str]()

    def charge(request: product.Row, answer: product.Row) -> None:
        paid[json.dumps(request, sort_keys=True)] += 1

    def verdict(request: product.Row) -> str:
        return "YES" if draw(request["messages"][1]["content"]) < 0.5 else "NO"

    with FakeOpenAI(verdict, models=("judge",), latency_s=0.02, edit=charge) as judge:
        flags = (
            *world.flags,
            "--policy",
            "extractive",
            "--outcome",
            "judge",
            "--judge-votes",
            "2",
            "--iterations",
            "12",
        )
        flags = (*flags, "--judge", judge.base_url, "--judge-model", "judge", "--set", "judge.concurrency=2")
        killed = product.start("build-tree", *flags, "--out", tmp_path / "killed")
        product.wait_until(lambda: paid.total() >= 20)
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        product.wait_until(lambda: judge.in_flight == 0)
        product.build(*flags, "--out", tmp_path / "killed")
        assert paid.total() - len(paid) <= 2, "no more than were in flight"
        product.build(*flags, "--out", tmp_path / "whole")
    whole, resumed = (product.tree_rows(tmp_path / name) for name in ("whole", "killed"))
    assert whole == resumed
    grades = [row["grade"] for row in whole if row["f1"] is not None]
    assert grades and {grade["value"] for grade in grades} <= {0.0, 0.5, 1.0}
    assert {grade["error"] for grade in grades if grade["value"] == 0.5} <= {0.5}
