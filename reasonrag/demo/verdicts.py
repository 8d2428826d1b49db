"""How the exact judge of the demo world answers each kind of request of `rewards.verdicts`, and how it errs.

Every function takes the fields of a request and returns the correct reply with a way to draw a wrong one, or None if
it cannot know. It uses only what the request shows and the facts of the world.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from random import Random

from reasonrag.core.models import DEMO_FORMATS
from reasonrag.core.text import exact_match, normalize_answer, token_f1
from reasonrag.core.types import Question
from reasonrag.demo.knowledge import Knowledge
from reasonrag.formats import FORMATS, PromptSet, StreamFormat
from reasonrag.formats.base import Reading
from reasonrag.rewards.verdicts import ACCURACY_SCORES, PLANNER_SCORES, REASONING_SCORES, PathScores

Fields = Mapping[str, str | list[str]]

_TAGS = "think|step|reasoning|search|context|conclusion|information|reflect|tool_call|tool_response|answer"
_SHOWN_TAG = re.compile(rf"‹(?=/?(?:{_TAGS})>)")
_ITEM = re.compile(r"(?:(?<=\s)|^)\d+[.)]\s+([^;\n]*?)(?=\s\d+[.)]\s|[;\n]|$)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The correct reply, and a function that draws a wrong one."""

    right: str
    wrong: Callable[[Random], str]


def same_meaning(world: Knowledge, fields: Fields) -> Verdict | None:
    """Judge two statements as equal if they state the same fact with the same value, or one is the bare value."""
    first, second = _text(fields, "Statement 1"), _text(fields, "Statement 2")
    queries, values = set(), set()
    for text in (first, second):
        claims = list(world.claims(text))
        if len(claims) == 1:
            queries.add(claims[0].query)
            values.add(claims[0].value)
        else:  # a bare value, or more than one fact
            values.add(normalize_answer(text))
    same = len(values) == 1 and len(queries) <= 1
    return _boolean(same or normalize_answer(first) == normalize_answer(second))


def step_holds(world: Knowledge, fields: Fields) -> Verdict | None:
    """Judge a step as true if all stated facts are true and its conclusion states a fact or follows from one.

    A conclusion follows if it is a correct comparison, or the value of a fact that the reasoning states. Any other
    conclusion in the words of this world ("yes", a bare name, "None") is False; one in other words cannot be judged.
    """
    reasoning, conclusion = _text(fields, "Reasoning"), _text(fields, "Conclusion")
    stated, concluded = list(world.claims(reasoning)), list(world.claims(conclusion))
    if not all(claim.true for claim in (*stated, *concluded)):
        return _boolean(False)
    compared = world.compares(conclusion)
    if concluded or compared is not None:
        return _boolean(compared is not False)
    if normalize_answer(conclusion) in {claim.value for claim in stated}:
        return _boolean(True)
    return _boolean(False) if world.speaks_of(conclusion) else None


def asked_question(world: Knowledge, fields: Fields, label: str = "Question") -> Question | None:
    """Return the question of this world that a request is about, by its text and golden answers."""
    return world.questions.get((_text(fields, label), tuple(_text(fields, "Golden answers").split(" | "))))


def answer(world: Knowledge, fields: Fields) -> Verdict | None:
    """Reply YES if the prediction equals one of the answers (exact match)."""
    match = exact_match(_text(fields, "Prediction"), _text(fields, "Reference answers").split(" | ")) > 0
    yes, no = "YES", "NO"
    return Verdict(yes if match else no, lambda rng: no if match else yes)


def path(world: Knowledge, fields: Fields) -> Verdict | None:
    """Reply with the six scores of `score_path`; None if the question is not of this world."""
    question = asked_question(world, fields)
    if question is None:
        return None
    text = "\n".join(_SHOWN_TAG.sub("<", piece) for piece in fields["Trajectory"])
    reference = tuple(fields["Reference path"])
    scores = score_path(world, question, reference, read(text))
    return Verdict(
        json.dumps(asdict(scores)), lambda rng: json.dumps(asdict(_other_scores(scores, len(reference), rng)))
    )


def plan(world: Knowledge, fields: Fields) -> Verdict | None:
    """Reply with the searches that the question needs; an error adds or drops one."""
    question = asked_question(world, fields, "Question to plan")
    return None if question is None else _plan(world, _needed(question))


def vote(world: Knowledge, fields: Fields) -> Verdict | None:
    """Reply with the searches that the question needs and some candidate made; without any, the shortest candidate."""
    question = asked_question(world, fields)
    if question is None:
        return None
    paths = [tuple(value) for label, value in fields.items() if label.startswith("Path ")]
    made = {normalize_answer(step) for path in paths for step in path}
    essential = [step for step in _needed(question) if normalize_answer(step) in made]
    return _plan(world, tuple(essential) or min(paths, key=len))


def _needed(question: Question) -> tuple[str, ...]:
    return tuple(hop["query"] for hop in question.metadata["path"])


def _plan(world: Knowledge, steps: tuple[str, ...]) -> Verdict:
    return Verdict(_planned(steps), lambda rng: _planned(_spoilt(world, steps, rng)))


def score_path(world: Knowledge, question: Question, reference: Sequence[str], reading: Reading) -> PathScores:
    """Return Search-P1's six scores of a trajectory in the demo world.

    - `planner_score`: the plan against the needed searches: 1.2 for the same, 1.0 for one more, 0.6 for some of them,
      0.2 for none.
    - `model_plan_steps`: numbered items of the plan.
    - `effective_steps_self`: items whose search was made and found its fact. An item means a search if it has all of
      its words, or its key and no other entity's name.
    - `effective_steps_ref`: reference steps that were searched for, in any order.
    - `outcome_accuracy_score`: 1 for an exact match, 0.5 if the answer shares words with a golden one.
    - `outcome_reasoning_score`: 1 if every needed fact was found, 0.8 for more than half, 0.5 for some. A fact is found
      if the policy's last statement of it is true, or a passage has it and the policy states nothing about it; a famous
      one also if the answer is correct.

    Args:
        world: the facts of the world.
        question: with `path` and `known` in its metadata.
        reference: steps of the reference path.
        reading: the trajectory as its format reads it.
    """
    items = [item[1] for item in _ITEM.finditer(reading.plan)]
    needed = _needed(question)
    facts = {normalize_answer(query) for query in needed}
    queries = list(dict.fromkeys(normalize_answer(query) for query in reading.queries))
    brought = [query for query in queries if _brought(world, query, reading)]
    right = exact_match(reading.answer, question.golden_answers) > 0
    planned = len(_matched(world, items, needed))
    found = set(facts) if question.metadata["known"] and right else _found(world, facts, reading)
    planner_score = 0.6 if planned else 0.2
    if planned == len(needed) and len(items) <= len(needed) + 1:
        planner_score = 1.2 if len(items) == len(needed) else 1.0
    reasoning_score = 1.0 if len(found) == len(facts) else 0.8 if len(found) > len(facts) / 2 else 0.5 if found else 0.0
    return PathScores(
        planner_score=planner_score,
        model_plan_steps=len(items),
        effective_steps_self=len(_matched(world, items, brought)),
        effective_steps_ref=len(_matched(world, reference, queries)),
        outcome_accuracy_score=1.0 if right else 0.5 if token_f1(reading.answer, question.golden_answers) > 0 else 0.0,
        outcome_reasoning_score=reasoning_score,
    )


@cache
def stream_format(name: str) -> StreamFormat:
    """Return a format of one growing turn with the `brief` prompts, as the shipped policy is trained in it."""
    format = FORMATS[name](PromptSet.find("brief"))
    assert isinstance(format, StreamFormat)
    return format


def read(text: str) -> Reading:
    """Read a trajectory of unknown format: in the first format that fits, else in the one that reads most of it."""
    readings = [stream_format(name).read_text(text) for name in DEMO_FORMATS]
    return max(readings, key=lambda r: (r.well_formed, len(r.queries) + (r.answer is not None) + bool(r.plan)))


def _found(world: Knowledge, facts: Collection[str], reading: Reading) -> set[str]:
    """Return the facts (by query) whose last statement is true, or that a passage shows and no statement mentions."""
    said = {c.query: c.true for b in reading.blocks for c in world.claims(f"{b.reasoning}\n{b.conclusion}")}
    shown = " ".join(block.context for block in reading.blocks).lower()
    return {query for query in facts if said.get(query, f"{query} {world.facts[query]}" in shown)}


def _matched(world: Knowledge, items: Sequence[str], queries: Iterable[str]) -> dict[int, str]:
    """Match items to queries, each at most once: first by all words of the query, then by its key."""
    unmatched = [normalize_answer(query) for query in queries]
    texts = [f" {normalize_answer(item)} " for item in items]
    matches: dict[int, str] = {}
    for whole in (True, False):
        for place, text in enumerate(texts):
            query = next((q for q in unmatched if _means(world, text, q, whole=whole)), None)
            if place not in matches and query is not None:
                matches[place] = query
                unmatched.remove(query)
    return matches


def _means(world: Knowledge, text: str, query: str, *, whole: bool) -> bool:
    if whole:
        return f" {query} " in text
    name, _, key = query.rpartition(" ")
    return f" {key} " in text and not any(f" {other} " in text for other in world.names if other != name)


def _brought(world: Knowledge, query: str, reading: Reading) -> bool:
    """Return whether a search for `query` found a passage that states its fact."""
    value = world.facts.get(query)
    contexts = (block.context for block in reading.blocks if block.query and normalize_answer(block.query) == query)
    return value is not None and any(f"{query} {value}" in context.lower() for context in contexts)


def _other_scores(right: PathScores, reference_steps: int, rng: Random) -> PathScores:
    """Draw a valid verdict that differs from the correct one."""
    while True:
        planned = rng.randint(0, 4)
        scores = PathScores(
            rng.choice(PLANNER_SCORES),
            planned,
            rng.randint(0, planned),
            rng.randint(0, reference_steps),
            rng.choice(ACCURACY_SCORES),
            rng.choice(REASONING_SCORES),
        )
        if scores != right:
            return scores


def _spoilt(world: Knowledge, steps: tuple[str, ...], rng: Random) -> tuple[str, ...]:
    """Return the steps with one dropped, or with a needless one added."""
    place = rng.randrange(len(steps))
    if len(steps) > 1 and rng.random() < 0.5:
        return (*steps[:place], *steps[place + 1 :])
    needless = rng.choice([query for query in sorted(world.facts) if query not in map(normalize_answer, steps)])
    return (*steps[:place], needless, *steps[place:])


def _planned(steps: Sequence[str]) -> str:
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    planner = ", then ".join(f"search for {step}" for step in steps)
    reply = f"<correct_reasoning_path>\n{numbered}\n</correct_reasoning_path>\n"
    return f"{reply}<optimized_planner>\nFirst {planner}.\n</optimized_planner>"


def _boolean(verdict: bool) -> Verdict:
    return Verdict(f"<answer>{verdict}</answer>", lambda rng: f"<answer>{not verdict}</answer>")


def _text(fields: Fields, label: str) -> str:
    value = fields[label]
    return value if isinstance(value, str) else ""
