from __future__ import annotations

from reasonrag.core.calls import RETRIES
from reasonrag.pipeline.work import Progress, Usage


def at(progress: Progress, seconds: float, *, calls: int, replayed: int = 0) -> Progress:
    """As if so many seconds had passed since its start, and so many calls had been answered."""
    progress.started += progress.seconds - seconds
    progress._closed = Usage(calls, replayed=replayed)
    progress.line()
    return progress


def near(value: float | None, expected: float) -> bool:
    return value is not None and abs(value - expected) < 0.1


def test_the_time_left_follows_from_iterations_while_no_question_has_ended():
    progress = at(Progress(100, "questions", planned=1_600), 0, calls=1)
    assert progress.eta_s is None
    progress.iterations = 400
    assert near(at(progress, 30, calls=500).eta_s, 90) and progress.share == 0.25
    assert "0/100 questions, 0 failed, 400/1600 iterations" in progress.line()
    progress.begun = 800  # of the other 1,200 are in flight, half done
    assert near(progress.eta_s, 30) and progress.share == 0.5


def test_what_a_journal_replays_says_how_much_is_left_and_takes_no_time():
    progress = Progress(100, planned=1_000, iterations=500)
    assert at(progress, 1, calls=0, replayed=5_000).eta_s is None
    progress.iterations = 600
    assert near(at(progress, 100, calls=1_000, replayed=5_000).eta_s, 400)  # 4,000 calls at 10 a second


def test_retries_since_the_start_are_counted():
    progress = Progress(1)
    assert "retries" not in progress.line()
    RETRIES["timeout"] += 2
    RETRIES["http_429"] += 3
    assert "5 retries (http_429, timeout)" in progress.line()


def test_while_no_reply_comes_the_line_says_for_how_long_and_not_how_long_is_left():
    progress = at(Progress(10, planned=100, iterations=40), 10, calls=50)
    assert near(progress.eta_s, 15) and "no reply" not in progress.line()
    assert at(progress, 130, calls=50).eta_s is None and "no reply for 2 min 0 s" in progress.line()
    assert near(at(progress, 140, calls=51).eta_s, 210) and "no reply" not in progress.line()
    progress.iterations = 100
    assert "no reply" not in at(progress, 200, calls=51).line()  # nothing is left to wait for
