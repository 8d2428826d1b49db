from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import stamina

from reasonrag.core.errors import ConfigError
from reasonrag.core.http import Retries, Unavailable, backoff, bearer_header, check_url, parse_retry_after


@pytest.fixture(autouse=True)
def no_waiting():
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


def failing(*failures: Exception) -> Callable[[], str]:
    left = list(failures)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_unavailable_is_tried_again_in_functions_and_coroutines() -> None:
    async def call() -> str:
        return answer()

    answer = failing(Unavailable("busy"), Unavailable("busy"))
    retries = Retries(deadline_s=60, max_retries=2)
    assert asyncio.run(retries.run_async(call)) == "done" and retries.failures == 2
    assert Retries(deadline_s=60, max_retries=1).run(failing(Unavailable("busy"))) == "done"


def test_the_last_failure_is_raised_when_retries_end() -> None:
    retries = Retries(deadline_s=60, max_retries=1)
    with pytest.raises(Unavailable, match="second"):
        retries.run(failing(Unavailable("first"), Unavailable("second"), Unavailable("third")))
    assert str(retries.last) == "second"


def test_other_errors_and_cancellation_end_the_loop_at_once() -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), asyncio.CancelledError()):
        retries = Retries(deadline_s=60, max_retries=5)
        with pytest.raises(type(error)):
            retries.run(failing(error))
        assert retries.failures == 0


def test_a_failure_that_does_not_count_is_bounded_by_time_alone() -> None:
    busy = [Unavailable("restarting", counts=False) for _ in range(5)]
    assert Retries(deadline_s=60, max_retries=0).run(failing(*busy)) == "done"
    with pytest.raises(Unavailable):
        Retries(deadline_s=0.1, max_retries=0).run(failing(*busy))


def test_no_attempt_begins_after_the_deadline() -> None:
    for failure in (Unavailable("later", retry_after_s=3600), Unavailable("now", retry_after_s=0)):
        with pytest.raises(Unavailable):
            Retries(deadline_s=0.2, max_retries=5).run(failing(failure))


def test_the_wait_doubles_up_to_its_bound_with_jitter() -> None:
    for failures, full in ((1, 0.5), (2, 1.0), (5, 8.0), (5000, 8.0)):
        assert full / 2 <= backoff(failures, 0.5, 8.0) <= full


def test_retry_after_is_read_in_both_forms() -> None:
    assert [parse_retry_after(text) for text in ("1.5", "-3", "inf", "nan", "", None)] == [1.5, 0.0, *[None] * 4]
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 90 < (parse_retry_after(when) or 0) <= 100


def test_an_address_or_a_token_that_cannot_work_is_refused_without_being_shown() -> None:
    for url in ("ftp://me:hunter2@host", "host:8000", "http://me:hunter2@host", "http://h:x/?key=hunter2"):
        with pytest.raises(ConfigError) as caught:
            check_url(url, example="http://host:8000")
        assert "hunter2" not in str(caught.value)
    check_url("https://me:hunter2@host/path", example="", allow_password=True)
    with pytest.raises(ConfigError, match="A_TOKEN") as caught:
        bearer_header("canary 1f3a", "A_TOKEN")
    assert "canary" not in str(caught.value)
