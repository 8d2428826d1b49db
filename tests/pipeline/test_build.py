from __future__ import annotations

import json
from collections import Counter
from statistics import fmean

import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from benchmarks.stub import built
from reasonrag import build_trees, train_dpo, train_online
from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, LLMError, RunError
from reasonrag.core.types import Question
from reasonrag.dpo.pairs import in_test_split, repeated_questions
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.parts import Parts
from reasonrag.storage.folder import RunFolder, read_run
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.fakes.scripted import ScriptedLLM
from tests.mcts.test_search import random_policy
from tests.toys import ToyRetriever

QUESTIONS = [Question(str(i), f"Who directed film {i}?", ("Steven Spielberg",), dataset="toy") for i in range(12)]


def run(folder, policy=random_policy, *, judge=None, overrides=None, questions=QUESTIONS, format=None, outcome=None):
    """One `build-tree` in this process; returns the build and what run.json holds."""
    kind = {"value.kind": "judge"} if judge else {}
    config = load_config(overrides={"search.iterations": 6, "run.max_failed": 1.0, **kind, **(overrides or {})})
    llm = policy if isinstance(policy, ScriptedLLM) else ScriptedLLM(policy)
    judge_llm = ScriptedLLM(judge, name="judge") if judge else None
    format = format or ReasonRAGFormat()
    content = {"policy": "scripted"} | ({"outcome": outcome.__name__} if outcome else {})
    parts = Parts(list(questions), ToyRetriever(), format, llm, judge_llm, content, outcome=outcome)
    return built(config, folder, parts)


def rows(folder, stem="nodes"):
    place, schema = ("trees", tree_schema()) if stem == "nodes" else ("pairs", pair_schema())
    # A split in which no question falls has no shard.
    there = any((folder / place).glob(f"{stem}-*"))
    return list(read_shards(folder / place, stem, schema)) if there else []


def test_the_summary_counts_what_the_tables_hold(tmp_path):
    build, summary = run(tmp_path / "r")
    nodes = rows(tmp_path / "r")
    pairs = rows(tmp_path / "r", "train") + rows(tmp_path / "r", "test")
    assert summary["questions"] == {"total": 12, "finished": 12, "failed": {}}
    assert summary["trees"]["nodes"] == len(nodes)
    assert summary["trees"]["complete_trajectories"] == sum(r["f1"] is not None for r in nodes)
    assert summary["pairs"]["total"] == len(pairs) == sum(summary["pairs"]["by_type"].values())
    assert summary["calls"]["policy"]["calls"] == len(nodes) - 12 == build.progress.calls
    assert json.loads((tmp_path / "r/run.json").read_text()) == json.loads(json.dumps(summary))


@pytest.mark.parametrize("call", [build_trees, train_dpo, train_online])
def test_settings_of_another_kind_are_named(call, tmp_path):
    with pytest.raises(ConfigError, match=r"a dict is not a (Config|DPOSettings|RLSettings); make one with "):
        call({"seed": 1}, tmp_path / "out")


@pytest.mark.fault(
    "power cut",
    "config.yaml of a finished run is empty, zeros, or cut within a line",
    "refused in a line; the same build-tree command writes it again without a call",
    before="empty, read as the defaults and published as such; zeros, refused by eval for ever",
)
def test_an_empty_configuration_is_not_taken_for_the_defaults(tmp_path, figure):
    run(tmp_path / "r", questions=QUESTIONS[:1])
    file, said = tmp_path / "r/config.yaml", []
    written = file.read_bytes()
    cut = written[: written.index(b": ", len(written) // 2) - 1]
    for harm in (b"", b"\0" * len(written), cut):
        file.write_bytes(harm)
        with pytest.raises(RunError, match=r"config\.yaml .*; the same build-tree command writes it again") as refused:
            read_run(tmp_path / "r")
        said.append(str(refused.value).partition("config.yaml ")[2])
        assert RunFolder.begun_with(tmp_path / "r") == {}
        run(tmp_path / "r", questions=QUESTIONS[:1])
        assert file.read_bytes() == written
    figure(" / ".join(said))
    assert said[0].startswith("is empty, as after a power cut")


def test_questions_of_one_text_are_known_as_they_may_repeat_pairs(tmp_path):
    texts = ["Who made Jaws?", "Who made Duel?", "Who made  jaws?"]
    run(tmp_path / "r", questions=[Question(str(i), text, ("x",), dataset="toy") for i, text in enumerate(texts)])
    first = ("toy", "0")
    assert repeated_questions((tmp_path / "r/trees").glob("*.parquet")) == {first: first, ("toy", "2"): first}


def test_questions_of_one_text_are_in_one_split(tmp_path):
    texts = ["Who directed film 3?", "Who directed  film 3?"]  # which prompts tell apart
    asked = [Question(str(i), text, ("Steven Spielberg",), dataset="toy") for i, text in enumerate(texts * 3)]
    assert {in_test_split((q.dataset, q.id), 0.5) for q in asked} == {True, False}
    run(tmp_path / "r", questions=asked, overrides={"pairs.test_share": 0.5})
    pairs = [row["question_id"] for row in pq.read_table(tmp_path / "r/pairs").to_pylist()]
    assert len(set(pairs)) > 1 and len(list((tmp_path / "r/pairs").glob("*.parquet"))) == 1


def test_pairs_in_doubt_are_confirmed_once_and_within_the_calls_of_a_tree(tmp_path):
    plain, _ = run(tmp_path / "plain", overrides={"pairs.confirm": 0})
    build, _ = run(tmp_path / "r")
    nodes, searched = rows(tmp_path / "r"), rows(tmp_path / "plain")
    fresh = [row for row in nodes if row["origin"] == "confirmation"]
    of_search = [row | {"spre": None} for row in nodes if row not in fresh]  # SPRE is of all that is below
    assert of_search == [row | {"spre": None} for row in searched]
    assert fresh and {row["valued"] for row in fresh} == {0}
    assert build.progress.calls == plain.progress.calls + len(fresh)
    again, _ = run(tmp_path / "r")
    assert again.progress.calls == 0 and rows(tmp_path / "r") == nodes
    whole = [row["confidence"] for row in rows(tmp_path / "r", "train")]
    assert whole and min(whole) >= 0.8
    most = 20  # calls of a tree; an iteration that has begun is completed
    run(tmp_path / "few", overrides={"search.max_calls": most, "search.lag": 0, "format.max_steps": 4})
    calls = Counter(row["question_id"] for row in rows(tmp_path / "few") if row["depth"])
    assert max(calls.values()) <= most + 2 * 3


def test_a_completer_writes_the_rollouts_and_none_of_the_steps_that_are_compared(tmp_path):
    def reply(prompt, sampling):
        return f"As the teacher says: {random_policy(prompt, sampling)}"

    config = load_config(overrides={"search.iterations": 6, "completer.spec": "extractive", "pairs.confirm": 0})
    for _ in range(2):  # the second run replays the first
        policy, teacher = ScriptedLLM(random_policy), ScriptedLLM(reply, name="teacher")
        parts = Parts(list(QUESTIONS), ToyRetriever(), ReasonRAGFormat(), policy, None, {}, completer=teacher)
        _, summary = built(config, tmp_path / "r", parts)
    assert policy.prompts == teacher.prompts == []
    nodes = {(row["question_id"], row["node_id"]): row for row in rows(tmp_path / "r")}
    origins = Counter(row["origin"] for row in nodes.values())
    assert summary["completer"] == "teacher" and set(origins) == {"root", "expansion", "completion"}
    calls = {kind: counts["calls"] for kind, counts in summary["calls"].items()}
    assert calls["policy"] == origins["expansion"] and calls["completer"] == origins["completion"]
    for row in nodes.values():
        assert (row["text"] or "").startswith("As the teacher says") == (row["origin"] == "completion")
        above = nodes[row["question_id"], max(row["parent_id"], 0)]
        assert row["origin"] == "completion" or above["origin"] != "completion"
    pairs = rows(tmp_path / "r", "train") + rows(tmp_path / "r", "test")
    assert pairs and not any("teacher" in json.dumps([row["chosen"], row["rejected"]]) for row in pairs)


def test_a_bug_in_one_question_is_counted_by_its_name_and_ends_no_run(tmp_path):
    def buggy(prompt, sampling):
        if "film 3?" in prompt.messages[1].content:
            raise KeyError("oops")
        return random_policy(prompt, sampling)

    _, summary = run(tmp_path / "r", buggy)
    assert summary["questions"]["failed"] == {"bug:KeyError": 1}


def test_the_outcome_of_an_answer_is_in_its_row_and_decides_the_pairs(tmp_path):
    _, by_f1 = run(tmp_path / "f1")
    assert "grade" not in rows(tmp_path / "f1")[0] and by_f1["outcome"] == by_f1["pairs"]["outcome"] == "f1"

    def shorter(predictions):
        return [(1 / len(text.split()), "in words") for text in predictions]

    _, summary = run(tmp_path / "mine", outcome=shorter)
    answers = [row for row in rows(tmp_path / "mine") if row["f1"] is not None]
    for row in answers:
        assert row["grade"] == {"value": 1 / len(row["content"].split()), "error": 0.0, "reason": "in words"}
        assert row["spre"] == pytest.approx(row["grade"]["value"] * 0.9 ** row["depth"])
    assert summary["trees"]["mean_outcome"] == pytest.approx(fmean(row["grade"]["value"] for row in answers))
    assert summary["outcome"] == summary["pairs"]["outcome"] == "shorter"


def test_an_answer_without_a_verdict_has_no_reward_and_is_counted(tmp_path):
    def unread(predictions):
        return [None if "Spielberg" in text else 0.0 for text in predictions]

    _, summary = run(tmp_path / "r", outcome=unread)
    right = [row for row in rows(tmp_path / "r") if row["f1"] == 1]
    assert right and {(row["spre"], row["grade"]["reason"]) for row in right} == {(None, "no_reward")}
    assert (summary["trees"]["unknown_outcomes"], summary["pairs"]["total"]) == (len(right), 0)


def test_an_outcome_that_raises_once_sets_that_question_aside_with_its_file_and_line(tmp_path):
    calls = []

    def raising(predictions):
        calls.append(predictions)
        if len(calls) == 3:
            raise ValueError("oops")
        return [1.0] * len(predictions)

    with capture_logs() as logs:
        _, summary = run(tmp_path / "r", outcome=raising)
    assert summary["questions"]["failed"] == {"bug:ValueError": 1} and summary["questions"]["finished"] == 11
    (line,) = [line for line in logs if line.get("cause") == "bug:ValueError"]
    assert line["place"] == f"{__file__}:{raising.__code__.co_firstlineno + 3}"


def test_a_judge_that_is_away_sets_the_question_aside_and_one_that_cannot_be_read_does_not(tmp_path):
    overrides = {"outcome.name": "judge", "judge.spec": "demo-judge", "value.kind": "rollout"}
    for reply, failed in ((LLMError("gone", cause="unreachable"), {"unreachable": 12}), ("fine", {})):
        _, summary = run(tmp_path / str(len(failed)), judge=lambda prompt, sampling, r=reply: r, overrides=overrides)
        assert summary["questions"]["failed"] == failed
    assert summary["trees"]["unknown_outcomes"] == summary["trees"]["complete_trajectories"] > 0


def test_a_dead_backend_stops_the_run_before_every_question_has_failed(tmp_path):
    def dead(prompt, sampling):
        raise LLMError("gone", cause="unreachable")

    build, summary = run(tmp_path / "r", dead, overrides={"run.max_failed": 0.25, "policy.concurrency": 1})
    assert 4 <= build.progress.failed <= 6  # two more had begun
    assert summary["questions"]["finished"] == 0


def test_every_shown_query_was_looked_up_once(tmp_path):
    build, _ = run(tmp_path / "r")
    queries = build.parts.retriever.queries
    assert len(queries) == len(set(queries)) > 0
