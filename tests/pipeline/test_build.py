from __future__ import annotations

import json
from itertools import groupby

import pyarrow.parquet as pq
import pytest

from benchmarks.stub import built
from reasonrag.core.config import load_config
from reasonrag.core.errors import LLMError, RunError
from reasonrag.core.types import Completion, Question
from reasonrag.dpo.pairs import in_test_split, repeated_questions
from reasonrag.formats import ReasonRAGFormat
from reasonrag.llm.scripted import ScriptedLLM
from reasonrag.pipeline.parts import Parts
from reasonrag.pipeline.tables import count_pairs_of, export_pairs, pairs_of
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.runs import read_run
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.mcts.test_search import random_policy
from tests.toys import ToyRetriever

QUESTIONS = [Question(str(i), f"Who directed film {i}?", ("Steven Spielberg",), dataset="toy") for i in range(12)]


def run(folder, policy=random_policy, *, judge=None, overrides=None, questions=QUESTIONS, format=None):
    """One `build-tree` in this process; returns the build and what run.json holds."""
    kind = {"value.kind": "judge"} if judge else {}
    config = load_config(overrides={"search.iterations": 6, "run.max_failed": 1.0, **kind, **(overrides or {})})
    llm = policy if isinstance(policy, ScriptedLLM) else ScriptedLLM(policy)
    judge_llm = ScriptedLLM(judge, name="judge") if judge else None
    format = format or ReasonRAGFormat()
    parts = Parts(list(questions), ToyRetriever(), format, llm, judge_llm, {"policy": "scripted"})
    return built(config, folder, parts)


def rows(folder, stem="nodes"):
    place, schema = ("trees", tree_schema()) if stem == "nodes" else ("pairs", pair_schema())
    # A split in which no question falls has no shard.
    there = any((folder / place).glob(f"{stem}-*"))
    return list(read_shards(folder / place, stem, schema)) if there else []


def test_rows_do_not_depend_on_concurrency(tmp_path):
    for name, concurrency in (("a", 1), ("b", 12)):
        run(tmp_path / name, overrides={"policy.concurrency": concurrency})
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a", "train") == rows(tmp_path / "b", "train") != []


def test_the_summary_counts_what_the_tables_hold(tmp_path):
    build, summary = run(tmp_path / "r")
    nodes = rows(tmp_path / "r")
    pairs = rows(tmp_path / "r", "train") + rows(tmp_path / "r", "test")
    assert summary["questions"] == {"total": 12, "finished": 12, "failed": {}}
    assert summary["trees"]["nodes"] == len(nodes)
    assert summary["trees"]["complete_trajectories"] == sum(r["f1"] is not None for r in nodes)
    assert summary["pairs"]["total"] == len(pairs) == sum(summary["pairs"]["by_type"].values())
    assert summary["calls"]["policy"]["calls"] == len(nodes) - 12 == build.progress.usage.calls
    assert json.loads((tmp_path / "r/run.json").read_text()) == json.loads(json.dumps(summary))


def test_the_summary_says_what_a_prefix_cache_could_serve_and_what_the_engine_served(tmp_path):
    def policy(prompt, sampling):
        return Completion(random_policy(prompt, sampling), prompt_tokens=100, completion_tokens=5, cached_tokens=60)

    run(tmp_path / "r", policy, questions=QUESTIONS[:6])
    build, summary = run(tmp_path / "r", policy)
    used = summary["calls"]["policy"]
    assert (used["cached_tokens"], used["cached_of"]) == (60 * used["calls"], 100 * used["calls"])
    assert "60% of the prompts cached" in build.progress.line()
    texts = [[*(m["content"] for m in row["prompt"]), row["prefix"]] for row in rows(tmp_path / "r") if row["prompt"]]
    trie, shared = {}, 0
    for text in map("\0".join, texts):
        node = trie
        for char in text:
            shared += char in node
            node = node.setdefault(char, {})
    assert summary["trees"]["prompt_chars"] == sum(len("\0".join(text)) for text in texts)
    # Served is a system text also where it is first read, and not what questions share by chance.
    shared += len(texts[0][0])
    assert shared - 12 * 30 < summary["trees"]["shared_prompt_chars"] <= shared


@pytest.mark.fault(
    "power cut",
    "config.yaml of a finished run is empty",
    "refused in a line; the same build-tree command writes it again without a call",
    before="read as the defaults, and published as such",
)
def test_an_empty_configuration_is_not_taken_for_the_defaults(tmp_path, figure):
    run(tmp_path / "r", questions=QUESTIONS[:1])
    file = tmp_path / "r/config.yaml"
    written = file.read_bytes()
    file.write_bytes(b"")
    with pytest.raises(RunError, match=r"config\.yaml is empty, as after a power cut") as refused:
        read_run(tmp_path / "r")
    run(tmp_path / "r", questions=QUESTIONS[:1])
    figure(f"{str(refused.value).partition('config.yaml ')[2]}: {file.read_bytes() == written}")
    assert file.read_bytes() == written


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


def test_a_question_that_a_backend_lets_down_is_set_aside_and_tried_again(tmp_path):
    def flaky(prompt, sampling):
        if "film 3?" in prompt.messages[1].content:
            raise LLMError("gone", cause="unreachable")
        return random_policy(prompt, sampling)

    _, summary = run(tmp_path / "r", flaky)
    assert summary["questions"] == {"total": 12, "finished": 11, "failed": {"unreachable": 1}}
    assert "3" not in {r["question_id"] for r in rows(tmp_path / "r")}
    _, summary = run(tmp_path / "r")
    assert summary["questions"] == {"total": 12, "finished": 12, "failed": {}}
    run(tmp_path / "whole")
    assert rows(tmp_path / "r") == rows(tmp_path / "whole")


def test_a_bug_in_one_question_is_counted_by_its_name_and_ends_no_run(tmp_path):
    def buggy(prompt, sampling):
        if "film 3?" in prompt.messages[1].content:
            raise KeyError("oops")
        return random_policy(prompt, sampling)

    _, summary = run(tmp_path / "r", buggy)
    assert summary["questions"]["failed"] == {"bug:KeyError": 1}


def test_a_dead_backend_stops_the_run_before_every_question_has_failed(tmp_path):
    def dead(prompt, sampling):
        raise LLMError("gone", cause="unreachable")

    build, summary = run(tmp_path / "r", dead, overrides={"run.max_failed": 0.25, "policy.concurrency": 1})
    assert 4 <= build.progress.failed <= 6  # two more had begun
    assert summary["questions"]["finished"] == 0


def test_a_run_whose_steps_cannot_be_read_stops_and_goes_on_where_it_was_if_told(tmp_path):
    llm = ScriptedLLM(lambda prompt, sampling: "I do not know")
    with pytest.raises(RunError, match=r"scripted: 0 of the first 12 steps can be read \(12 no_tag\)"):
        run(tmp_path / "r", llm, overrides={"policy.concurrency": 1})
    paid = len(llm.prompts)
    assert 12 <= paid < 30
    with pytest.raises(RunError, match="goes on all the same"):
        run(tmp_path / "r", llm, overrides={"policy.concurrency": 1})
    _, summary = run(tmp_path / "r", llm, overrides={"run.max_unreadable": 1.0})
    assert summary["trees"]["malformed"] == {"no_tag": summary["trees"]["nodes"] - 12}
    assert len(llm.prompts) == summary["calls"]["policy"]["calls"] == summary["trees"]["nodes"] - 12


def test_a_finished_run_calls_nothing(tmp_path):
    run(tmp_path / "r")
    build, _ = run(tmp_path / "r", ScriptedLLM([]))
    assert build.progress.usage.calls == 0 and build.progress.done == 12


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_unreadable_judge_replies_lose_no_question(tmp_path, share):
    import random

    def judge(prompt, sampling):
        return "?" if random.Random(sampling.seed).random() < share else "So the score is 0.5"

    _, summary = run(tmp_path / "r", judge=judge)
    assert summary["questions"]["finished"] == 12
    missing = summary["trees"]["iterations_without_value"]
    assert missing == {0.01: 0, 0.2: missing, 1.0: 72}[share]
    assert missing == sum(r["visits"] - r["valued"] for r in rows(tmp_path / "r") if r["node_id"] == 0)
    assert all(r["value"] in (None, pytest.approx(0.5)) for r in rows(tmp_path / "r"))


@pytest.mark.parametrize(
    "settings", [{}, {"pairs.min_confidence": 0.7}, {"pairs.min_rollouts": 2}, {"pairs.level": "trajectory"}]
)
def test_pairs_are_counted_tree_by_tree_as_they_are_made(tmp_path, settings):
    build, _ = run(tmp_path / "r", overrides=settings)
    trees = [list(tree) for _, tree in groupby(rows(tmp_path / "r"), key=lambda row: row["question_id"])]
    made = [len(list(pairs_of(tree, build.config, policy="p", config_hash="h"))) for tree in trees]
    assert [count_pairs_of(tree, build.config) for tree in trees] == made
    assert build.progress.written["pairs"] == sum(made) > 0


def test_other_thresholds_need_no_call(tmp_path):
    run(tmp_path / "r")
    config, summary = read_run(tmp_path / "r")
    config = load_config(file=tmp_path / "r/config.yaml", overrides={"pairs.min_margin": 0.3})
    pairs = export_pairs(tmp_path / "r", config, policy=summary["policy"], config_hash=summary["config_hash"])
    assert 0 < pairs["total"] < summary["pairs"]["total"]
    assert min(r["margin"] for r in rows(tmp_path / "r", "train")) >= 0.3


def test_no_question_is_in_both_splits(tmp_path):
    run(tmp_path / "r", overrides={"pairs.test_share": 0.5})
    train, test = ({r["question_id"] for r in rows(tmp_path / "r", name)} for name in ("train", "test"))
    assert train and test and not train & test


def test_every_shown_query_was_looked_up_once(tmp_path):
    build, _ = run(tmp_path / "r")
    queries = build.parts.retriever.queries
    assert len(queries) == len(set(queries)) > 0


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    run(tmp_path / "r")
    with pytest.raises(RunError, match=r"search\.iterations: 6 there, 7 now"):
        run(tmp_path / "r", overrides={"search.iterations": 7})


def test_the_seed_is_part_of_the_tree(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", overrides={"seed": 1})
    assert rows(tmp_path / "a") != rows(tmp_path / "b")
