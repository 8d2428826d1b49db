from __future__ import annotations

import json
import shutil

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError, LLMError, RunError
from reasonrag.core.types import WHOLE, Question, Shard
from reasonrag.formats import ReasonRAGFormat
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import Parts
from reasonrag.storage.questions import cut
from tests.e2e.product import pair_rows, tree_rows
from tests.fakes.scripted import ScriptedLLM
from tests.mcts.test_search import random_policy
from tests.toys import ToyRetriever

# Each text twice, in two data sets: their equal pairs are duplicates wherever the questions lie.
QUESTIONS = [
    Question(str(i), f"Who directed film {i}?", ("Steven Spielberg",), dataset=name) for name in "ab" for i in range(6)
]


def build(out, shard=WHOLE, policy=random_policy, model=ScriptedLLM, **overrides):
    config = load_config(overrides={"search.iterations": 6, "run.max_failed": 1.0, **overrides})
    parts = Parts(list(QUESTIONS), ToyRetriever(), ReasonRAGFormat(), model(policy), None, {"policy": "scripted"})
    return build_trees(config, out, parts=parts, shard=shard)


def counts(summary):
    """What does not depend on the number of shards; means are equal up to the order of their sum."""
    trees = summary["trees"] | {name: round(summary["trees"][name], 12) for name in ("mean_f1", "mean_em")}
    left = {name: value for name, value in summary.items() if name not in ("seconds", "calls", "shards")}
    return left | {"trees": trees, "policy calls": summary["calls"]["policy"]}


@pytest.mark.parametrize("of", [3])
def test_shards_in_any_order_are_one_run(tmp_path, of):
    whole = build(tmp_path / "whole")
    finished = [build(tmp_path / "run", Shard(number, of)) for number in reversed(range(of))]
    assert ["shards" in summary for summary in finished] == [False] * (of - 1) + [True]
    assert tree_rows(tmp_path / "run") == tree_rows(tmp_path / "whole")
    assert pair_rows(tmp_path / "run") == pair_rows(tmp_path / "whole") != []
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert counts(run) == counts(whole)


def test_equal_questions_share_a_shard_and_no_shard_changes_the_order():
    (whole,) = cut(QUESTIONS, 1)
    for of in range(1, 14):
        shards = cut(QUESTIONS, of)
        assert [q for shard in shards for q in shard] == whole
        homes = {q.question: number for number, shard in enumerate(shards) for q in shard}
        assert all(homes[q.question] == number for number, shard in enumerate(shards) for q in shard)
    assert [(q.dataset, q.id) for q in whole][:4] == [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")]


def test_a_shard_that_runs_again_is_put_in_its_place(tmp_path):
    def flaky(prompt, sampling):
        if "film 3?" in prompt.messages[1].content:
            raise LLMError("gone", cause="unreachable")
        return random_policy(prompt, sampling)

    for number in range(3):
        summary = build(tmp_path / "run", Shard(number, 3), flaky)
    assert summary["questions"] == {"total": 12, "finished": 10, "failed": {"unreachable": 2}}
    home = next(n for n in range(3) if QUESTIONS[3] in cut(QUESTIONS, 3)[n])
    summary = build(tmp_path / "run", Shard(home, 3))
    assert summary["questions"] == {"total": 12, "finished": 12, "failed": {}}
    build(tmp_path / "whole")
    assert tree_rows(tmp_path / "run") == tree_rows(tmp_path / "whole")
    assert not list((tmp_path / "run").glob("*/.*"))


def test_shards_that_were_built_on_other_disks_are_copied_and_put_together(tmp_path):
    for number in range(3):
        shard = Shard(number, 3)
        build(tmp_path / "disk" / str(number), shard)
        shutil.copytree(shard.folder(tmp_path / "disk" / str(number)), shard.folder(tmp_path / "run"))
    for number in range(3):
        summary = build(tmp_path / "run", Shard(number, 3), policy=[])  # which has nothing to say
    assert summary["shards"] == 3 and summary["questions"]["finished"] == 12
    build(tmp_path / "whole")
    assert tree_rows(tmp_path / "run") == tree_rows(tmp_path / "whole")


def test_shards_of_other_runs_are_refused(tmp_path):
    build(tmp_path / "run", Shard(0, 3))
    with pytest.raises(RunError, match="built in 3 shards, not in 4 shards"):
        build(tmp_path / "run", Shard(0, 4))
    assert not (tmp_path / "run/shards/0-of-4").exists()
    with pytest.raises(RunError, match="built in 3 shards, not in one piece"):
        build(tmp_path / "run")
    with pytest.raises(RunError, match=r"search\.iterations: 6 there, 7 now"):
        build(tmp_path / "run", Shard(1, 3), **{"search.iterations": 7})
    build(tmp_path / "whole")
    with pytest.raises(RunError, match="built in one piece, not in 3 shards"):
        build(tmp_path / "whole", Shard(0, 3))


class Restarting(ScriptedLLM):
    async def check(self):
        raise LLMError("no server answers", cause="unreachable")


def test_a_server_that_does_not_answer_stops_the_first_shard_and_no_other(tmp_path):
    with pytest.raises(LLMError, match="no server answers"):
        build(tmp_path / "run", Shard(0, 3), model=Restarting)
    build(tmp_path / "run", Shard(0, 3))
    assert "shards" in [build(tmp_path / "run", Shard(number, 3), model=Restarting) for number in (1, 2)][-1]


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0", "1/"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ConfigError, match="is not I/S"):
        Shard.parse(text)
