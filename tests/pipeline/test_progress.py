from __future__ import annotations

from reasonrag.core.calls import RETRIES
from reasonrag.pipeline.work import Progress


def at(progress: Progress, seconds: float, *, calls: int) -> Progress:
    """As if so many seconds had passed since its start, and so many calls had been answered."""
    progress.started += progress.seconds - seconds
    progress._closed["calls"] = calls
    return progress


def near(value: float | None, expected: float) -> bool:
    return value is not None and abs(value - expected) < 0.1


def test_the_time_left_follows_from_iterations_while_no_question_has_ended():
    progress = at(Progress(100, "questions", planned=1_600), 0, calls=1)
    assert progress.eta_s is None
    progress.iterations = 400
    assert near(at(progress, 30, calls=500).eta_s, 90) and progress.share == 0.25
    assert "0/100 questions, 0 failed, 400/1600 iterations" in progress.line()


def test_retries_since_the_start_are_counted():
    progress = Progress(1)
    assert "retries" not in progress.line()
    RETRIES["timeout"] += 2
    RETRIES["http_429"] += 3
    assert "5 retries (http_429, timeout)" in progress.line()
