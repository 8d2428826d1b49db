"""Reading a text takes time in proportion to its length, whatever is in it, in every format."""

from __future__ import annotations

import pytest

from reasonrag.core.types import Answer, Completion, Passage, Prompt, Search, Step, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.base import SEALED
from reasonrag.formats.stream import StreamFormat
from tests.growth import LIMIT, growth
from tests.toys import QUESTION

SIZE = 50_000
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


def trajectory(format, text):
    """One search whose passage is hostile, and a completion that is."""
    search = getattr(format, "search", "query")
    asked = Step(Prompt(()), Completion(f"<{search}>q</{search}>"), Search("q"), (Passage("p", f"T\n{text}"),))
    return Trajectory(QUESTION, (asked, Step(Prompt(()), Completion(text), Answer("x"))))


def readers(format):
    ends = {f"parse {end}": lambda text, end=end: format.parse(text + end, ()) for end in ENDINGS}
    of_text = {"read_text": format.read_text} if isinstance(format, StreamFormat) else {}
    return (
        of_text
        | {
            "read": lambda text: format.read(trajectory(format, text)),
            "parse final": lambda text: format.parse(text, (), final=True),
        }
        | ends
    )


def shapes_for(format, size):
    search, found = ("tool_call", "tool_response") if format.name == "tool_calls" else ("query", "evidence")
    return shapes(getattr(format, "search", search), getattr(format, "found", found), size)


@pytest.mark.parametrize("name", list(FORMATS))
def test_everything_at_once_is_read_in_linear_time(name):
    format = FORMATS[name]()

    def everything(size):
        return "".join(shapes_for(format, size // 20).values())

    ratios = {of: growth(read, everything, SIZE).ratio for of, read in readers(format).items()}
    assert max(ratios.values()) < LIMIT, ratios


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_any_shape_is_read_in_linear_time(name):
    format = FORMATS[name]()
    reads = readers(format)
    ratios = {
        (of, shape): growth(reads[of], lambda size, shape=shape: shapes_for(format, size)[shape], SIZE).ratio
        for of in reads.keys() & {"read_text", "read"}
        for shape in shapes_for(format, 1000)
    }
    assert max(ratios.values()) < LIMIT, ratios
