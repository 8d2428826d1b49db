"""Texts that no one writes, fast: fragments of every format, pieces of golden turns, and all of Unicode.

Parsers are asked for 1,000,000 of them, so a case costs microseconds; hypothesis makes small ones of what fails.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.types import (
    Answer,
    Completion,
    Malformed,
    Note,
    Passage,
    Prompt,
    Question,
    Search,
    Step,
    Trajectory,
)
from reasonrag.formats import FORMATS
from reasonrag.formats.base import Reading
from reasonrag.formats.tags import SEALED

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
    *("é", "\u0301", "\u202e", "\u200b", "\ufeff", "👩\u200d🚀", "\ud800", "\udfff", SEALED),
    *("＜answer＞", "中文", "İ", "ß", "𝟙"),
)
QUESTION = Question("q", "Who directed Jaws?", ("Steven Spielberg",))
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
    action, reading = form.parse(text, steps, final=final), form.read_text(text)
    assert isinstance(action, _ACTIONS) and isinstance(reading, Reading)
    if again:
        assert form.parse(text, steps, final=final) == action and form.read_text(text) == reading
        searched = Step(Prompt(()), Completion(text, logprobs=()), Search("q"), (Passage("p", f"{text}\n{text}"),))
        trajectory = Trajectory(QUESTION, (*steps, searched, Step(Prompt(()), Completion(text, logprobs=()), action)))
        assert form.read(trajectory) == form.read(trajectory)
        if isinstance(action, Answer | Search | Note):
            said = action.answer if isinstance(action, Answer) else action.query if isinstance(action, Search) else ""
            assert said or isinstance(action, Note)


def fuzz(seed: int, count: int) -> dict[str, Any]:
    """Parse `count` texts in every format; return the texts of failures, and CPU seconds and characters by format."""
    forms = {name: make() for name, make in FORMATS.items()}
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
