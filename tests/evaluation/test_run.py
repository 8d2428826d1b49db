from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, Interrupted, RunError
from reasonrag.evaluation.run import Evaluation
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import trajectory_schema
from tests.evaluation.toy_policies import RECORD, evaluate, write_questions

pytestmark = pytest.mark.usefixtures("undrawn")

MODULE = "python:tests.evaluation.toy_policies"


@pytest.fixture(autouse=True)
def fresh_record():
    RECORD.clear()


@pytest.fixture
def questions(tmp_path):
    return write_questions(tmp_path / "toy.jsonl")


def toys(questions, *names, **overrides):
    shared = {
        "questions.dataset": str(questions),
        "retrieval.kind": f"{MODULE}:retriever",
        "run.max_failed": 1.0,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    named = {name: {**shared, "policy.spec": f"{MODULE}:{name}"} for name in names}
    return {name: load_config(overrides=overrides, judged=True) for name, overrides in named.items()}


def digests(out):
    """Name to checksum of every file but journals and records."""
    files = [p for p in sorted(out.rglob("*")) if p.is_file() and not p.name.startswith((".", "journal", "identity"))]
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def rows(out, policy, setting):
    return list(read_shards(out / policy / "trajectories", setting, trajectory_schema()))


def test_every_question_is_tried_once_and_kept_in_order(questions, tmp_path):
    figures = evaluate(toys(questions, "searcher"), tmp_path / "out")
    kept = rows(tmp_path / "out", "searcher", "t1_s8_k3")
    assert [row["question_id"] for row in kept] == [f"q{n}" for n in range(12)]
    assert [row["em"] for row in kept] == [float(n % 3 != 0) for n in range(12)]
    assert {len(row["trajectory"]) for row in kept} == {3}
    assert RECORD.calls == {"searcher": 36}
    assert figures["questions"] == {"total": 12, "scored": 12, "not_tried": 0}
    assert (figures["em"]["mean"], figures["retrievals"]["mean"], figures["steps"]["n"]) == (
        pytest.approx(2 / 3),
        1,
        12,
    )
    assert figures == json.loads((tmp_path / "out/metrics.json").read_text())


def test_the_same_again_makes_no_call_and_writes_the_same_files(questions, tmp_path):
    configs = toys(questions, "direct", "searcher", policy__concurrency=5)
    evaluate(configs, tmp_path / "out")
    before = digests(tmp_path / "out")
    RECORD.clear()
    evaluate(configs, tmp_path / "out")
    assert not RECORD.calls
    assert digests(tmp_path / "out") == before
    assert len(before) == 2 * 2 + 2  # config, trajectories a policy; metrics, report


def test_concurrency_changes_no_result(questions, tmp_path):
    for name, concurrency in (("a", 1), ("b", 12)):
        evaluate(toys(questions, "searcher", policy__concurrency=concurrency), tmp_path / name)
    a, b = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert {n: d for n, d in a.items() if "config" not in n} == {n: d for n, d in b.items() if "config" not in n}


def test_policies_are_opened_one_after_the_other_and_the_retriever_once(questions, tmp_path):
    evaluate(toys(questions, "direct", "searcher", "endless"), tmp_path / "out")
    order = [f"{what} {name}" for name in ("direct", "searcher", "endless") for what in ("open", "close")]
    assert RECORD.events == ["open retriever", *order]


def test_a_sweep_of_the_step_limit_pays_for_forced_answers_alone(questions, tmp_path):
    configs = toys(questions, "endless")
    evaluate(configs, tmp_path / "out", max_steps=[7])
    assert RECORD.calls == {"endless": 12 * 7}
    figures = evaluate(configs, tmp_path / "out", max_steps=[7, 1, 3, 5])
    assert RECORD.calls == {"endless": 12 * (7 + 3)}
    limits = {name: of["steps"]["mean"] for name, of in figures["policies"]["endless"].items()}
    assert limits == {"t1_s7_k3": 7, "t1_s1_k3": 1, "t1_s3_k3": 3, "t1_s5_k3": 5}
    assert figures["forced"]["mean"] == 1
    assert figures["calls"]["endless"]["policy"]["calls"] == 12 * 10


def test_points_of_a_sweep_that_ask_differently_are_paid_for(questions, tmp_path):
    figures = evaluate(toys(questions, "direct"), tmp_path / "out", temperatures=[0.0, 0.7], top_ks=[1, 3])
    # Another temperature is another request; passages are never seen by a policy that does not search.
    assert RECORD.calls == {"direct": 24}
    assert list(figures["policies"]["direct"]) == ["t0_s8_k1", "t0_s8_k3", "t0.7_s8_k1", "t0.7_s8_k3"]
    assert (figures["policy"], figures["setting"]) == ("direct", "t0_s8_k1")


def test_a_question_that_a_backend_lets_down_is_set_aside_not_scored_and_tried_again(questions, tmp_path):
    configs = toys(questions, "direct")
    RECORD.fails = {3}
    figures = evaluate(configs, tmp_path / "out")
    assert figures["failed"] == {"unreachable": 1}
    assert figures["questions"] == {"total": 12, "scored": 11, "not_tried": 0}
    assert (figures["em"]["n"], figures["em"]["mean"]) == (11, pytest.approx(6 / 11))
    assert "q3" not in {row["question_id"] for row in rows(tmp_path / "out", "direct", "t1_s8_k3")}
    failure = {"policy": "direct", "setting": "t1_s8_k3", "dataset": "toy", "question_id": "q3", "cause": "unreachable"}
    assert figures["failures"] == [failure]
    assert "unreachable" in (tmp_path / "out/report.md").read_text()
    RECORD.clear()
    figures = evaluate(configs, tmp_path / "out")
    assert RECORD.calls == {"direct": 1}
    assert (figures["failed"], figures["em"]["n"], figures["em"]["mean"]) == ({}, 12, 0.5)
    evaluate(configs, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_too_many_failures_end_a_setting_and_are_reported(questions, tmp_path):
    RECORD.fails = set(range(12))
    configs = toys(questions, "direct", run__max_failed=0.1, policy__concurrency=1)
    figures = evaluate(configs, tmp_path / "out")
    assert figures["failed"] == {"unreachable": 2}
    assert figures["questions"] == {"total": 12, "scored": 0, "not_tried": 10}
    assert figures["incomplete"] == [
        {"policy": "direct", "setting": "t1_s8_k3", "missing": 12, "causes": {"unreachable": 2}}
    ]
    assert figures["em"] is None
    assert rows(tmp_path / "out", "direct", "t1_s8_k3") == []
    assert "not tried" in (tmp_path / "out/report.md").read_text()


def test_drained_it_stops_keeps_what_is_paid_and_goes_on(questions, tmp_path):
    configs = toys(questions, "direct", "searcher", policy__concurrency=2)
    evaluate(configs, tmp_path / "whole")
    RECORD.clear()
    seen = []

    @contextlib.asynccontextmanager
    async def show(evaluation):
        seen.append(evaluation)
        RECORD.on_call = lambda: evaluation.drain() if RECORD.calls.total() == 20 else None
        yield

    with pytest.raises(Interrupted):
        evaluate(configs, tmp_path / "out", show=show)
    assert RECORD.events[-1] == "close searcher"
    paid = RECORD.calls.total()
    assert 20 <= paid <= 21
    assert seen[-1].progress.calls == paid
    assert not (tmp_path / "out/metrics.json").exists()
    RECORD.on_call = None
    evaluate(configs, tmp_path / "out")
    assert RECORD.calls.total() == 48
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_drain_before_the_first_call_pays_for_nothing(questions, tmp_path):
    evaluation = Evaluation(toys(questions, "direct"), tmp_path / "out")
    evaluation.drain()
    with pytest.raises(Interrupted):
        evaluation.run()
    assert not RECORD.calls


def test_progress_counts_attempts_calls_and_tokens_over_all_policies(questions, tmp_path):
    evaluation = Evaluation(toys(questions, "direct", "searcher"), tmp_path / "out", max_steps=[8, 5])
    progress = evaluation.progress
    assert progress.total == 48 and progress.planned == 2 * 12 * (8 + 5)  # as many steps as there may be
    evaluation.run()
    assert (progress.done, progress.failed, progress.calls) == (48, 0, 48)
    assert progress.tokens > 1000 and progress.eta_s == 0
    assert progress.line().startswith("searcher t1_s5_k3, 48/48 attempts, 0 failed, 96/96 steps, 48 calls (")


def test_another_policy_under_the_same_name_is_refused(questions, tmp_path):
    evaluate(toys(questions, "direct"), tmp_path / "out")
    other = toys(questions, "searcher")["searcher"]
    with pytest.raises(RunError, match=r"content\.policy"):
        evaluate({"direct": other}, tmp_path / "out")


def test_settings_of_trees_do_not_matter_to_an_evaluation(questions, tmp_path):
    evaluate(toys(questions, "direct"), tmp_path / "out")
    evaluate(toys(questions, "direct", search__iterations=3, value__alpha=0.5), tmp_path / "out")
    assert RECORD.calls == {"direct": 12}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "metrics.json", "a b", "x" * 65])
def test_a_name_that_is_no_folder_is_refused(name, questions, tmp_path):
    config = toys(questions, "direct")["direct"]
    with pytest.raises(ConfigError, match="cannot be a folder"):
        evaluate({name: config}, tmp_path / "out")


def test_policies_that_cannot_be_compared_are_refused(questions, tmp_path):
    first, other = (toys(questions, "direct", seed=seed)["direct"] for seed in (0, 1))
    with pytest.raises(ConfigError, match="differ in seed, questions, corpus or outcome"):
        evaluate({"a": first, "b": other}, tmp_path / "out")
    fewer = toys(questions, "direct", questions__limit=3)["direct"]
    with pytest.raises(ConfigError, match="differ in seed"):
        evaluate({"a": first, "b": fewer}, tmp_path / "out")
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "Jaws\\nA film."}\n')
    bm25 = {"retrieval__kind": "bm25", "retrieval__corpus": str(tmp_path / "corpus.jsonl")}
    elsewhere = toys(questions, "direct", **bm25, retrieval__cache=str(tmp_path / "cache"))["direct"]
    with pytest.raises(ConfigError, match="differ in seed"):
        evaluate({"a": first, "b": elsewhere}, tmp_path / "out")
    with pytest.raises(ConfigError, match="no policy"):
        evaluate({}, tmp_path / "out")
    with pytest.raises(ConfigError, match="max_steps"):
        evaluate({"a": first}, tmp_path / "out", max_steps=[0])
    assert not RECORD.calls and not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(questions, tmp_path):
    configs = toys(questions, "direct")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").touch()
    with pytest.raises(RunError, match="no evaluation"):
        evaluate(configs, tmp_path / "photos")
    (tmp_path / "photos/.lock").touch()  # as an index, a recording or a training has
    (tmp_path / "photos/report.md").write_text("my own")
    with pytest.raises(RunError, match="no evaluation"):
        evaluate(configs, tmp_path / "photos")
    evaluate(configs, tmp_path / "out")
    with pytest.raises(RunError, match="run of build-tree"):  # a policy's folder holds a journal, as a run's does
        evaluate(configs, tmp_path / "out/direct")
    assert RECORD.calls == {"direct": 12}


def test_importing_evaluation_imports_nothing_heavy():
    heavy = "{'numpy', 'torch', 'matplotlib', 'pyarrow', 'transformers'}"
    code = f"import sys, reasonrag.evaluation.run; sys.exit(not {heavy}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
