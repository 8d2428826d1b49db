from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog

from reasonrag.commands.rl import plan
from reasonrag.core.config import load_config
from reasonrag.core.errors import DataError, Interrupted, LLMError
from reasonrag.core.types import Question
from reasonrag.formats import PromptSet
from reasonrag.llm.journaled import JournaledLLM
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.rewards.judge import JudgeService
from reasonrag.rewards.reference_plans import load_plans, make_plans
from reasonrag.rewards.verdicts import ReferencePlan
from reasonrag.storage.journal import Journal
from reasonrag.storage.parquet import read_parquet, write_parquet
from reasonrag.storage.tables import plan_schema, tree_schema
from tests.llm.fake_openai import FakeOpenAI
from tests.rewards.toys import judge

QUESTIONS = [Question(f"q{n}", f"Who directed film {n}?", ("Steven Spielberg",), dataset="toy") for n in range(6)]


@pytest.fixture
def plain_logs():
    """The command's logs go to the standard error of its own test."""
    yield
    structlog.reset_defaults()


def proposal(*steps, answer="Steven Spielberg", planner="look"):
    listed = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    path = f"<correct_reasoning_path>\n{listed}\n</correct_reasoning_path>"
    return f"{path}\n<optimized_planner>\n{planner}\n</optimized_planner>\n<answer>{answer}</answer>"


def planned(service, tmp_path, questions=QUESTIONS[:1], k=2, **options):
    out = tmp_path / "plans.parquet"
    made = asyncio.run(make_plans(questions, service, k=k, out=out, **options))
    return made, read_parquet(out, plan_schema())


def proposing(*proposals, vote=None):
    """A judge that makes these proposals in turn, and votes for one plan."""
    turns = iter(proposals)

    def reply(request):
        return vote if "Planner 1" in request else next(turns)

    return judge(reply, attempts=1, concurrency=1)


def test_the_right_candidates_are_voted_on(tmp_path):
    service = proposing(
        proposal("a", "b"),
        proposal("c", answer="George Lucas"),
        proposal("a"),
        vote=proposal("a!", planner="look for a"),
    )
    made, rows = planned(service, tmp_path, k=3)
    assert rows == [
        {
            "dataset": "toy",
            "question_id": "q0",
            "planner": "look for a",
            "steps": ["a!"],
            "candidates": 3,
            "correct": 2,
            "votes": 2,
        }
    ]
    assert (made.plans, made.without, made.failed, made.untried) == (1, {}, 0, 0)
    assert load_plans(tmp_path / "plans.parquet") == {("toy", "q0"): ReferencePlan("look for a", ("a!",))}


@pytest.mark.parametrize(
    ("proposals", "correct"),
    [
        ((proposal("a"), proposal("b", answer="George Lucas")), 1),
        ((proposal("The a", "b"), proposal("a", "B.")), 2),
    ],
)
def test_there_is_no_vote_where_one_is_left_or_all_agree(proposals, correct, tmp_path):
    service = proposing(*proposals)
    _, (row,) = planned(service, tmp_path)
    assert (row["correct"], row["votes"]) == (correct, 0)
    assert service.counts["vote.asked"] == 0


def test_without_a_right_candidate_there_is_no_plan_and_it_is_counted(tmp_path):
    wrong = [proposal("a", answer="Spielberg it was, Steven Spielberg")] * 2
    made, rows = planned(proposing(*wrong), tmp_path)
    assert (rows, made.without, made.failed) == ([], {"no_correct_candidate": 1}, 0)
    assert len(planned(proposing(*wrong), tmp_path, correct="cem")[1]) == 1


def test_a_candidate_that_cannot_be_had_leaves_the_others(tmp_path):
    made, (row,) = planned(proposing("no plan", proposal("a")), tmp_path)
    assert (row["candidates"], row["correct"]) == (1, 1)
    assert made.failed == 0


def test_a_question_without_any_candidate_failed_and_is_counted_by_cause(tmp_path):
    made, rows = planned(proposing("?", "?", proposal("a"), proposal("a")), tmp_path, QUESTIONS[:2], max_failed=1.0)
    assert [row["question_id"] for row in rows] == ["q1"]
    assert (made.plans, made.without, made.failed) == (1, {"unreadable": 1}, 1)


def test_it_gives_up_where_the_judge_is_not_there(tmp_path):
    service = judge(lambda request: LLMError("down"))
    made, _ = planned(service, tmp_path, QUESTIONS, concurrency=1)
    assert (made.failed, made.untried, made.without) == (1, 5, {"unreachable": 1})


def test_rows_are_in_the_order_of_the_questions_whoever_is_done_first(tmp_path):
    service = judge(lambda request: proposal("a"))
    _, rows = planned(service, tmp_path, QUESTIONS, concurrency=3)
    assert [row["question_id"] for row in rows] == [q.id for q in QUESTIONS]


def test_what_is_no_file_of_plans_is_refused(tmp_path):
    write_parquet(tmp_path / "trees.parquet", [], tree_schema())
    row = {"dataset": "toy", "question_id": "q0", "planner": "p", "steps": ["a"]}
    write_parquet(
        tmp_path / "twice.parquet", [row | dict.fromkeys(("candidates", "correct", "votes"), 1)] * 2, plan_schema()
    )
    for name, message in (("trees", "not those of this version"), ("twice", "two plans"), ("none", "cannot be read")):
        with pytest.raises(DataError, match=message):
            load_plans(tmp_path / f"{name}.parquet")


def test_done_again_it_pays_for_nothing_and_draining_stops_it(tmp_path):
    out = tmp_path / "plans.parquet"

    def once(draining=False):
        with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
            if draining:
                journal.drain()
            llm = JournaledLLM(ScriptedLLM(reply), journal, kind="judge")
            asyncio.run(make_plans(QUESTIONS, JudgeService(llm, PromptSet.find()), k=3, out=out))
            return llm.sent

    def reply(prompt, sampling):
        return proposal("a", f"b{sampling.seed % 2}")

    with pytest.raises(Interrupted):
        once(draining=True)
    assert not out.exists()
    assert once() >= 18
    before = out.read_bytes()
    assert once(draining=True) == 0
    assert out.read_bytes() == before


SCRIPT = """
import sys
from pathlib import Path
from reasonrag.commands.rl import plan
from reasonrag.core.config import load_config
url, data, out = sys.argv[1:]
judge = {"value.kind": "judge", "judge.spec": url, "judge.model": "fake"}
prices = {"judge.input_price": 1, "judge.output_price": 1}
config = load_config(overrides=judge | prices | {"questions.dataset": data, "run.concurrency": 4})
sys.exit(plan(config, Path(out), candidates=4))
"""


def remote_reply(request):
    """Right three times in four, and not always by the same path."""
    draw = hashlib.sha256(f"{request['seed']}{request['messages']}".encode()).digest()[0]
    return proposal("a", *(["b"] if draw % 3 else []), answer="Steven Spielberg" if draw % 4 else "George Lucas")


def kept(journal: Path) -> int:
    with contextlib.closing(sqlite3.connect(journal)) as reading:
        return int(reading.execute("SELECT COUNT(*) FROM calls").fetchone()[0])


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_file_and_pays_for_nothing_that_was_kept(tmp_path, plain_logs):
    data = tmp_path / "questions.jsonl"
    rows = [{"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers)} for q in QUESTIONS]
    rows += [{**rows[0], "id": f"more{n}", "question": f"Who directed more {n}?"} for n in range(14)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(server, out):
        command = [sys.executable, "-c", SCRIPT, server.base_url, str(data), str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(child):
        stdout, stderr = child.communicate(timeout=60)
        assert child.returncode == 0, stderr
        return stdout

    with FakeOpenAI(remote_reply) as server:
        judging = {"value.kind": "judge", "judge.spec": server.base_url, "judge.model": "fake"}
        config = load_config(overrides=judging | {"questions.dataset": str(data)})
        assert plan(config, tmp_path / "whole.parquet", candidates=4) == 0
        calls = len(server.requests)
    with FakeOpenAI(remote_reply, latency_s=0.02) as server:
        out = tmp_path / "cut.parquet"
        child = start(server, out)
        end = time.monotonic() + 60
        while len(server.requests) < 0.6 * calls:
            assert time.monotonic() < end and child.poll() is None
            time.sleep(0.002)
        child.kill()
        child.communicate(timeout=60)
        assert child.returncode == -9
        assert not out.exists()
        before, paid = kept(tmp_path / "cut.parquet.journal.sqlite"), len(server.requests)
        shown = finish(start(server, out))
        assert 0.3 * calls < before < calls
        assert len(server.requests) - paid == calls - before
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    plans = load_plans(out)
    assert len(plans) > 15
    assert f"{len(plans)} of {len(rows)} questions" in shown
    assert "cost" in shown


def test_the_command_says_what_came_of_it(tmp_path, capsys, plain_logs):
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"id": "q", "question": "Who?", "golden_answers": ["Steven Spielberg"]}) + "\n")
    with FakeOpenAI(lambda request: proposal("a", answer="George Lucas")) as server:
        names = {"value.kind": "judge", "judge.spec": server.base_url, "judge.model": "fake"}
        config = load_config(overrides=names | {"questions.dataset": str(data)})
        assert plan(config, tmp_path / "new" / "plans.parquet", candidates=2) == 0
    told = capsys.readouterr()
    assert "0 of 1 questions" in told.out
    assert "without: no_correct_candidate" in told.out
    assert "reference plans, 1/1 attempts" in told.err


def test_a_judge_has_the_configured_time_for_a_verdict_with_all_its_attempts(tmp_path, capsys, plain_logs):
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"id": "q", "question": "Who?", "golden_answers": ["Steven Spielberg"]}) + "\n")
    with FakeOpenAI(lambda request: proposal("a"), latency_s=600.0) as server:
        names = {"value.kind": "judge", "judge.spec": server.base_url, "judge.model": "fake", "judge.timeout_s": 0.3}
        config = load_config(overrides=names | {"questions.dataset": str(data)})
        assert plan(config, tmp_path / "plans.parquet", candidates=1) == 1
    assert "without: timeout" in capsys.readouterr().out
