"""The shipped policy, another format's, and a server that is not there."""

from __future__ import annotations

import pytest

from reasonrag.commands.evaluate import policy_configs
from reasonrag.core.config import load_config
from reasonrag.evaluation.metrics import JUDGED
from reasonrag.evaluation.run import Evaluation
from tests.evaluation.test_run import digests
from tests.evaluation.toy_policies import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]

DEMO = {"questions.dataset": "demo", "questions.split": "test", "questions.limit": 20}


def test_the_shipped_policy_twice_in_a_folder_calls_once_and_writes_the_same(tmp_path):
    configs = {
        "demo": load_config(preset="demo", overrides=DEMO),
        "extractive": load_config(overrides={**DEMO, "policy.spec": "extractive"}),
    }
    figures = evaluate(configs, tmp_path / "out", temperatures=[0.0])
    before = digests(tmp_path / "out")
    again = Evaluation(configs, tmp_path / "out", temperatures=[0.0])
    again.run()
    assert (again.progress.calls, again.progress.done) == (0, 40)
    assert evaluate(configs, tmp_path / "out", temperatures=[0.0]) == figures
    assert digests(tmp_path / "out") == before
    assert figures["setting"] == "t0_s8_k1"
    assert figures["em"]["low"] >= 0.25
    assert figures["prompt_tokens"]["mean"] > 50
    (em,) = (row for row in figures["differences"] if row["metric"] == "em")
    assert (em["policy"], em["baseline"], em["n"]) == ("extractive", "demo", 20)
    assert em["high"] < 0


def test_the_policy_of_another_format_is_judged_and_compared_with_the_shipped_one(tmp_path):
    asked = {"preset": "demo", "file": None, "overrides": {"questions.limit": 20, "judge.spec": "demo-judge"}}
    configs = policy_configs(("hiprag=demo:hiprag", "demo"), asked)
    figures = evaluate(configs, tmp_path / "out", temperatures=[0.0], judged=JUDGED)
    assert [configs[name].format.name for name in configs] == ["hiprag", "reasonrag"]
    assert figures["lasj"] == figures["em"], "the exact judge goes by exact match"
    assert figures["format_rate"]["mean"] >= 0.9
    osr, searches = figures["osr"], figures["judged"]["osr"]
    assert 0 <= osr["low"] <= osr["mean"] <= osr["high"] <= 1
    assert searches["known"] + searches["unknown"] == round(20 * figures["retrievals"]["mean"])
    # What everybody knows may be searched for in vain; what nobody knows may not.
    assert figures["by_kind"]["bridge"]["osr"]["mean"] < 0.5
    told = {row["metric"]: row for row in figures["differences"]}
    assert told["em"]["n"] == told["lasj"]["n"] == 20 and told["osr"]["n"] > 10
    again = Evaluation(configs, tmp_path / "out", temperatures=[0.0], judged=JUDGED)
    again.run()
    assert again.progress.calls == 0
