"""The shipped policy, an HTTP server, SIGKILL."""

from __future__ import annotations

import json

import pytest

from reasonrag.commands.evaluate import judging, policy_configs
from reasonrag.core.config import load_config
from reasonrag.evaluation.run import Evaluation
from tests import warmed
from tests.e2e import product
from tests.e2e.product import ExtractiveServer
from tests.evaluation.test_run import digests
from tests.evaluation.toy_policies import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]

DEMO = {"questions.dataset": "demo", "questions.split": "test", "questions.limit": 20}

SCRIPT = """
import json, sys
from pathlib import Path
from reasonrag.core.config import load_config
from reasonrag.evaluation.run import Evaluation
Evaluation({"served": load_config(overrides=json.loads(sys.argv[1]))}, Path(sys.argv[2]), max_steps=[8, 4]).run()
"""


def test_the_shipped_policy_twice_in_a_folder_calls_once_and_writes_the_same(tmp_path):
    configs = {
        "demo": load_config(preset="demo", overrides=DEMO),
        "extractive": load_config(overrides={**DEMO, "policy.spec": "extractive"}),
    }
    figures = evaluate(configs, tmp_path / "out", temperatures=[0.0])
    before = digests(tmp_path / "out")
    again = Evaluation(configs, tmp_path / "out", temperatures=[0.0])
    again.run()
    assert (again.progress.usage.calls, again.progress.done) == (0, 40)
    assert evaluate(configs, tmp_path / "out", temperatures=[0.0]) == figures
    assert digests(tmp_path / "out") == before
    assert figures["setting"] == "t0_s8_k1"
    assert figures["em"]["low"] >= 0.25
    assert figures["prompt_tokens"]["mean"] > 50
    (em,) = (row for row in figures["differences"] if row["metric"] == "em")
    assert (em["policy"], em["baseline"], em["n"]) == ("extractive", "demo", 20)
    assert em["high"] < 0


def test_the_policy_of_another_format_is_judged_and_compared_with_the_shipped_one(tmp_path):
    asked = {"preset": "demo", "file": None, "overrides": {"questions.limit": 20}}
    configs = policy_configs(("hiprag=demo:hiprag", "demo"), asked)
    judge = judging("demo-judge", None, None, configs)
    figures = evaluate(configs, tmp_path / "out", temperatures=[0.0], judging=judge)
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
    again = Evaluation(configs, tmp_path / "out", temperatures=[0.0], judging=judge)
    again.run()
    assert again.progress.usage.calls == 0


def test_killed_in_the_middle_it_ends_with_the_same_files(tmp_path):
    overrides = {**DEMO, "policy.concurrency": 4}
    with ExtractiveServer(latency_s=0.02) as server:
        overrides |= {"policy.spec": server.base_url, "policy.model": "extractor"}
        whole = evaluate({"served": load_config(overrides=overrides)}, tmp_path / "whole", max_steps=[8, 4])
        calls = len(server.requests)
        assert calls == whole["calls"]["served"]["policy"]["calls"] > 60
        arguments = (SCRIPT, json.dumps(overrides), str(tmp_path / "out"))
        child = warmed.Child(warmed.source, arguments, product.environment())
        product.wait_until(lambda: len(server.requests) >= calls + calls // 2 or child.poll() is not None)
        child.kill()
        assert child.wait(60) == -9, child.said()
        product.wait_until(lambda: server.in_flight == 0)
        paid = len(server.requests) - calls
        evaluate({"served": load_config(overrides=overrides)}, tmp_path / "out", max_steps=[8, 4])
        again = len(server.requests) - calls - paid
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert calls <= paid + again <= calls + 4  # what was in flight is paid for twice
    assert 0 < again < calls


def test_a_server_that_is_not_there_is_one_clear_error_and_pays_for_nothing(tmp_path):
    from reasonrag.core.errors import ReasonRAGError

    config = load_config(overrides={**DEMO, "policy.spec": "http://127.0.0.1:9/v1", "policy.model": "x"})
    with pytest.raises(ReasonRAGError):
        evaluate({"gone": config}, tmp_path / "out")
    assert not (tmp_path / "out/metrics.json").exists()
