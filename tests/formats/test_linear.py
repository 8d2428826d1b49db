"""A megabyte of anything is read in less than a second of one core, by every format."""

from __future__ import annotations

import time

import pytest

from reasonrag.core.types import Answer, Completion, Passage, Prompt, Search, Step, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.tags import SEALED, before_tag, last_tag, tags
from tests.toys import QUESTION

SIZE = 1_000_000
LIMIT_S = 1.0
TAGS = ["think", "step", "reasoning", "search", "context", "conclusion", "information", "reflect", "tool_call"]
TAGS += ["tool_response", "query", "evidence", "answer"]
ENDINGS = ["", "</search>", "</tool_call>", "</conclusion>", "</answer>", "</query>"]


def fill(unit, size=SIZE):
    return (unit * (size // len(unit) + 1))[:size]


def shapes(search, found, size=SIZE):
    """Adversarial texts for a format with these tags."""
    stage = f"<{search}>q</{search}><{found}>x</{found}>"
    step = "<step><reasoning>r</reasoning><search>q</search><context>x</context><conclusion>c</conclusion></step>"
    return {
        "100k opening tags": fill("".join(f"<{tag}>" for tag in TAGS), size),
        "one tag opened": fill(f"<{found}>", size),
        "one tag closed": fill(f"</{search}>", size),
        "observations": fill(f"<{found}>x</{found}>", size),
        "searches": fill(stage, size),
        "searches, observations never closed": fill(f"<{search}>x</{search}><{found}>", size),
        "blanks behind a search": fill(f"</{search}>{' ' * 1000}", size),
        "nested": fill("".join(f"<{t}>" for t in TAGS), size // 2)
        + fill("".join(f"</{t}>" for t in TAGS[::-1]), size // 2),
        "alternating": fill("</answer><answer>", size),
        "thoughts": fill("<think>t</think><reflect>r</reflect><reasoning>r</reasoning>", size),
        "stages": "<think>t</think>" + fill(f"{stage}<think>t</think>", size) + "<answer>a</answer>",
        "steps never closed": f"<think>{fill('<step>', size)}</think><answer>a</answer>",
        "empty steps": f"<think>{'<step></step>' * (size // 13)}</think><answer>a</answer>",
        "steps": f"<think>{step * (size // len(step))}</think><answer>a</answer>",
        "steps and a word": f"<think>{step * (size // len(step))}x</think><answer>a</answer>",
        "searches in one step": f"<think><step>{fill(stage, size)}</step></think><answer>a</answer>",
        "angles": fill("<", size),
        "blanks": fill(" ", size),
        "letters": fill("a", size),
        "seals": fill(SEALED, size),
    }


def seconds(call):
    started = time.process_time()
    call()
    return time.process_time() - started


def trajectory(format, text):
    """One search whose passage is hostile, and a completion that is."""
    search = getattr(format, "search", "query")
    asked = Step(Prompt(()), Completion(f"<{search}>q</{search}>"), Search("q"), (Passage("p", f"T\n{text}"),))
    return Trajectory(QUESTION, (asked, Step(Prompt(()), Completion(text), Answer("x"))))


def readings(format, text):
    return {
        "read_text": seconds(lambda: format.read_text(text)),
        "read": seconds(lambda: format.read(trajectory(format, text))),
    }


def parsings(format, text):
    found = {f"parse {end}": seconds(lambda end=end: format.parse(text + end, ())) for end in ENDINGS}
    return found | {"parse final": seconds(lambda: format.parse(text, (), final=True))}


def shapes_for(format, size=SIZE):
    return shapes(getattr(format, "search", "query"), getattr(format, "found", "evidence"), size)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_megabyte_of_everything_at_once_is_read_in_a_second(name):
    format = FORMATS[name]()
    parts = shapes_for(format, SIZE // 20)
    text = "".join(parts.values())
    assert len(text) > 0.95 * SIZE
    assert max((readings(format, text) | parsings(format, text)).values()) < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_megabyte_of_any_shape_is_read_in_a_second(name):
    format = FORMATS[name]()
    taken = ((readings(format, text), shape) for shape, text in shapes_for(format).items())
    slowest = max((seconds, shape, of) for found, shape in taken for of, seconds in found.items())
    print(f"{name}: {slowest[0]:.2f} s for {slowest[2]} of {slowest[1]!r}")
    assert slowest[0] < LIMIT_S, slowest


@pytest.mark.slow
def test_tags_in_a_megabyte_are_found_in_a_second():
    names = ["think", "search", "information", "answer"]
    calls = (tags, last_tag, lambda text, names: before_tag(text, names[-1]))
    for text in shapes("search", "information").values():
        assert max(seconds(lambda call=call, text=text: call(text, names)) for call in calls) < LIMIT_S
