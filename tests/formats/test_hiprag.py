from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonrag.core.types import Note, Search, StopReason, Trajectory
from reasonrag.formats import FORMATS
from reasonrag.formats.base import seal
from reasonrag.formats.hiprag import check
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.formats.algorithms import format_checker
from tests.toys import QUESTION, ToyRetriever

FORMAT = FORMATS["hiprag"]()

NAMES = ("think", "step", "reasoning", "search", "context", "conclusion", "answer")
TAGS = [f"<{slash}{tag}>" for tag in NAMES for slash in ("", "/")]
OWN = ["<step>", "<reasoning>", "r", "</reasoning>", "<conclusion>", "c", "</conclusion>", "</step>"]
SEARCHED = [*OWN[:4], "<search>", "q", "</search>", "<context>", "x", "</context>", *OWN[4:]]
soup = st.lists(st.sampled_from([*TAGS, "a", " ", "\r\n"]), max_size=30)


@st.composite
def nearly_well_formed(draw):
    """A turn in form, with a few pieces taken out, put in or swapped."""
    steps = draw(st.lists(st.sampled_from([OWN, SEARCHED]), min_size=1, max_size=3))
    pieces = ["<think>", *(p for step in steps for p in step), "</think>", "<answer>", "a", "</answer>"]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(pieces)))
        kind = draw(st.sampled_from(["out", "in", "swap", "blank"]))
        if kind == "out":
            del pieces[place : place + 1]
        elif kind == "swap" and place + 1 < len(pieces):
            pieces[place : place + 2] = pieces[place + 1], pieces[place]
        else:
            pieces.insert(place, " \n" if kind == "blank" else draw(st.sampled_from([*TAGS, "b"])))
    return pieces


@given(st.one_of(soup, nearly_well_formed(), nearly_well_formed()))
def test_the_checker_is_algorithm_2(pieces):
    text = "".join(pieces)
    assert (check(text) == "") == (format_checker(text)[0] == 1)


@given(nearly_well_formed())
def test_n_is_the_number_of_blocks_and_each_says_whether_it_searched(pieces):
    text, _ = seal("".join(pieces), NAMES, search="search", found="context")
    reading = FORMAT.read_text("".join(pieces))
    if reading.well_formed:
        accepted, steps = format_checker(text)
        assert accepted and len(reading.blocks) == steps
        assert len(reading.queries) == text.partition("</think>")[0].count("<search>")


def run(replies, *, max_steps=8, retriever=None):
    engine = Engine(ScriptedLLM(replies), retriever or ToyRetriever(), FORMAT, max_steps=max_steps)
    (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    return trajectory


ASK = "r</reasoning>\n<search>Jaws</search>"
NEXT = "<step>\n<reasoning>"
KNOW = "r</reasoning>\n<conclusion>c</conclusion>"


def test_a_short_trajectory_is_well_formed_which_alg_1_line_16_would_prevent():
    trajectory = run([KNOW, "</think><answer>Steven Spielberg</answer>"])
    assert FORMAT.read(trajectory).well_formed
    text = "".join(span.text for span in FORMAT.turn(trajectory.steps))
    as_printed = text.replace("</step>\n", "</step><step><reasoning>")
    assert check(as_printed) == "unclosed_step"
    inside = as_printed.replace("</think><answer>", "<answer>") + "</think>"  # lines 5, 6 and 20
    assert check(inside) == "no_answer"


def test_the_budget_counts_steps_not_searches():
    three = [ASK, "c</conclusion>", NEXT + KNOW, NEXT + ASK, "c</conclusion>", "Steven Spielberg</answer>"]
    trajectory = run(three, max_steps=4)
    assert trajectory.stop_reason is StopReason.FORCED_ANSWER
    assert [type(step.action) for step in trajectory.steps[:-1]] == [Search, Note, Note, Search, Note]
    reading = FORMAT.read(trajectory)
    assert reading.well_formed and reading.answer == "Steven Spielberg" and len(reading.blocks) == 3


def test_searching_again_and_again_within_a_step_ends():
    trajectory = run([ASK, *["<search>Wars</search>"] * 3, "x</answer>"], max_steps=3)
    assert trajectory.stop_reason is StopReason.FORCED_ANSWER and len(trajectory.steps) == 5
    reading = FORMAT.read(trajectory)
    assert not reading.well_formed
    assert reading.queries == ("Jaws", "Wars", "Wars", "Wars")
    assert [bool(block.context) for block in reading.blocks] == [True] * 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("r</reasoning>\nSpielberg</conclusion>", "unopened_conclusion"),
        ("r</reasoning>\nJaws</search>", "unopened_search"),
        ("r</reasoning>\n<search> </search>", "empty_search"),
        ("r</reasoning>\n<search>a precise query</search>", "empty_search"),
        ("r</reasoning>\n<search>Jaws", "unclosed_tag"),
        ("I give up.", "no_tag"),
        ("r</reasoning></step></think><answer>the answer</answer>", "empty_answer"),
    ],
)
def test_what_cannot_be_read_ends_the_trajectory(text, reason):
    trajectory = run([text])
    assert (trajectory.stop_reason, trajectory.steps[-1].action.reason) == (StopReason.NO_ANSWER, reason)
    assert not FORMAT.read(trajectory).well_formed


def test_a_context_that_is_never_closed_does_not_swallow_the_next_step():
    step = "<step><reasoning>r</reasoning><search>q</search><context>x</context><conclusion>c</conclusion></step>"
    text = f"<think>{step}{step}</think><answer>a</answer>"
    assert FORMATS["hiprag"]().read_text(text).well_formed
    open_ended = FORMATS["hiprag"]().read_text(text.replace("</context>", "", 1))
    assert (open_ended.well_formed, open_ended.reason) == (False, "context_count")
    assert [(block.query, block.context, block.conclusion) for block in open_ended.blocks] == [("q", "x", "c")] * 2
