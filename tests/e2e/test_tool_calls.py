"""Native tool calls from end to end: trees, DPO and GRPO of a policy of the demo world that calls functions."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from reasonrag.core.config import load_config
from reasonrag.core.types import Trajectory
from reasonrag.formats.tool_calls import PARSERS
from reasonrag.pipeline.build import build_trees
from reasonrag.pipeline.parts import open_engine, open_parts
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.llm.tool_policy import save_tool_policy
from tests.online_rl.toys import farthest, logged, quietly, rollouts, settings, weights
from tests.training.toys import dpo_settings, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]

DEMO = {"questions.dataset": "demo", "questions.split": "train", "questions.limit": 6, "policy.device": "cpu"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tool_policy(tmp_path_factory.mktemp("policies") / "tools")


def attempts(spec, **overrides):
    """Attempts at some questions, and the name of the format."""
    named = {"retrieval.top_k": 1, "policy.max_tokens": 48, "policy.spec": spec}
    config = load_config(overrides=DEMO | named | overrides)
    parts = open_parts(config)
    engine = open_engine(config, parts.policy, parts.retriever, parts.format)
    begun = [Trajectory(question) for question in parts.questions]

    async def run():
        async with aclosing(parts):
            return await engine.run(begun, seeds=range(len(begun)))

    return asyncio.run(run()), parts.format


def test_the_same_weights_do_the_same_whether_they_write_tags_or_call_functions(policy):
    """The chat template puts every token where the policy has learnt to see it."""
    calling, format = attempts(f"hf:{policy}")
    writing, _ = attempts("demo:search_r1")
    assert (format.name, format.parser) == ("tool_calls", PARSERS["hermes"])
    for called, wrote in zip(calling, writing, strict=True):
        assert [step.action for step in called.steps] == [step.action for step in wrote.steps]
        assert [s.completion.token_ids for s in called.steps] == [s.completion.token_ids for s in wrote.steps]
        assert called.steps[-1].completion.prompt_token_ids == wrote.steps[-1].completion.prompt_token_ids
        reading = format.read(called)
        assert reading.well_formed and all(block.conclusion for block in reading.blocks)
    assert sum(len(called.steps) > 1 for called in calling) == len(calling)


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tools"
    named = {"policy.spec": f"hf:{policy}", "policy.temperature": 1.5, "search.iterations": 8, "pairs.test_share": 0.2}
    summary = build_trees(load_config(overrides=DEMO | named), out)
    return out, summary


def test_two_steps_of_dpo_learn_from_the_messages_as_they_were_sampled(run, policy, tmp_path):
    out, summary = run
    nodes = list(read_shards(out / "trees", "nodes", tree_schema()))
    roles = {message["role"] for node in nodes for message in node["prompt"]}
    assert roles == {"system", "tools", "user", "assistant", "call", "tool"}
    assert summary["trees"]["by_action"]["query"] > 6 and summary["trees"]["mean_f1"] > 0.2
    pairs = list(read_shards(out / "pairs", "train", pair_schema()))
    assert all(pair["chosen_token_ids"] and pair["chosen_end"] == "turn" for pair in pairs)
    trained = train(dpo_settings(out, policy, max_steps=2), tmp_path / "dpo", log=lambda line: None)
    encoded = trained["data"]["token_ids"]
    assert encoded["steps"] > 0 and not encoded["without_ids"] and not encoded["of_another_tokenizer"]
    assert trained["steps"] == 2 and farthest(weights(tmp_path / "dpo"), weights(policy)) > 1e-5
    (step, *_), format = attempts(f"hf:{tmp_path / 'dpo'}")
    assert format.name == "tool_calls" and step.stop_reason, "the folder says how the policy is asked"


def test_two_steps_of_grpo_have_a_row_for_every_message(policy, tmp_path):
    named = {"model": str(policy), "format__name": "tool_calls", "format__max_steps": 5, "format__prompts": "brief"}
    wanted = settings(**named, rollout__temperature=1.5, rollout__max_tokens=48, learning_rate=1e-3)
    history = quietly(wanted, tmp_path / "rl")["history"]
    assert len(logged(history, "loss")) == 2
    assert farthest(weights(tmp_path / "rl"), weights(policy)) > 1e-5
    rows = [row for step in (1, 2) for row in rollouts(tmp_path / "rl", step)]
    assert len({row["reward"] for row in rows}) > 1
    assert max(len(row["row_advantages"]) for row in rows) > 2, "as many as messages"
    assert any("<tool_call>" in json.dumps(row, default=str) for row in rows)
