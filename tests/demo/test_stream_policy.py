import asyncio
import hashlib
import json
import random

import pytest

from reasonrag.core.config import ModelConfig, carried_settings, load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress, demo_folder
from reasonrag.demo.world import demo_questions, famous_facts, famous_part
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM
from reasonrag.pipeline.parts import check_llm, open_llm
from reasonrag.training.model import model_path
from tools.demo_policy.measure import measure_stream
from tools.demo_policy.train import Recipe, train_stream_policy
from tools.demo_policy.writing import STREAM_FORMATS, STREAM_STEPS, STREAM_TOKENS, direct_prompt

SMOKE = Recipe(steps=3, tokens=600, dev_questions=3)


def checksum(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_policy_of_the_growing_formats_is_the_one_that_its_training_report_describes():
    report = json.loads((demo_folder("hiprag") / "training.json").read_text())
    assert report["sha256"] == checksum(demo_folder("hiprag"))
    assert report["seed"] == 0
    assert (demo_folder("hiprag") / "model.safetensors").stat().st_size < 5_500_000


def test_the_folder_of_the_growing_formats_holds_no_code_and_no_pickle():
    assert {path.suffix for path in demo_folder("hiprag").iterdir()} <= {".json", ".jinja", ".safetensors", ".yaml"}


@pytest.mark.parametrize("name", STREAM_FORMATS)
def test_naming_a_format_brings_it_with_all_that_the_policy_was_trained_with(name):
    config = load_config(overrides={"policy.spec": f"demo:{name}"})
    assert (config.format.name, config.format.prompts, config.format.max_steps) == (name, "brief", STREAM_STEPS)
    assert (config.retrieval.top_k, config.policy.max_tokens) == (1, STREAM_TOKENS)
    assert load_config(overrides={"policy.spec": f"demo:{name}", "format.max_steps": 4}).format.max_steps == 4


def test_a_model_to_train_is_named_in_the_same_way():
    assert model_path("demo:hiprag") == str(demo_folder("hiprag"))
    assert model_path("demo") == model_path("demo:reasonrag") == str(demo_folder())
    assert carried_settings(ModelAddress("demo"))["format"] == {"name": "reasonrag", "prompts": "brief"}


@pytest.mark.parametrize(
    "ask",
    [
        lambda spec: carried_settings(ModelAddress.parse(spec)),
        model_path,
        lambda spec: check_llm(ModelConfig(spec=spec), "policy"),
    ],
)
def test_a_format_that_no_demo_policy_speaks_is_refused_in_one_line(ask):
    with pytest.raises(ConfigError, match=r"'r1'.*demo:search_r1") as refused:
        ask("demo:r1")
    assert "\n" not in str(refused.value)


def test_a_demo_policy_cannot_judge_whatever_its_format():
    with pytest.raises(ConfigError, match="cannot judge"):
        check_llm(ModelConfig(spec="demo:hiprag"), "judge")


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAM_FORMATS)
def test_the_shipped_policy_answers_about_half_of_the_questions_in_every_format(name):
    llm = open_llm(ModelConfig(spec=f"demo:{name}", batch_size=64), "policy")
    figures = measure_stream(llm, demo_questions("test", limit=40), format=name, temperature=0.0)
    assert 0.35 <= figures["all"]["em"] <= 0.8
    assert figures["all"]["well_formed"] >= 0.95
    assert figures["one_hop"]["searches"] > 1.2
    assert figures["known"]["without_search"] <= 0.5


@pytest.mark.slow
def test_the_shipped_policy_says_famous_facts_when_it_is_given_a_query_alone():
    llm = TransformersLLM(str(demo_folder("hiprag")), batch_size=64)
    facts = random.Random(0).sample(famous_facts(), 60)

    async def said(query):
        (completion,) = await llm.complete(direct_prompt(query), Sampling(temperature=0.0, max_tokens=16))
        return completion.text.strip()

    async def said_rightly():
        hops = [famous_part().hop(name, relation.key) for name, relation in facts]
        return [await said(hop.query) == hop.evidence for hop in hops]

    assert sum(asyncio.run(said_rightly())) / len(facts) > 0.9


@pytest.mark.slow
def test_training_in_the_growing_formats_twice_gives_the_same_file_and_a_report_of_each(tmp_path):
    reports = [train_stream_policy(tmp_path / name, seed=1, recipe=SMOKE, log=lambda _: None) for name in "ab"]
    assert reports[0] == reports[1] == json.loads((tmp_path / "a" / "training.json").read_text())
    assert reports[0]["sha256"] == checksum(tmp_path / "a")
    assert set(reports[0]["dev"]) == set(STREAM_FORMATS)
    assert carried_settings(ModelAddress("hf", str(tmp_path / "a")))["format"] == {
        "prompts": "brief",
        "max_steps": STREAM_STEPS,
    }
