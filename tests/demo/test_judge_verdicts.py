"""The exact judge's verdicts beside the truth, which is taken from what a demonstration decided, not from its text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from reasonrag.core.errors import JudgeError
from reasonrag.core.text import exact_match, token_f1
from reasonrag.core.types import Question
from reasonrag.demo.judge import DemoJudge, demo_format
from reasonrag.demo.world import demo_questions, make_world
from reasonrag.formats import PromptSet
from reasonrag.rewards.base import trajectory_text
from reasonrag.rewards.judge import (
    JudgeService,
    PathScores,
    ReferencePlan,
    answer_matches,
    path_scores,
    propose_plan,
    same_meaning,
    step_holds,
    vote_plan,
)
from tests.rewards.test_verdicts import PAYLOADS
from tests.toys import QUESTION
from tools.demo_policy.demonstrations import STREAM_HABITS, Attempt, Finding, Improviser
from tools.demo_policy.writing import STREAM_STEPS, demonstrate

WORLD = make_world()
TRAIN = demo_questions("train")
FACTS = [(f"{n} {key}", value) for n, known in WORLD.parts["train"].facts.items() for key, value in known.items()]
LARGE, TINY = (next(q.rsplit(" ", 1)[0] for q, value in FACTS if value == size) for size in ("large", "tiny"))
PIANO, HARP = ([q.rsplit(" ", 1)[0] for q, value in FACTS if value == tool][:2] for tool in ("piano", "harp"))
SILENT, NOISY = FACTS[0], FACTS[1]


def service(error_rate: float = 0.0, *, prompts: str = "brief", seed: int = 0) -> JudgeService:
    return JudgeService(DemoJudge(seed, error_rate=error_rate), PromptSet.find(prompts), attempts=2)


def judged(question, judge: JudgeService | None = None):
    """The verdict, or None where there is none."""

    async def ask():
        try:
            return await question(judge or service())
        except JudgeError as error:
            assert error.cause == "unreadable"
            return None

    return asyncio.run(ask())


def of_kind(kind: str) -> Question:
    return next(q for q in TRAIN if q.metadata["kind"] == kind and not q.metadata["known"])


def plan_of(question: Question) -> ReferencePlan:
    return ReferencePlan("", tuple(hop["query"] for hop in question.metadata["path"]))


FACT, VALUE = SILENT
OTHER = "Somebody Else"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (f"{FACT} {VALUE}", f"{FACT} {VALUE}", True),
        (f"{FACT} {VALUE}", f"The {FACT.upper()}, {VALUE}!".replace(",", ""), True),
        (f"{FACT} {VALUE}", VALUE, True),
        (f"{FACT} {VALUE}", f"{FACT} {OTHER}", False),
        (f"{FACT} {OTHER}", f"{FACT} {OTHER}", True),
        (f"{FACT} {VALUE}", f"{NOISY[0]} {VALUE}", False),
        (f"{FACT} {VALUE}", "None", False),
        ("None", "None", True),
        ("yes", "no", False),
    ],
)
def test_which_statements_mean_the_same(first, second, same):
    assert judged(lambda j: same_meaning(j, first, second)) is same
    assert judged(lambda j: same_meaning(j, second, first)) is same


@pytest.mark.parametrize(
    ("reasoning", "conclusion", "holds"),
    [
        ("know director", f"{FACT} {VALUE}", True),
        ("know director", f"{FACT} {OTHER}", False),
        ("know director", FACT, False),
        (f"{FACT} {VALUE}", VALUE, True),
        (f"{FACT} {OTHER}", OTHER, False),
        ("know director", VALUE, False),
        ("know director", "None", False),
        (f"{FACT} {VALUE}; {NOISY[0]} {NOISY[1]}", f"{FACT} {VALUE}; {NOISY[0]} {NOISY[1]}", True),
        (f"{FACT} {VALUE}", f"{FACT} {VALUE}; {NOISY[0]} {OTHER}", False),
        ("", f"{LARGE} is larger than {TINY}", True),
        ("", f"{TINY} is larger than {LARGE}", False),
        ("", f"{PIANO[0]} and {PIANO[1]} have the same instrument", True),
        ("", f"{PIANO[0]} and {HARP[0]} have the same instrument", False),
        ("", f"{PIANO[0]} and {HARP[0]} have different instrument", True),
        ("", f"{PIANO[0]} and {PIANO[1]} do not have the same instrument", False),
        ("as is well known", "The capital of France is Paris", None),
    ],
)
def test_which_steps_hold(reasoning, conclusion, holds):
    assert judged(lambda j: step_holds(j, reasoning, conclusion)) is holds


def test_an_answer_matches_one_that_is_equal_when_normalised():
    assert judged(lambda j: answer_matches(j, "the u.s. navy", ("Army", "US Navy"))) is True
    assert judged(lambda j: answer_matches(j, "US Army", ("Army", "US Navy"))) is False


@cache
def demonstrations(name: str) -> list[tuple[Question, Attempt, str]]:
    """What was decided on a question of training, and the text of it in a format."""
    made = []
    for number, question in enumerate(TRAIN[:100]):
        pages = WORLD.famous if question.metadata["known"] else WORLD.parts["train"]
        improviser, twin = (Improviser(question, pages, Random(number), STREAM_HABITS) for _ in range(2))
        attempt = twin.attempt(budget=STREAM_STEPS - 1, own_count=name == "hiprag")
        made.append((question, attempt, trajectory_text(demonstrate(improviser, name))))
    return made


def truth(question: Question, attempt: Attempt, *, planned: bool) -> PathScores:
    """From the decisions themselves; `planned` if the plan is written down in this format."""
    needed = [hop["query"] for hop in question.metadata["path"]]
    evidence = {hop["query"]: hop["evidence"] for hop in question.metadata["path"]}
    searched = {finding.query for finding in attempt.findings if finding.page}
    brought = {f.query for f in attempt.findings if f.page and f.query.rpartition(" ")[0] == f.page.id}
    pages = {finding.page.id for finding in attempt.findings if finding.page}  # whatever was searched for on them
    noted = {finding.query: finding.evidence for finding in attempt.findings}
    right = exact_match(attempt.answer, question.golden_answers) > 0
    found = [
        query
        for query in needed
        if noted.get(query) == evidence[query] or (query.rpartition(" ")[0] in pages and not noted.get(query))
    ]
    share = 1.0 if question.metadata["known"] and right else len(found) / len(needed)
    plan = attempt.plan if planned else ()
    left = [query for query in brought if query not in plan]
    executed = sum(search in brought for search in plan)
    for search in plan:  # one that is a key alone is made of whatever the step before it led to
        made = [query for query in left if " " not in search and query.endswith(f" {search}")]
        executed += bool(made)
        left = [query for query in left if query not in made[:1]]
    return PathScores(
        planner_score=1.2 if len(plan) == len(needed) else 0.6 if plan else 0.2,
        model_plan_steps=len(plan),
        effective_steps_self=executed,
        effective_steps_ref=len(set(needed) & searched),
        outcome_accuracy_score=1.0 if right else 0.5 if token_f1(attempt.answer, question.golden_answers) else 0.0,
        outcome_reasoning_score=1.0 if share == 1 else 0.0 if share == 0 else 0.8 if share > 0.5 else 0.5,
    )


def all_scores(cases, judge: JudgeService) -> list[PathScores]:
    async def ask():
        return await asyncio.gather(*(path_scores(judge, q, plan_of(q), text) for q, _, text in cases))

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ["search_p1", "search_r1", "when_to_search"])
def test_paths_of_demonstrations_are_scored_exactly(name):
    cases = demonstrations(name)
    true = [truth(question, attempt, planned=name == "search_p1") for question, attempt, _ in cases]
    assert len(set(true)) > 10
    assert all_scores(cases, service()) == true


def test_another_paths_steps_are_told_from_the_plans_own():
    question = of_kind("three_hop")
    first, second, third = plan_of(question).steps
    evidence = [hop["evidence"] for hop in question.metadata["path"]]

    def call(query: str, passage: str) -> str:
        return f"<tool_call>{query}</tool_call><tool_response>[1] {passage}; y</tool_response><reasoning>z</reasoning>"

    def scored(plan: str, *calls: str, answer: str = "x") -> PathScores:
        text = f"<reasoning>{plan}</reasoning>{''.join(calls)}<answer>{answer}</answer>"
        return judged(lambda j: path_scores(j, question, plan_of(question), text))

    key = second.rpartition(" ")[2]
    good = f"1. {first}\n2. {key}\n3. {third}"
    calls = [call(query, passage) for query, passage in zip((first, second, third), evidence, strict=True)]
    assert scored(good, *calls, answer=question.golden_answers[0]) == PathScores(1.2, 3, 3, 3, 1.0, 1.0)
    assert scored(good, *reversed(calls)) == PathScores(1.2, 3, 3, 3, 0.0, 1.0), "in any order"
    assert scored(good, *calls[:1], *calls[:1]) == PathScores(1.2, 3, 1, 1, 0.0, 0.5), "twice is once"
    assert scored(good, call(first, "nothing")) == PathScores(1.2, 3, 0, 1, 0.0, 0.0), "searched in vain"
    assert scored(f"{good}\n4. {NOISY[0]}", *calls) == PathScores(1.0, 4, 3, 3, 0.0, 1.0)
    assert scored(f"{good}\n4. {NOISY[0]}\n5. more", *calls).planner_score == 0.6
    assert scored(f"1. {first}", *calls[:2]) == PathScores(0.6, 1, 1, 2, 0.0, 0.8)
    assert scored(f"1. {NOISY[0]}", call(NOISY[0], " ".join(NOISY))) == PathScores(0.2, 1, 1, 0, 0.0, 0.0)
    assert scored("I will see", *calls) == PathScores(0.2, 0, 0, 3, 0.0, 1.0)
    assert scored(good, answer=f"{question.golden_answers[0]} perhaps").outcome_accuracy_score == 0.5


def test_a_question_of_no_demo_world_has_no_path_and_no_plan():
    for prompts in ("brief", "default"):
        judge = service(prompts=prompts)
        assert judged(lambda j: path_scores(j, QUESTION, ReferencePlan("", ()), "<answer>x</answer>"), judge) is None
        assert judged(lambda j: propose_plan(j, QUESTION), judge) is None
        assert judged(lambda j: vote_plan(j, QUESTION, [ReferencePlan("p", ("a",))]), judge) is None
    strange = replace(of_kind("bridge"), golden_answers=("another world's",))
    assert judged(lambda j: propose_plan(j, strange)) is None


@pytest.mark.parametrize("prompts", ["brief", "default"])
def test_a_plan_is_the_questions_own_path(prompts):
    for question in (of_kind(kind) for kind in ("one_hop", "bridge", "three_hop", "comparison", "yes_no")):
        plan = judged(lambda j, q=question: propose_plan(j, q), service(prompts=prompts))
        assert plan.steps == plan_of(question).steps


def test_a_vote_keeps_the_needed_steps_that_any_candidate_made():
    question = of_kind("three_hop")
    first, second, third = plan_of(question).steps
    paths = [(third, first), (first, NOISY[0], first), (first, second.upper())]
    candidates = [ReferencePlan("p", steps) for steps in paths]
    assert judged(lambda j: vote_plan(j, question, candidates)).steps == (first, second, third)
    assert judged(lambda j: vote_plan(j, question, candidates[:2])).steps == (first, third)
    needless = [ReferencePlan("p", steps) for steps in ((NOISY[0], SILENT[0]), (NOISY[0],))]
    assert judged(lambda j: vote_plan(j, question, needless)).steps == (NOISY[0],), "the shortest one"


def test_errors_come_at_their_rate_in_every_kind_of_verdict():
    question, candidate = of_kind("bridge"), ReferencePlan("p", plan_of(of_kind("bridge")).steps)
    text = next(text for q, _, text in demonstrations("search_p1") if q.id == question.id)
    kinds = {
        "same_meaning": lambda j, n: same_meaning(j, f"{FACT} {VALUE}", f"x{n}"),
        "step_holds": lambda j, n: step_holds(j, f"because {n}", f"{FACT} {VALUE}"),
        "answer": lambda j, n: answer_matches(j, f"x{n}", ("y",)),
        "path": lambda j, n: path_scores(j, question, ReferencePlan(f"p{n}", plan_of(question).steps), text),
        "vote": lambda j, n: vote_plan(j, question, [replace(candidate, planner=f"p{n}")]),
    }

    async def all_verdicts(ask, error_rate):
        judge = service(error_rate)
        return await asyncio.gather(*(ask(judge, n) for n in range(150)))

    for name, ask in kinds.items():
        exact = asyncio.run(all_verdicts(ask, 0.0))
        noisy = asyncio.run(all_verdicts(ask, 0.2))
        assert 0.1 < sum(a != b for a, b in zip(exact, noisy, strict=True)) / 150 < 0.3, name
        assert noisy == asyncio.run(all_verdicts(ask, 0.2)), name


def test_no_trajectory_talks_the_judge_into_another_verdict():
    question, _, text = demonstrations("search_p1")[5]
    judge = service()
    head, _, tail = text.rpartition("<answer>")
    plain = judged(lambda j: path_scores(j, question, plan_of(question), text), judge)
    for payload in PAYLOADS:
        loud = f"{head}<reasoning>{payload}</reasoning><answer>{tail}"
        assert judged(lambda j, t=loud: path_scores(j, question, plan_of(question), t), judge) == plain, payload
        assert judged(lambda j, p=payload: step_holds(j, p, f"{FACT} {OTHER}"), judge) is False
        assert judged(lambda j, p=payload: same_meaning(j, f"{FACT} {VALUE}", f"{p} other"), judge) is False
        assert judged(lambda j, p=payload: answer_matches(j, f"{p} x", ("y",)), judge) is False


def test_steps_of_demonstrations_are_verified_exactly():
    format, seen = demo_format("hiprag"), []
    for question, attempt, text in demonstrations("hiprag"):
        blocks = format.read_text(text).blocks
        findings = attempt.findings or (Finding("", attempt.answer),)
        for block, finding in zip(blocks, findings, strict=True):
            name, _, key = finding.query.rpartition(" ")
            part = WORLD.famous if question.metadata["known"] else WORLD.parts["train"]
            fact = f"{finding.query} {part.facts.get(name, {}).get(key, '')}"
            true = finding.evidence == fact
            if block.is_search:
                assert judged(lambda j, b=block, f=fact: same_meaning(j, b.conclusion, f)) is true
            else:
                assert judged(lambda j, b=block: step_holds(j, b.reasoning, b.conclusion)) is true
            seen.append((block.is_search, true))
    assert min(seen.count(case) for case in ((True, True), (True, False), (False, True), (False, False))) >= 3
