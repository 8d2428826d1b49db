from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from contextlib import suppress

import pytest

from benchmarks.slots import Engine, drive
from benchmarks.virtual_time import run as run_virtually
from reasonrag.core.calls import START, Addresses, Slots, Unavailable, bearer_header, check_url
from reasonrag.core.errors import ConfigError, LLMError


def one_server(concurrency: int | None = None, deadline_s: float = 300.0, max_retries: int = 8) -> Addresses:
    limits = {"deadline_s": deadline_s, "max_retries": max_retries, "patience_s": 600.0}
    return Addresses(["http://127.0.0.1:1/v1"], concurrency, name="m", error=LLMError, **limits)


def answer(*failures: Exception, **limits: float) -> str:
    """What a call returns that fails so before it is answered."""
    left = list(failures)

    async def send(*_: object) -> str:
        if left:
            raise left.pop(0)
        return f"answered, {len(left)} left"

    return run_virtually(one_server(**limits).ask(send))


def test_a_call_is_sent_again_so_often_and_the_last_failure_is_raised() -> None:
    failures = [Unavailable("first"), Unavailable("second")]
    assert answer(*failures, max_retries=2) == "answered, 0 left"
    with pytest.raises(LLMError, match="m gave no answer in 2 attempts; last: second"):
        answer(*failures, max_retries=1)


def test_other_errors_and_cancellation_end_a_call_at_once() -> None:
    for error in (ValueError("no"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            answer(error)


def test_a_failure_that_does_not_count_is_bounded_by_time_alone() -> None:
    busy = [Unavailable("restarting", counts=False) for _ in range(5)]
    assert answer(*busy, max_retries=0) == "answered, 0 left"
    with pytest.raises(LLMError):
        answer(*busy, max_retries=0, deadline_s=0.1)
    with pytest.raises(LLMError):
        answer(Unavailable("later", retry_after_s=3600))


def test_an_address_or_a_token_that_cannot_work_is_refused_without_being_shown() -> None:
    for url in (
        "ftp://me:hunter2@host",
        "host:8000",
        "http://me:hunter2@host",
        "http://h:x/?key=hunter2",
        "http://h/v1?key=hunter2",
        "http://h/v1#hunter2",
    ):
        with pytest.raises(ConfigError) as caught:
            check_url(url, example="http://host:8000")
        assert "hunter2" not in str(caught.value)
    check_url("https://me:hunter2@host/path", example="", allow_password=True)
    with pytest.raises(ConfigError, match="A_TOKEN") as caught:
        bearer_header("canary 1f3a", "A_TOKEN")
    assert "canary" not in str(caught.value)


async def hold(slots: Slots, seconds: float, priority: int = 0, log: list[int] | None = None) -> None:
    async with slots.request(priority):
        if log is not None:
            log.append(priority)
        await asyncio.sleep(seconds)


def test_the_most_urgent_request_goes_first_and_equal_ones_in_their_order():
    async def main():
        slots, log = Slots(1), []
        async with asyncio.TaskGroup() as group:
            for priority in (0, 5, 3, 4, 3):
                group.create_task(hold(slots, 1.0, priority, log))
            await asyncio.sleep(0.5)
            assert (slots.in_flight, slots.waiting, slots.free) == (1, 4, -4)
        assert (slots.in_flight, slots.waiting, slots.free) == (0, 0, 1)
        return log

    assert run_virtually(main()) == [0, 3, 3, 4, 5]


@pytest.mark.parametrize("cancelled_at", [0.5, 1.0], ids=["while it waits", "as it gets its slot"])
def test_a_cancelled_request_leaves_no_slot_behind(cancelled_at):
    async def main():
        slots = Slots(1)
        first, second, third = (asyncio.create_task(hold(slots, 1.0)) for _ in range(3))
        asyncio.get_running_loop().call_at(cancelled_at, second.cancel)
        await first
        second.cancel()
        await third
        assert second.cancelled() or second.done()
        assert (slots.in_flight, slots.waiting) == (0, 0)

    run_virtually(main())


@pytest.mark.parametrize(
    "make",
    [lambda k: Engine(slots=k), lambda k: Engine(speed=lambda n: min(1.0, k / n))],
    ids=["slots", "continuous batching"],
)
@pytest.mark.parametrize("knee", [32, 256])
def test_an_engine_that_says_no_limit_is_never_starved_nor_asked_for_much_more_than_it_works_on(make, knee):
    async def main():
        engine = make(knee)
        return await drive(engine, Slots(), seconds=120.0, askers=600), engine.busy_s

    found, busy_s = run_virtually(main())
    assert knee <= statistics.median(found) <= 3 * max(knee, START)
    assert busy_s >= 0.95 * knee * 120.0


@pytest.mark.parametrize(("room", "chance"), [(8, 0.2), (200, 0.0)])
def test_an_engine_that_refuses_what_it_has_no_room_for_is_kept_busy_with_few_refusals(room, chance):
    async def main():
        engine = Engine(refuses=room, chance=chance)
        found = await drive(engine, Slots(), seconds=150.0, askers=600)
        return statistics.median(found), engine

    limit, engine = run_virtually(main())
    assert room - 1 <= limit <= 1.25 * room + 2
    assert engine.busy_s >= 0.85 * room * 150.0
    assert engine.asked <= 1.8 * engine.served / (1 - chance)


def test_a_request_that_is_refused_is_no_sign_that_an_engine_is_away_while_it_works_on_others():
    async def main():
        slots, found = Slots(3), []
        requests = [slots.request() for _ in range(3)]

        async def refused(number: int, seconds: float) -> None:
            failure = Unavailable("full", status=503)
            with suppress(Unavailable):
                async with requests[number]:
                    await asyncio.sleep(seconds)
                    raise failure
            found.append((number, failure.away, slots.in_flight))

        async with asyncio.TaskGroup() as group:
            for number, seconds in ((0, 3.0), (1, 1.0), (2, 2.0)):
                group.create_task(refused(number, seconds))
        for request in requests:
            slots.release(request)
        assert slots.in_flight == 0
        return found

    assert run_virtually(main()) == [(1, False, 3), (2, False, 3), (0, True, 2)]


def test_one_request_at_a_time_finds_out_whether_an_engine_is_back():
    async def main():
        loop, slots, asked, inside = asyncio.get_running_loop(), Slots(64), [], 0

        async def ask() -> None:
            nonlocal inside
            while True:
                request = slots.request()
                try:
                    async with request:
                        inside += 1
                        asked.append((loop.time(), inside))
                        await asyncio.sleep(0.01)
                        inside -= 1
                        if 10 <= loop.time() < 70:
                            raise Unavailable("restarting", away=True)
                        await asyncio.sleep(1.0)
                    if loop.time() > 75:
                        return
                except Unavailable:
                    pass

        await asyncio.gather(*(ask() for _ in range(256)))
        return asked

    asked = run_virtually(main())
    away = [(time, inside) for time, inside in asked if 12 < time < 70]
    assert 30 <= len(away) <= 70 and all(inside == 1 for _, inside in away)
    assert sum(70 <= time < 74 for time, _ in asked) > 64, "all slots are used again within two seconds"


def test_a_request_that_an_engine_dies_of_does_not_hold_up_the_others():
    async def main():
        loop, addresses, dies_until, answered = asyncio.get_running_loop(), one_server(concurrency=4), 0.0, []

        async def ask(name: str, priority: int = 0) -> None:
            async def send(*_: object) -> None:
                nonlocal dies_until
                await asyncio.sleep(0.1)
                if name == "poison" and loop.time() > dies_until:
                    dies_until = loop.time() + 5.0
                if loop.time() <= dies_until:
                    raise Unavailable("dead", away=True)
                answered.append(name)

            with suppress(LLMError):
                await addresses.ask(send, priority=priority)

        await asyncio.gather(ask("poison", -1), *(ask("sane") for _ in range(20)))
        return answered

    assert run_virtually(main()) == ["sane"] * 20


def test_an_engine_that_was_away_in_one_event_loop_is_asked_in_the_next():
    async def main(failing: bool) -> None:
        for _ in range(3 if failing else 1):
            with suppress(Unavailable):
                async with asyncio.timeout(60), slots.request():
                    if failing:
                        raise Unavailable("gone", away=True, retry_after_s=0.2)

    slots = Slots(1)
    asyncio.run(main(failing=True))
    assert slots.away_since is not None
    asyncio.run(main(failing=False))
    assert slots.away_since is None


def test_a_probe_without_a_reply_in_time_is_no_failure_of_a_server_that_is_there():
    async def send(*_: object) -> str:
        if failures:
            raise failures.pop()
        return "answered"

    failures = [Unavailable("late", cause="timeout") for _ in range(20)]
    failures += [Unavailable("gone", away=True) for _ in range(3)]
    assert run_virtually(one_server().ask(send)) == "answered"


def test_an_outage_uses_up_patience_once_and_whoever_asks_later_is_sent_all_the_same():
    async def main():
        loop, addresses, sent, back_at = asyncio.get_running_loop(), one_server(concurrency=8), Counter(), 2000.0

        async def ask(name: str) -> bool:
            async def send(*_: object) -> bool:
                sent[name] += 1
                await asyncio.sleep(0.1)
                if loop.time() < back_at:
                    raise Unavailable("gone", away=True, counts=False)
                return True

            try:
                return await addresses.ask(send)
            except LLMError:
                return False

        async def wave(name: str, count: int) -> tuple[Counter[bool], float]:
            began = loop.time()
            found = await asyncio.gather(*(ask(f"{name} {number}") for number in range(count)))
            return Counter(found), loop.time() - began

        first, first_s = await wave("first", 1000)  # more than are sent while they wait
        later, later_s = await wave("later", 40)
        sent_once = all(count == 1 for name, count in sent.items() if name.startswith("later"))
        await asyncio.sleep(back_at - loop.time())
        back, _ = await wave("back", 40)
        back_at = loop.time() + 300.0
        _, again_s = await wave("another outage", 40)
        assert (first, later, back) == ({False: 1000}, {False: 40}, {True: 40}) and len(sent) == 1120
        assert 600 <= first_s < 620 and later_s < 1.0 and sent_once and 300 <= again_s < 310

    run_virtually(main())
