"""What a scorer of steps is asked for: a step of several, an attempt of several, a node's value, a dense reward."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.types import Answer, Completion, FinishReason, Message, Prompt, Step, StopReason, Trajectory
from reasonrag.dpo.pairs import PairRules, derive_pairs
from reasonrag.evaluation.run import Evaluation, choose
from reasonrag.formats import ReasonRAGFormat
from reasonrag.online_rl.collector import Group, Sample
from reasonrag.online_rl.rows import Transcript, training_rows
from reasonrag.pipeline.build import build_trees
from reasonrag.prm.scorer import open_scorer
from reasonrag.rewards import RewardParts, RewardSettings, open_reward
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.toys import QUESTION, ToyRetriever

HERE = "python:tests.prm.test_choice"
FORMAT = ReasonRAGFormat()


class ByLength:
    """Values long steps; `asked` has the texts."""

    name = "by-length"

    def __init__(self):
        self.asked = []

    async def score(self, steps):
        self.asked += [completion.text for _, completion in steps]
        return [min(len(completion.text) / 100, 1.0) for _, completion in steps]

    async def aclose(self):
        pass


class Broken(ByLength):
    async def score(self, steps):
        raise LLMError("no value", cause="not_finite")


def policy(config):
    """Answers with one letter, by its seed."""
    letters = "abcd"
    return ScriptedLLM(lambda prompt, sampling: f"<answer>{letters[sampling.seed % 4] * 2}</answer>", name="letters")


ASKED = Prompt((Message("user", "Who?"),))


def attempt(*answers):
    steps = [Step(ASKED, Completion(text, token_ids=(1,)), Answer(text)) for text in answers]
    return Trajectory(QUESTION, tuple(steps), StopReason.ANSWERED if steps else StopReason.NO_ANSWER)


def test_of_several_steps_the_best_readable_one_is_taken_and_only_its_search_is_made():
    said = ["<query>Jaws</query>", "this is long and no step at all", "<query>Jaws film</query>", "<query>x</query>"]
    asked = count()
    llm = ScriptedLLM(lambda prompt, sampling: said[next(asked)])
    retriever, scorer = ToyRetriever(), ByLength()
    engine = Engine(llm, retriever, FORMAT, scorer=scorer, candidates=4)
    taken = asyncio.run(engine.step(Trajectory(QUESTION), seed=0))
    assert taken.steps[0].completion.text == "<query>Jaws film</query>" and taken.steps[0].passages
    assert retriever.queries == ["Jaws film"]
    assert len(scorer.asked) == 3, "a step that cannot be read is never chosen, so nobody asks what it is worth"


@pytest.mark.parametrize(
    ("rule", "kept"), [("first", 0), ("majority", 1), ("prm", 3)], ids=["first", "majority", "prm"]
)
def test_one_of_several_attempts_is_kept(rule, kept):
    attempts = [attempt(), attempt("The cat"), attempt("cat!"), attempt("a dog with a long name")]
    assert asyncio.run(choose(attempts, rule, ByLength())) is attempts[kept]


def test_rules_choose_among_the_same_attempts_and_are_compared_with_the_first(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f'{{"id": "{n}", "question": "{n}?", "golden_answers": ["dd"]}}\n' for n in range(30)))
    asked = {"questions.dataset": str(file), "retrieval.kind": "python:tests.evaluation.toy_policies:retriever"}
    asked |= {"policy.spec": f"{HERE}:policy", "choice.best_of": 4, "choice.prm": f"{HERE}:ByLength"}
    config = load_config(overrides=asked)
    found = Evaluation({"p": config}, tmp_path / "out", choose=("first", "majority", "prm")).run()
    first, majority, _ = (f"t1_s8_k3_{rule}-of-4" for rule in ("first", "majority", "prm"))
    assert found["calls"]["p"]["policy"]["calls"] == 30 * 4
    assert found["content"]["policies"]["p"]["prm"] == "by-length"
    em = [difference for difference in found["differences"] if difference["metric"] == "em"]
    assert (em[0]["setting"], em[0]["baseline_setting"]) == (majority, first) and len(em) == 2
    single = load_config(overrides=asked | {"choice.best_of": 1, "choice.prm": None})
    alone = Evaluation({"p": single}, tmp_path / "alone").run()
    assert alone["em"] == found["policies"]["p"][first]["em"], "the first of several is what one alone would be"
    broken = load_config(overrides=asked | {"choice.prm": f"{HERE}:Broken", "run.max_failed": 1})
    failed = Evaluation({"p": broken}, tmp_path / "broken").run()
    assert failed["failed"] == {"not_finite": failed["questions"]["total"]}, "a failure is never a score"


def test_a_tree_is_valued_by_the_model_and_by_the_answers(tmp_path):
    asked = {"value.kind": "prm", "choice.prm": f"{HERE}:ByLength", "policy.spec": "extractive", "search.iterations": 6}
    summary = build_trees(load_config(preset="demo", overrides=asked | {"questions.limit": 2}), tmp_path / "run")
    import pyarrow.parquet as pq

    rows = pq.read_table(next((tmp_path / "run" / "trees").glob("*.parquet"))).to_pylist()
    assert summary["content"]["prm"] == summary["prm"] == "by-length"
    assert {row["origin"] for row in rows} == {"root", "expansion"}, "no rollout is made"
    new = [row for row in rows if row["visits"] == 1 and row["depth"] and not row["stop_reason"]]
    assert new and all(row["value"] == pytest.approx(min(len(row["text"]) / 100, 1.0)) for row in new)
    by_model, by_answers = (
        list(derive_pairs(rows, PairRules(reward=reward, rule="siblings"), policy="p", config_hash="h"))
        for reward in ("prm", "spre")
    )
    assert len(by_model) > len(by_answers) and {pair["confidence"] for pair in by_model} == {None}


@pytest.mark.parametrize(
    "settings",
    [
        {"value.kind": "prm"},
        {"choice.candidates": 2},
        {"choice.best_of": 2},
        {"choice.prm": "folder"},
        {"choice.prm": "folder", "choice.best_of": 2, "policy.temperature": 0.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match=r"--"):
        load_config(overrides=settings)


def test_a_folder_without_such_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="prm train"):
        open_scorer(str(tmp_path))


def test_what_a_step_adds_to_the_value_is_its_advantage_at_its_own_tokens():
    reward = open_reward(RewardSettings(name="prm"), RewardParts(FORMAT, scorer=ByLength()))
    good, poor = attempt("x" * 20, "x" * 80), attempt("x" * 40, "x" * 50)
    scores = asyncio.run(reward.score([good, poor], step=0))
    assert [score.steps for score in scores] == [pytest.approx((0.1, 0.3)), pytest.approx((0.2, 0.05))]
    rows = [Transcript((9,), (1, 7, 2), (1, 0, 1), None, False, 2), Transcript((9,), (1, 2), (1, 1), None, False, 2)]
    samples = [Sample(QUESTION, n, (good, poor)[n], (rows[n],), scores[n]) for n in range(2)]
    found = training_rows([Group(QUESTION, tuple(samples))], mask_truncated=True)
    assert found[0].extra == pytest.approx((-0.05, 0.0, 0.125)) and found[1].extra == pytest.approx((0.05, -0.125))
    failed = open_reward(RewardSettings(name="prm"), RewardParts(FORMAT, scorer=Broken()))
    (score,) = asyncio.run(failed.score([good], step=0))
    assert score.value is None and score.cause == "not_finite"


def test_cut_off_without_a_word_has_no_reward():
    reward = open_reward(RewardSettings(name="prm"), RewardParts(FORMAT, scorer=ByLength()))
    cut = Step(Prompt(()), Completion("", FinishReason.LENGTH), Answer(""))
    whole = Trajectory(QUESTION, (cut, *attempt("x").steps), StopReason.ANSWERED)
    (score,) = asyncio.run(reward.score([whole], step=0))
    assert score.steps == (None, pytest.approx(0.005))
