"""Rounds of trees, training and evaluation: killed anywhere, within their bound, on questions that differ."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, Interrupted, RunError
from reasonrag.core.text import common_text
from reasonrag.pipeline.build import most_calls
from reasonrag.rounds import Improvement, RoundsSettings, serving
from reasonrag.storage.files import read_json
from reasonrag.storage.parquet import read_parquet
from reasonrag.storage.tables import trajectory_schema
from reasonrag.training.settings import DPOSettings
from tests.e2e import product
from tests.faults.matrix import Figure
from tests.ports import keep_port

SMALL = (
    *("improve", "--preset", "demo", "--limit", "8", "--iterations", "4", "--dev-limit", "6", "--rounds", "2"),
    *("--set", "rounds.patience=2", "--set", "train.max_steps=2", "--save-steps", "1"),
)


def improvement(out: Path, limit: int = 8, **rounds: Any) -> Improvement:
    config = load_config(preset="demo", overrides={"questions.limit": limit, "search.iterations": 4})
    return Improvement(config, DPOSettings(), RoundsSettings(**{"dev": "demo:dev", "dev_limit": 6} | rounds), out)


def weights(out: Path) -> dict[str, str]:
    files = sorted(out.glob("round-*/policy/model.safetensors"))
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds that nothing interrupted. Read only."""
    out = tmp_path_factory.mktemp("rounds") / "whole"
    done = product.run(*SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.fault("1", "SIGKILL of `improve` in each kind of stage, resume", "the same weights of each round")
def test_killed_in_each_stage_it_ends_with_the_same_weights(whole: Path, tmp_path: Path, figure: Figure) -> None:
    out = tmp_path / "killed"
    moments = (
        *("round-0/eval/policy/journal.sqlite", "round-1/trees/journal.sqlite", "round-1/trees/run.json"),
        *("round-1/policy/checkpoints/checkpoint-1/complete.json", "round-1/eval/policy/journal.sqlite"),
    )
    for moment in moments:
        child = product.start(*SMALL, "--out", out)
        product.wait_until(lambda moment=moment, child=child: (out / moment).exists() or child.poll() is not None)
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
    done = product.run(*SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    same = weights(out) == weights(whole) and len(weights(out)) == 2
    figure(f"{len(moments)} kills in one run: {'the same' if same else 'other'} weights, dev metrics and calls")
    assert same and read_json(out / "improve.json") == read_json(whole / "improve.json")


@pytest.mark.slow
def test_a_run_that_began_with_another_policy_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "rounds")
    other = product.run(*SMALL, "--policy", f"hf:{whole / 'round-1/policy'}", "--out", tmp_path / "rounds")
    assert other.returncode == 2 and "content.policy" in other.stderr


@pytest.mark.slow
def test_a_round_does_not_go_on_from_a_damaged_policy(whole: Path, tmp_path: Path) -> None:
    file = shutil.copytree(whole, tmp_path / "rounds") / "round-1/policy/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    again = product.run(*SMALL, "--rounds", "3", "--out", tmp_path / "rounds")
    assert again.returncode == 2 and "model.safetensors is damaged" in again.stderr


@pytest.mark.slow
def test_a_run_that_began_with_other_prompts_or_another_corpus_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "rounds")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "A\\nAnother corpus."}\n')
    for flag, value, said in (("--corpus", corpus, "content.corpus"), ("--prompts", "default", "content.prompts")):
        other = product.run(*SMALL, flag, str(value), "--out", tmp_path / "rounds")
        assert other.returncode == 2 and said in other.stderr


@pytest.mark.slow
def test_rounds_share_no_question_with_each_other_or_with_dev_and_stay_below_the_bound(whole: Path) -> None:
    rows = json.loads((whole / "improve.json").read_text())["rounds"]
    assert [row["policy"] for row in rows] == ["demo", "round-1/policy", "round-2/policy"]
    texts = [
        {common_text(row["question"]) for row in product.tree_rows(whole / f"round-{n}" / "trees")} for n in (1, 2)
    ]
    (file,) = (whole / "round-2" / "eval" / "policy" / "trajectories").glob("*.parquet")
    texts.append({common_text(row["question"]) for row in read_parquet(file, trajectory_schema())})
    assert [len(each) for each in texts] == [8, 8, 6] and len(set.union(*texts)) == 22
    bound = re.search(r"at most (\d+) model calls", improvement(whole, rounds=2).bound())
    assert bound and rows[-1]["calls"] <= int(bound[1])


def test_no_stage_begins_after_a_signal_that_came_as_the_last_one_ended(tmp_path: Path) -> None:
    signals: list[int] = []
    rounds = improvement(tmp_path / "out")
    rounds.log = lambda line: signals.append(signal.SIGTERM)  # once the first stage has begun
    with pytest.raises(Interrupted) as stopped:
        rounds.run(stopped_by=lambda: signals[-1] if signals else 0)
    assert stopped.value.number == signal.SIGTERM
    assert {"identity", "round-0/eval"} == {*read_json(tmp_path / "out/identity.json")} - {"checksum"}


def test_a_round_takes_what_is_left_and_paid_for_and_not_less_than_its_half(tmp_path: Path) -> None:
    rounds = improvement(tmp_path, limit=400)
    first, _ = rounds.next_questions(rounds.questions)
    left = [question for question in rounds.questions if question not in first]
    second, lacking = rounds.next_questions(left)
    assert (len(first), len(second), lacking) == (400, 200, "")
    assert rounds.next_questions(left[:150])[1] == "150 questions are left, and a round takes 400"
    a_tree, an_evaluation = sum(most_calls(rounds.config).values()), 6 * 8
    paid = improvement(tmp_path, limit=20, budget=1000 + 15 * a_tree + an_evaluation)
    assert len(paid.next_questions(left, calls=1000)[0]) == 15
    chosen, lacking = paid.next_questions(left, calls=1000 + 6 * a_tree)
    assert (chosen, lacking) == ([], "--budget pays for 9 trees, and a round takes 20")


def test_dev_questions_are_set_aside_from_the_data_set_unless_they_are_named(tmp_path: Path) -> None:
    rounds = improvement(tmp_path, dev=None, dev_limit=100)
    assert len(rounds.dev) == 100 and len(rounds.questions) == 500
    assert not {question.id for question in rounds.dev} & {question.id for question in rounds.questions}


def test_what_cannot_be_improved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    served = {"policy.spec": "http://127.0.0.1:1/v1", "questions.dataset": "demo", "questions.limit": 8}
    for overrides, rounds, message in (
        (served, {}, "--serve, the command that starts it"),
        (served, {"serve": "vllm serve mine"}, "names no {model}, so each round would serve the same"),
        (served | {"policy.spec": "extractive"}, {}, "cannot act with new weights"),
        (served | {"policy.spec": "demo"}, {"budget": 10}, "does not pay"),
        ({"questions.dataset": "demo"}, {}, "--limit is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            Improvement(load_config(overrides=overrides), DPOSettings(), RoundsSettings(**rounds), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_server_runs_for_its_policy_alone(tmp_path: Path) -> None:
    with keep_port() as kept:
        port = kept.getsockname()[1]
    command = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {{model}}"
    serve = (command, f"http://127.0.0.1:{port}/v1", str(tmp_path), tmp_path / "round-1")
    with serving(*serve), pytest.raises(RunError, match="another server answers"), serving(*serve):
        pass
    with (
        pytest.raises(ConfigError, match="is no command of a shell: No closing quotation"),
        serving("a 'b", *serve[1:]),
    ):
        pass
    code = "print('api_key: sk-proj-abcdefghijklmnop1234567890ABCDEFGHIJ')"
    broken = (f'{sys.executable} -c "{code}"', *serve[1:])
    with pytest.raises(RunError, match=r"does not answer at http.*; .*server\.log"), serving(*broken):
        pass
    product.wait_until(lambda: (tmp_path / "round-1" / "server.log").read_text().endswith("api_key: ***\n"))
