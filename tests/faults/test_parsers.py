"""Whatever a model, a judge or a file holds is parsed: no exception, one outcome, linear time."""

from __future__ import annotations

import copy
import json
import multiprocessing
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from contrib.simulated_search import written_passages
from reasonrag.core.errors import InputError
from reasonrag.core.text import cover_match, exact_match, normalize_answer, token_f1
from reasonrag.formats import FORMATS
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.tool_calls import PARSERS, ToolCallsFormat
from reasonrag.rewards.judge import last_json_object, parse_score, read_boolean, read_path, read_plan, read_yes_no
from reasonrag.storage.records import CALLS, read_calls
from tests.faults import fuzzing
from tests.faults.injection import form_of
from tests.faults.matrix import Figure, Rounds
from tests.formats.test_recorded import conversation
from tests.growth import LIMIT, TIMES, Growth, growth
from tests.toys import QUESTION

ALL = tuple(FORMATS)


@pytest.mark.fault(
    "fuzz",
    "texts of fragments, golden turns cut and mixed, and all of Unicode, to every format",
    "no exception, an action and a reading each, and the same ones again",
)
@pytest.mark.fault(
    "22", "malformed output of a model: the same texts", "the parser never raises, one outcome each, the same again"
)
def test_every_text_is_parsed(rounds: Rounds, figure: Figure) -> None:
    count, parts = rounds(600, 1_000_000), rounds(1, 50)
    if parts == 1:
        found = [fuzzing.fuzz(0, count)]
    else:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(fuzzing.fuzz, range(parts), [count // parts] * parts))
    failed = [failure for part in found for failure in part["failed"]]
    kib = sum(part["chars"] for part in found) / 1024
    took = {name: sum(part["seconds"][name] for part in found) / kib * 1e6 for name in ALL}
    slowest = max(took, key=lambda name: took[name])
    figure(
        f"{sum(part['failures'] for part in found)} exceptions in {count:,} texts to each of {len(ALL)} formats; "
        f"parse and read take {min(took.values()):.0f} to {took[slowest]:.0f} us a KB ({slowest})"
    )
    assert not failed


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(fuzzing.FRAGMENTS), st.text(max_size=4)), max_size=9).map("".join))
def test_every_text_is_parsed_in_every_state(text: str) -> None:
    for name in ALL:
        form = form_of(name)
        for steps in fuzzing.states(form):
            for final in (False, True):
                fuzzing.check(form, text, steps, final=final, again=True)


@pytest.mark.fault(
    "fuzz",
    "one fragment repeated to 256 KB and to 1 MB, for each fragment and format",
    "four times the text takes about four times the CPU time",
)
def test_a_long_text_takes_linear_time(rounds: Rounds, figure: Figure) -> None:
    """All fragments are compared at a sixteenth of the size; those that grow most in a format, at full size."""
    worst = (0.0, "", "")
    slowest = (0.0, "", "")
    names = ALL[rounds(0, 0) : rounds(8, len(ALL)) : rounds(3, 1)]
    small, large = rounds(4_000, 16_000), rounds(16_000, 256 * 1024)
    for name in names:
        growing = []
        for fragment in fuzzing.FRAGMENTS[:: rounds(12, 1)]:
            found = _growth(name, fragment, small)
            growing.append((found.ratio, fragment))
            slowest = max(slowest, (found.seconds / (TIMES * small / 1024), name, fragment))
        for _, fragment in sorted(growing)[-rounds(1, 3) :]:
            worst = max(worst, (_growth(name, fragment, large).ratio, name, fragment))
    figure(
        f"at most {worst[0]:.2f} times as long ({worst[1]}, {worst[2]!r}); worst {slowest[0] * 1e6:.0f} us a KB "
        f"({slowest[1]}, {slowest[2]!r})"
    )
    assert worst[0] < LIMIT


def _growth(name: str, fragment: str, size: int) -> Growth:
    form = form_of(name)

    def read(text: str) -> None:
        form.parse(text, (), final=False)
        form.parse(text, (), final=True)
        form.read_text(text)

    return growth(read, lambda chars: fragment * (chars // len(fragment)), size)


def _plain_normalized(text: str) -> str:
    """SQuAD's normalisation, as its authors wrote it."""
    without = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without).split())


def _plain_f1(said: str, gold: str) -> float:
    said_tokens, gold_tokens = _plain_normalized(said).split(), _plain_normalized(gold).split()
    if not said_tokens and not gold_tokens:
        return 1.0
    closed = {"yes", "no", "noanswer"}
    if said_tokens != gold_tokens and {" ".join(said_tokens), " ".join(gold_tokens)} & closed:
        return 0.0
    same = sum((Counter(said_tokens) & Counter(gold_tokens)).values())
    return 2 * same / (len(said_tokens) + len(gold_tokens)) if same else 0.0


_ANSWERED = "a an the The yes no noanswer new york U.S. , . ' - 1,000"
_WORDS = (*_ANSWERED.split(), " ", "	")


@pytest.mark.fault(
    "fuzz", "answers of words, punctuation and Unicode", "EM, F1 and ACC equal those of a plain implementation"
)
def test_metrics_equal_a_plain_implementation(rounds: Rounds, figure: Figure) -> None:
    count = rounds(600, 200_000)
    said = list(fuzzing.texts(1, count, _WORDS * 3 + fuzzing.FRAGMENTS))
    different = 0
    for number, text in enumerate(said):
        gold = said[number - 1] if number % 3 else text.swapcase()
        normal, normal_gold = _plain_normalized(text), _plain_normalized(gold)
        covers = f" {normal_gold} " in f" {normal} " if normal_gold else not normal
        plain = (float(normal == normal_gold), _plain_f1(text, gold), float(covers))
        ours = (exact_match(text, [gold]), token_f1(text, [gold]), cover_match(text, [gold]))
        different += ours != pytest.approx(plain) if ours != plain else False
        different += normalize_answer(text) != normal
    figure(f"{different} of {count:,} answers differ")
    assert not different


_SAID = "YES NO True False <answer> </answer> <think> </think> 95/100 2024 -5 NaN 1e9 1e999 0.5 0,85 % / ** null { }"
_VERDICTS = (
    *_SAID.split(),
    *("score is ", "Score: ", "score = ", "out of 10", "[", "]", "Infinity", "9" * 400, '"a":', "1. a\n", "2) b\n"),
    *("<correct_reasoning_path>", "</correct_reasoning_path>", "<optimized_planner>x", "</optimized_planner>"),
    *('{"planner_score": 1.2', ', "model_plan_steps": 2'),
)
_READERS: tuple[Callable[[str], object], ...] = (
    *(parse_score, read_boolean, read_yes_no, read_path, read_plan, last_json_object),
)


@pytest.mark.fault("23", "replies of a judge: verdicts, numbers, forms, noise", "a value in its range, or none")
def test_every_reply_of_a_judge_is_a_verdict_or_none(rounds: Rounds, figure: Figure) -> None:
    count, verdicts = rounds(600, 200_000), 0
    for reply in fuzzing.texts(2, count, _VERDICTS):
        found = [read(reply) for read in _READERS]
        score = found[0]
        assert score is None or (isinstance(score, float) and 0 <= score <= 1), reply
        assert found[1] in (None, True, False) and found[2] in (None, True, False)
        assert found == [read(reply) for read in _READERS]
        verdicts += score is not None
    figure(f"0 exceptions, 0 wrong values in {count:,} replies to {len(_READERS)} readers; {verdicts:,} have a score")


@pytest.mark.fault(
    "fuzz",
    "one fragment of a verdict, or of passages, repeated to 100 KB and 400 KB, to each reader of a judge and simulator",
    "four times the text takes about four times the CPU time",
    before="a square of it: 33 s for 400 KB of '{', 5.6 s for 24 KB of line ends",
)
def test_a_long_reply_takes_linear_time(rounds: Rounds, figure: Figure) -> None:
    worst = (Growth(0.0, 0.0), "", "")
    fragments = [
        *_VERDICTS,
        '{"a":{',
        '{"a":"',
        '{"a":1,',
        '{"a":[1,',
        "[{",
        "\n",
        "\r\n",
        "* ",
        "Passage 1: a\n",
        "passage ",
    ]
    for read in (*_READERS, written_passages):
        for fragment in fragments[:: -rounds(3, 1)]:
            found = growth(read, lambda chars, fragment=fragment: fragment * (chars // len(fragment)), 100_000)  # type: ignore[misc]
            worst = max(worst, (found, read.__name__, fragment))
    found, name, fragment = worst
    figure(f"at most {found.ratio:.1f} times as long ({name}, {fragment!r}: {found.seconds:.2f} CPU s)")
    assert found.ratio < LIMIT


@pytest.mark.fault("22", "calls of tools: JSON, XML, Python, Gemma's, cut and mixed", "a search, an answer or a reason")
def test_every_message_with_calls_is_parsed(rounds: Rounds, figure: Figure) -> None:
    count = rounds(600, 200_000)
    outcomes: Counter[str] = Counter()
    messages = list(fuzzing.texts(3, count, [f for f in fuzzing.FRAGMENTS if any(c in f for c in "{}[]()`\"'<=:,")]))
    for parser in PARSERS:
        form = ToolCallsFormat(parser=parser)
        for message in messages:
            action = form.parse(message, ())
            outcomes[getattr(action, "reason", type(action).__name__)] += 1
    figure(f"0 exceptions in {count:,} messages to each of {len(PARSERS)} parsers; {len(outcomes)} outcomes")
    assert {"Search", "Answer", "unreadable_call"} <= set(outcomes)


_JUNK = (None, 0, -1, 1.5, True, "", [], {}, "x", [1], {"a": 1}, [[]], "{", '{"name": 1}', "<tool_call>", "\ud800")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _changed(calls: Sequence[Any], random_: random.Random) -> list[Any]:
    """Return recorded calls of which one value, or two, are missing or junk."""
    changed: Any = copy.deepcopy(list(calls))
    for _ in range(random_.choice((1, 1, 2))):
        *path, last = random_.choice([path for path in _places(changed) if len(path) > 1])
        held = changed
        for key in path:
            held = held[key]
        if random_.random() < 0.25:
            del held[last]
        else:
            held[last] = random_.choice(_JUNK)
    return changed


@pytest.mark.fault(
    "26",
    "recordings of an agent with values missing or of another kind",
    "branched, or set aside and counted, or one clear error",
    before="1,268 of 3,000 ended in a traceback",
)
def test_a_recording_that_was_edited(tmp_path: Path, rounds: Rounds, figure: Figure) -> None:
    count, branched = rounds(60, 5_000), 0
    random_ = random.Random(4)
    calls = [*conversation("a"), *conversation("b")]
    for _ in range(count):
        changed = _changed(calls, random_)
        (tmp_path / CALLS).write_text("".join(json.dumps(call) + "\n" for call in changed), encoding="utf-8")
        try:
            with structlog.testing.capture_logs():
                RecordedFormat(read_calls(tmp_path), [QUESTION], parser="hermes")
            branched += 1
        except InputError as error:
            assert "\n" not in str(error)
    figure(f"0 tracebacks in {count:,} recordings; {branched:,} can be branched still, the others are refused")
