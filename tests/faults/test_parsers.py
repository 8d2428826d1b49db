"""Whatever a model, a judge or a file holds is parsed: no exception, one outcome, linear time."""

from __future__ import annotations

import copy
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from reasonrag.core.errors import InputError
from reasonrag.core.text import normalize_answer, redact
from reasonrag.core.types import Answer, Completion, Malformed, Note, Passage, Prompt, Search, Step, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.base import SEALED, Reading
from reasonrag.formats.recorded import RecordedFormat
from reasonrag.formats.stream import StreamFormat
from reasonrag.formats.tool_calls import PARSERS, ToolCallsFormat
from reasonrag.rewards.judge import (
    last_json_object,
    parse_score,
    read_boolean,
    read_grade,
    read_path,
    read_plan,
    read_yes_no,
)
from reasonrag.storage.inputs import CALLS, read_calls
from tests.faults.injection import form_of
from tests.faults.matrix import Figure, Rounds
from tests.formats.test_recorded import conversation
from tests.growth import LIMIT, TIMES, Growth, growth
from tests.toys import QUESTION

ALL = tuple(FORMATS)
_GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
_NAMES = (
    "think search information query evidence answer step reasoning context conclusion reflect tool_call tool_response "
    "planner plan documents"
)
FRAGMENTS = (
    *(f"<{tag}>" for tag in _NAMES.split()),
    *(f"</{tag}>" for tag in _NAMES.split()),
    *("<|begin_of_query|>", "<|end_of_query|>", "<|begin_of_documents|>", "<|end_of_documents|>"),
    *("<|begin_search_query|>", "<|end_search_query|>", "<|begin_search_result|>", "<|end_search_result|>"),
    *("\nThought: ", "\nAction: ", "search[", "finish[", "]"),
    *("\nObservation: ", "\nThought 2:", "\nAction 2: finish[a]"),
    *("Follow up: ", "\nIntermediate answer: ", "So the answer is: ", "**Final Information**", "\\boxed{", "}"),
    *('{"name": "search", ', '{"name": "other", ', '"arguments": {"query": "q"}}', '"parameters": {"query": "q"}}'),
    *("{", '"', "```json\n"),
    *("```tool_code\n", "search(query='q')", "print(", ")", "```", "[search(", "call:search{query:", "<|python_tag|>"),
    *("<function=search>", "<parameter=query>", "</parameter>", "</function>", "<start_function_call>", '<|"|>'),
    *("a", "the film", "and", "None", " ", "\n", "\t", "1975"),
    *("<", ">", "/", "\\", "'", "\x00", "\r\n", "\u2028", "\x85"),
    *("&lt;", "\n[1] "),
    *("é", "\u0301", "\u202e", "\u200b", "\ufeff", "👩\u200d🚀", "\ud800", "\udfff", SEALED),
    *("＜answer＞", "中文", "İ", "ß", "𝟙"),
)
_ACTIONS = (Search, Note, Answer, Malformed)


def golden_texts() -> list[str]:
    """Return the turns that were written by hand from the papers."""
    texts: list[str] = []
    for file in sorted(_GOLDEN.glob("*.json")):
        cases = json.loads(file.read_text(encoding="utf-8"))
        texts += [case["text"] for case in cases if isinstance(case, dict) and isinstance(case.get("text"), str)]
    return texts


def texts(seed: int, count: int, fragments: Sequence[str] = FRAGMENTS) -> Iterator[str]:
    """Yield texts: seven of ten are fragments in a row, two are golden turns that were cut and mixed, one is noise."""
    random_ = random.Random(seed)
    golden = golden_texts()
    for number in range(count):
        kind = number % 10
        if kind < 7:
            yield "".join(random_.choices(fragments, k=1 + int(random_.random() * 9)))
        elif kind < 9:
            first, second = random_.choices(golden, k=2)
            cut, end = int(random_.random() * len(first)), int(random_.random() * len(second))
            yield f"{first[:cut][-120:]}{random_.choice(fragments)}{second[end:][:120]}"
        else:
            yield "".join(map(chr, random_.choices(_CODES, k=12)))


_CODES = [*range(0x2100), *range(0x2100, 0x110000, 97)]


def states(form: Any) -> list[tuple[Step, ...]]:
    """Return the states in which a format may be asked: at the start, and behind a search."""
    search = getattr(form, "search", "query")
    found = Step(Prompt(()), Completion(f"<{search}>q</{search}>", logprobs=()), Search("q"), (Passage("p", "T\nt"),))
    return [(), (found,)]


def check(form: Any, text: str, steps: tuple[Step, ...], *, final: bool, again: bool) -> None:
    """Parse a text as a step and as a whole trajectory; raise AssertionError if that gives nothing, or not the same."""
    action, reading = form.parse(text, steps, final=final), read_text(form, text)
    assert isinstance(action, _ACTIONS) and isinstance(reading, Reading)
    if again:
        assert form.parse(text, steps, final=final) == action and read_text(form, text) == reading
        searched = Step(Prompt(()), Completion(text, logprobs=()), Search("q"), (Passage("p", f"{text}\n{text}"),))
        trajectory = Trajectory(QUESTION, (*steps, searched, Step(Prompt(()), Completion(text, logprobs=()), action)))
        assert form.read(trajectory) == form.read(trajectory)
        if isinstance(action, Answer | Search | Note):
            said = action.answer if isinstance(action, Answer) else action.query if isinstance(action, Search) else ""
            assert said or isinstance(action, Note)


def read_text(form: Any, text: str) -> Reading:
    """Read a whole trajectory from its text; a format without one growing turn reads an attempt of one step."""
    if isinstance(form, StreamFormat):
        return form.read_text(text)
    step = Step(Prompt(()), Completion(text, logprobs=()), form.parse(text, ()))
    return cast(Reading, form.read(Trajectory(QUESTION, (step,))))


def fuzz(seed: int, count: int) -> dict[str, Any]:
    """Parse `count` texts in every format; return the texts of failures, and CPU seconds and characters by format."""
    forms = {name: make() for name, make in FORMATS.items()}
    forms |= {f"tool_calls of {parser}": ToolCallsFormat(parser=parser) for parser in PARSERS}
    asked = {name: states(form) for name, form in forms.items()}
    failed: list[tuple[str, str, str]] = []
    seconds = dict.fromkeys(forms, 0.0)
    chars = 0
    remaining = texts(seed, count)
    while batch := [text for _, text in zip(range(1000), remaining, strict=False)]:
        chars += sum(map(len, batch))
        for name, form in forms.items():
            began = time.process_time()
            for number, text in enumerate(batch):
                try:
                    check(form, text, asked[name][number & 1], final=number % 4 > 2, again=not number % 16)
                except Exception as error:
                    failed.append((name, text, repr(error)[:200]))
            seconds[name] += time.process_time() - began
    return {"failed": failed[:20], "failures": len(failed), "seconds": seconds, "chars": chars}


@pytest.mark.fault(
    "fuzz",
    "texts of fragments, golden turns cut and mixed, and all of Unicode, to every format",
    "no exception, an action and a reading each, and the same ones again",
)
def test_every_text_is_parsed(rounds: Rounds, figure: Figure) -> None:
    count, parts = rounds(600, 1_000_000), rounds(1, 50)
    if parts == 1:
        found = [fuzz(0, count)]
    else:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(fuzz, range(parts), [count // parts] * parts))
    failed = [failure for part in found for failure in part["failed"]]
    kib = sum(part["chars"] for part in found) / 1024
    took = {name: sum(part["seconds"][name] for part in found) / kib * 1e6 for name in found[0]["seconds"]}
    slowest = max(took, key=lambda name: took[name])
    figure(
        f"{sum(part['failures'] for part in found)} exceptions in {count:,} texts to each of {len(took)} formats; "
        f"parse and read take {min(took.values()):.0f} to {took[slowest]:.0f} us a KB ({slowest})"
    )
    assert not failed


@pytest.mark.fault(
    "fuzz",
    "one fragment repeated to 256 KB and to 1 MB, for each fragment and format",
    "four times the text takes about four times the CPU time",
)
@pytest.mark.fault(
    "A14", "replies of 1 MB", "four times the length takes about four times the CPU", before="did not end in 70 s"
)
def test_a_long_text_takes_linear_time(rounds: Rounds, figure: Figure) -> None:
    """All fragments are compared at a sixteenth of the size; those that grow most in a format, at full size."""
    worst = (0.0, "", "")
    slowest = (0.0, "", "")
    names = ALL[rounds(0, 0) : rounds(8, len(ALL)) : rounds(3, 1)]
    small, large = rounds(4_000, 16_000), rounds(16_000, 256 * 1024)
    for name in names:
        growing = []
        for fragment in FRAGMENTS[:: rounds(12, 1)]:
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
        read_text(form, text)
        normalize_answer(text)
        redact(text)

    return growth(read, lambda chars: fragment * (chars // len(fragment)), size)


_SAID = "YES NO True False <answer> </answer> <think> </think> 95/100 2024 -5 NaN 1e9 1e999 0.5 0,85 % / ** null { }"
_VERDICTS = (
    *_SAID.split(),
    *("score is ", "Score: ", "score = ", "out of 10", "[", "]", "Infinity", "9" * 400, '"a":', "1. a\n", "2) b\n"),
    *("<correct_reasoning_path>", "</correct_reasoning_path>", "<optimized_planner>x", "</optimized_planner>"),
    *("So the score is 0.5", '{"planner_score": 1.2', ', "model_plan_steps": 2'),
)
_READERS: tuple[Callable[[str], object], ...] = (
    *(parse_score, read_boolean, read_yes_no, read_path, read_plan, last_json_object, read_grade),
)


@pytest.mark.fault("23", "replies of a judge: verdicts, numbers, forms, noise", "a value in its range, or none")
def test_every_reply_of_a_judge_is_a_verdict_or_none(rounds: Rounds, figure: Figure) -> None:
    count, verdicts = rounds(600, 200_000), 0
    for reply in texts(2, count, _VERDICTS):
        found = [read(reply) for read in _READERS]
        score = found[0]
        assert score is None or (isinstance(score, float) and 0 <= score <= 1), reply
        assert found[1] in (None, True, False) and found[2] in (None, True, False)
        assert found == [read(reply) for read in _READERS]
        verdicts += score is not None
    figure(f"0 exceptions, 0 wrong values in {count:,} replies to {len(_READERS)} readers; {verdicts:,} have a score")


@pytest.mark.fault(
    "fuzz",
    "one fragment of a verdict repeated to 100 KB and 400 KB, to each reader of a judge",
    "four times the text takes about four times the CPU time",
    before="a square of it: 33 s for 400 KB of '{', 5.6 s for 24 KB of line ends",
)
def test_a_long_reply_takes_linear_time(rounds: Rounds, figure: Figure) -> None:
    worst = (Growth(0.0, 0.0), "", "")
    fragments = [*_VERDICTS, '{"a":{', '{"a":"', '{"a":1,', '{"a":[1,', "[{", "\n", "\r\n", "* "]
    for read in _READERS:
        for fragment in fragments[:: -rounds(3, 1)]:
            found = growth(read, lambda chars, fragment=fragment: fragment * (chars // len(fragment)), 100_000)  # type: ignore[misc]
            worst = max(worst, (found, read.__name__, fragment))
    found, name, fragment = worst
    figure(f"at most {found.ratio:.1f} times as long ({name}, {fragment!r}: {found.seconds:.2f} CPU s)")
    assert found.ratio < LIMIT


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
