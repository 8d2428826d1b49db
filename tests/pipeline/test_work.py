from __future__ import annotations

import asyncio

import pytest

from benchmarks.virtual_time import run as run_virtually
from reasonrag.core.calls import Slots
from reasonrag.core.types import Question
from reasonrag.pipeline.work import Progress, work_through


def worked(count, work, slots, **options) -> None:
    async def do(place, question, count):
        await work(place)

    questions = [Question(str(number), "", ()) for number in range(count)]
    run_virtually(work_through(questions, do, slots, Progress(count), **options))


def test_items_begin_while_engines_have_room_for_their_requests():
    slots, most = Slots(8), []

    async def work(item):
        for _ in range(3):
            async with slots.request():
                most.append((slots.in_flight, slots.waiting))
                await asyncio.sleep(0.001)

    worked(60, work, [slots])
    assert len(most) == 180
    assert max(in_flight for in_flight, _ in most) == 8
    assert max(waiting for _, waiting in most) <= 25  # three times as many as are in flight, and one


def test_an_engine_without_room_holds_back_those_that_need_the_other():
    policy, judge = Slots(64), Slots(2)
    begun, most = set(), [0]

    async def work(item):
        begun.add(item)
        most[0] = max(most[0], judge.waiting)
        async with policy.request():
            await asyncio.sleep(0)
        async with judge.request():
            await asyncio.sleep(0.001)

    worked(40, work, [policy, judge])
    assert len(begun) == 40 and most[0] <= 6  # items for each slot, and no more


def test_items_that_hold_no_slot_are_bounded_too():
    working, most = set(), [0]

    async def search(item):
        working.add(item)
        most[0] = max(most[0], len(working))
        await asyncio.sleep(0.002)
        working.discard(item)

    worked(50, search, [Slots(4)])
    assert most[0] == 12


def test_a_failure_ends_the_work_once_what_has_begun_has_ended():
    ended, begun = [], []

    async def work(item):
        begun.append(item)
        await asyncio.sleep(0.001 * (1 + item))
        if item == 0:
            raise ValueError("no disk")
        ended.append(item)

    with pytest.raises(ValueError, match="no disk"):
        worked(100, work, [Slots(1)])
    assert ended == begun[1:] and len(begun) < 10


def test_an_error_that_cannot_say_what_it_is_sets_its_question_aside():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("message")

    async def work(item):
        raise Mute

    async def failed(place, question, cause, error):
        said.append((cause, str(error)))

    said = []
    worked(2, work, [Slots(1)], failed=failed)
    assert said == [("bug:RuntimeError", "a Mute whose message cannot be made")] * 2


def test_nothing_begins_once_the_work_is_stopped():
    done = []

    async def work(item):
        done.append(item)

    worked(100, work, [Slots(1)], stopped=lambda: len(done) >= 5)
    assert 5 <= len(done) < 20
