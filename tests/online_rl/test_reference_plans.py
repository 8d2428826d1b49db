from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from reasonrag.commands.train import plan
from reasonrag.core.calls import Slots
from reasonrag.core.config import load_config
from reasonrag.core.errors import DataError, Interrupted, LLMError
from reasonrag.core.types import Question
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.llm.base import Sampling
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.online_rl.reference_plans import load_plans, make_plans, save_plans
from reasonrag.online_rl.settings import PlanSettings
from reasonrag.pipeline.work import Progress
from reasonrag.rewards.judge import JudgeService, ReferencePlan
from reasonrag.rollout import Engine
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.tables import plan_schema, tree_schema
from tests.e2e.product import wait_until
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.scripted import ScriptedLLM
from tests.rewards.toys import RIGHT, asked, judge
from tests.toys import ToyRetriever

QUESTIONS = [Question(f"q{n}", f"Who directed film {n}?", (RIGHT,), dataset="toy") for n in range(6)]


def reply_with(*steps, planner="look"):
    """A planner's reply."""
    listed = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    path = f"<correct_reasoning_path>\n{listed}\n</correct_reasoning_path>"
    return f"{path}\n<optimized_planner>\n{planner}\n</optimized_planner>"


def acting(*attempts):
    """A policy whose attempts are (queries, answer), in turn, or an error."""
    turns = iter(enumerate(attempts))
    begun = {}

    def say(prompt, sampling):
        done = prompt.prefix.count("<tool_response>")
        if not done:
            number, attempt = next(turns)
            if isinstance(attempt, Exception):
                return attempt
            begun[f"plan {number}:"] = attempt
            opening = f"plan {number}: look</reasoning>"
        else:
            opening = ""
        marker = f"plan {number}:" if not done else next(known for known in begun if known in prompt.prefix)
        queries, answer = begun[marker]
        said = f"<tool_call>{queries[done]}</tool_call>" if done < len(queries) else f"<answer>{answer}</answer>"
        return opening + said

    return ScriptedLLM(say)


def engine_of(llm):
    return Engine(llm, ToyRetriever(), FORMATS["search_p1"](), max_steps=5, sampling=Sampling(temperature=1.0))


def planned(policy, service, tmp_path, questions=QUESTIONS[:1], k=2, *, concurrency=1, max_failed=0.05, **settings):
    """The progress, and the rows in the file."""
    out, progress = tmp_path / "plans.parquet", Progress(len(questions), "questions")
    policy.slots = service.llm.slots = Slots(concurrency)
    rows = asyncio.run(
        make_plans(
            questions,
            engine_of(policy),
            service,
            Journal(tmp_path / "journal.sqlite"),
            progress,
            settings=PlanSettings(candidates=k, **settings),
            max_failed=max_failed,
        )
    )
    save_plans(out, rows)
    return progress, read_parquet(out, plan_schema())


def voting(*steps):
    return judge(lambda request: reply_with(*steps), attempts=1)


def test_the_correct_trajectories_that_search_are_voted_on(tmp_path):
    """Eq. 5: a question whose answer has to be searched for gets the searches of those who found it."""
    service = voting("Jaws director")
    policy = acting(
        (("Jaws", "Jaws director"), RIGHT), (("Jaws",), "George Lucas"), ((), RIGHT), (("director of Jaws",), RIGHT)
    )
    made, rows = planned(policy, service, tmp_path, k=4)
    assert rows == [
        {
            "dataset": "toy",
            "question_id": "q0",
            "planner": "look",
            "steps": ["Jaws director"],
            "candidates": 4,
            "correct": 3,
            "votes": 2,
        }
    ]
    assert asked(service) == [
        "Question: Who directed film 0?\nGolden answers: Steven Spielberg\n"
        "Planner 1: plan 0: look\nPath 1:\n1. Jaws\n2. Jaws director\n"
        "Planner 2: plan 3: look\nPath 2:\n1. director of Jaws"
    ]
    assert (made.done, made.failed, made.written) == (1, 0, {"plans": 1})
    assert load_plans(tmp_path / "plans.parquet") == {("toy", "q0"): ReferencePlan("look", ("Jaws director",))}


@pytest.mark.parametrize(
    ("attempts", "cause"),
    [
        ([(("Jaws",), "Spielberg it was, Steven Spielberg")] * 2, "no_correct_trajectory"),
        ([((), RIGHT), ((), RIGHT)], "no_search"),
    ],
)
def test_a_question_without_a_plan_is_counted_unless_the_planner_is_shown_the_answer(attempts, cause, tmp_path):
    service = voting("Jaws director")
    made, rows = planned(acting(*attempts), service, tmp_path)
    assert (rows, made.written, made.failed) == ([], {cause: 1}, 0)
    assert asked(service) == []
    _, (row,) = planned(acting(*attempts), service, tmp_path, show_answer=True)
    assert (row["steps"], row["votes"]) == (["Jaws director"], 0)
    assert asked(service) == ["Question to plan: Who directed film 0?\nGolden answers: Steven Spielberg"]


def test_a_trajectory_that_cannot_be_made_leaves_the_others(tmp_path):
    policy = acting(LLMError("too long", cause="context_overflow"), (("Jaws",), RIGHT))
    made, (row,) = planned(policy, voting("Jaws"), tmp_path)
    assert (row["candidates"], row["correct"], made.failed) == (1, 1, 0)


def test_a_question_without_any_trajectory_or_verdict_failed_and_is_counted_by_cause(tmp_path):
    down = LLMError("down", cause="http_503")
    policy = acting(down, down, (("Jaws",), RIGHT), (("Jaws",), RIGHT), (("Jaws",), RIGHT), ((), RIGHT))
    turns = iter(["?", reply_with("Jaws")])
    service = judge(lambda request: next(turns), attempts=1)
    made, rows = planned(policy, service, tmp_path, QUESTIONS[:3], max_failed=1.0)
    assert [row["question_id"] for row in rows] == ["q2"]
    assert (made.causes, made.failed) == ({"http_503": 1, "unreadable": 1}, 2)


def test_what_is_no_file_of_plans_is_refused(tmp_path):
    write_parquet(tmp_path / "trees.parquet", [], tree_schema())
    for name, message in (("trees", "not those of this version"), ("none", "cannot be read")):
        with pytest.raises(DataError, match=message):
            load_plans(tmp_path / f"{name}.parquet")
    row = {
        "dataset": "d",
        "question_id": "q",
        "planner": "p",
        "steps": ["s"],
        "candidates": 1,
        "correct": 1,
        "votes": 1,
    }
    save_plans(tmp_path / "twice.parquet", [row, row | {"steps": ["other"]}])
    with pytest.raises(DataError, match="two plans for question 'q'"):
        load_plans(tmp_path / "twice.parquet")


def test_done_again_it_pays_for_nothing_and_draining_stops_it(tmp_path):
    out = tmp_path / "plans.parquet"

    def once(draining=False):
        with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
            if draining:
                journal.drain()
            policy = JournaledLLM(ScriptedLLM(attempt), journal, kind="policy")
            planner = JournaledLLM(ScriptedLLM(lambda *_: reply_with("a")), journal, kind="judge")
            settings, progress = PlanSettings(candidates=3), Progress(len(QUESTIONS), "questions")
            service = JudgeService(planner, PromptSet.find())
            save_plans(
                out,
                asyncio.run(make_plans(QUESTIONS, engine_of(policy), service, journal, progress, settings=settings)),
            )
            return policy.answered, planner.answered

    def attempt(prompt, sampling):
        if "<tool_response>" in prompt.prefix:
            return f"<answer>{RIGHT}</answer>"
        return f"look</reasoning><tool_call>Jaws {sampling.seed % 2}</tool_call>"

    with pytest.raises(Interrupted):
        once(draining=True)
    assert not out.exists()
    assert once() == (2 * 3 * 6, 6)
    before = out.read_bytes()
    assert once(draining=True) == (0, 0)
    assert out.read_bytes() == before


SCRIPT = """
import sys
from pathlib import Path
from reasonrag.commands.train import plan
from tests.online_rl.test_reference_plans import FOUR, config_of
url, data, out = sys.argv[1:]
sys.exit(plan(config_of(url, data), Path(out), FOUR))
"""
FOUR = PlanSettings(candidates=4)


def config_of(url, data, **more):
    """Policy and planner on one server, which charges for both."""
    prices = {f"{role}.{kind}_price": 1 for role in ("policy", "judge") for kind in ("input", "output")}
    models = {"policy.spec": url, "policy.model": "fake", "judge.spec": url, "judge.model": "fake"}
    shape = {"value.kind": "judge", "format.name": "search_p1", "format.max_steps": 5}
    search = {"retrieval.corpus": f"{data}.corpus.jsonl", "retrieval.cache": f"{data}.cache"}
    return load_config(
        overrides=models | prices | shape | search | {"questions.dataset": str(data), "policy.concurrency": 4} | more
    )


def remote_reply(request):
    """Right three times in four, and not always by the same path."""
    content = request["messages"][-1]["content"]
    if "Planner 1" in str(request["messages"]):
        return reply_with("a", *(["b"] if "Path 2" in str(request["messages"]) else []))
    if "<tool_response>" in content:
        right = hashlib.sha256(f"{request['seed']}{content}".encode()).digest()[0] % 4
        return f"<answer>{RIGHT if right else 'George Lucas'}</answer>"
    return f"look</reasoning><tool_call>film {request['seed'] % 3}</tool_call>"


def kept(journal: Path) -> int:
    with contextlib.closing(sqlite3.connect(journal)) as reading:
        return int(reading.execute("SELECT COUNT(*) FROM calls WHERE kind IN ('policy', 'judge')").fetchone()[0])


def written(data, questions):
    rows = [{"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers)} for q in questions]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(f"{data}.corpus.jsonl").write_text(json.dumps({"id": "p", "contents": "A film\nIt was directed."}) + "\n")
    return data


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_file_and_pays_for_nothing_that_was_kept(tmp_path):
    questions = [Question(f"m{n}", f"Who directed more {n}?", (RIGHT,)) for n in range(12)]
    data = written(tmp_path / "questions.jsonl", questions)

    def start(server, out):
        command = [sys.executable, "-c", SCRIPT, server.base_url, str(data), str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(child):
        stdout, stderr = child.communicate(timeout=300)
        assert child.returncode == 0, stderr
        return stdout

    with FakeOpenAI(remote_reply) as server:
        assert plan(config_of(server.base_url, data), tmp_path / "whole.parquet", FOUR) == 0
        calls = sum(request["max_tokens"] > 1 for request in server.requests)  # but the one that asks for a turn
    with FakeOpenAI(remote_reply, latency_s=0.02) as server:
        out = tmp_path / "cut.parquet"
        with server.holding(round(0.6 * calls)):
            child = start(server, out)
            wait_until(lambda: len(server.requests) >= round(0.6 * calls) or child.poll() is not None, timeout_s=300)
            child.kill()
            child.communicate(timeout=60)
        assert child.returncode == -9
        assert not out.exists()
        before = kept(tmp_path / "cut.parquet.journal.sqlite")
        shown = finish(start(server, out))
        assert 0.3 * calls < before < calls
        assert re.search(rf"calls of this process\W+{calls - before}\b", shown)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    plans = load_plans(out)
    assert len(plans) > 8
    assert f"{len(plans)} of {len(questions)} questions" in shown
