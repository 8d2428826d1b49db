"""The shipped policies, and the script that trained them."""

import asyncio
import hashlib
import json
import random

import pytest

from reasonrag.core.config import ModelConfig, carried_settings, load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import ModelAddress, demo_folder
from reasonrag.core.text import exact_match
from reasonrag.core.types import Answer
from reasonrag.demo.judge import demo_format
from reasonrag.demo.world import demo_questions, famous_facts, famous_part
from reasonrag.llm.base import Sampling
from reasonrag.pipeline.parts import check_llm
from reasonrag.training.model import model_path
from tests.evaluation.toy_policies import evaluate
from tests.llm.tiny import loaded
from tools.demo_policy.train import Recipe, train_policy, train_stream_policy
from tools.demo_policy.writing import STREAM_FORMATS, STREAM_STEPS, STREAM_TOKENS, direct_prompt

SMOKE = Recipe(steps=2, tokens=600)


def checksum(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("name", "most_bytes"), [("reasonrag", 10_000_000), ("hiprag", 5_500_000)])
def test_a_shipped_policy_is_the_one_that_its_report_describes_without_code_or_pickle(name, most_bytes):
    folder = demo_folder(name)
    report = json.loads((folder / "training.json").read_text())
    assert (report["sha256"], report["seed"]) == (checksum(folder), 0)
    assert (folder / "model.safetensors").stat().st_size < most_bytes
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".jinja", ".safetensors", ".yaml"}


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
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["reasonrag", *STREAM_FORMATS])
def test_the_shipped_policies_answer_about_half_of_the_questions_in_every_format(name, tmp_path):
    asked = {"policy.spec": f"demo:{name}", "questions.dataset": "demo", "questions.split": "test"}
    config = load_config(preset="demo", overrides=asked | {"questions.limit": 40, "policy.batch_size": 64})
    figures = evaluate({name: config}, tmp_path, temperatures=[0.0])
    assert 0.35 <= figures["em"]["mean"] <= 0.8
    assert figures["format_rate"]["mean"] >= 0.95
    assert figures["by_kind"]["one_hop"]["retrievals"]["mean"] > 1.2


def greedy(llm, prompts):
    """The first completion of each prompt at temperature 0."""
    sampling = Sampling(temperature=0.0, max_tokens=16)

    async def complete():
        return await asyncio.gather(*(llm.complete(prompt, sampling) for prompt in prompts))

    return [completion.text for completion in asyncio.run(complete())]


@pytest.mark.slow
def test_the_shipped_policies_know_famous_facts_by_heart_and_no_others():
    llm = loaded(demo_folder(), batch_size=64)
    shares = []
    for known in (True, False):
        questions = [q for q in demo_questions("test", limit=600) if q.metadata["kind"] == "one_hop"]
        questions = [q for q in questions if q.metadata["known"] is known]
        texts = greedy(llm, [demo_format().prompt(question, (), final=True) for question in questions])
        actions = [demo_format().parse(text, (), final=True) for text in texts]
        answers = [action.answer if isinstance(action, Answer) else None for action in actions]
        right = [exact_match(answer, q.golden_answers) for answer, q in zip(answers, questions, strict=True)]
        shares.append(sum(right) / len(right))
    assert shares[0] > 0.9 and shares[1] < 0.2
    hops = [famous_part().hop(name, relation.key) for name, relation in random.Random(0).sample(famous_facts(), 60)]
    texts = greedy(loaded(demo_folder("hiprag"), batch_size=64), [direct_prompt(h.query) for h in hops])
    assert sum(text.strip() == hop.evidence for text, hop in zip(texts, hops, strict=True)) / len(hops) > 0.9


@pytest.mark.slow
def test_training_twice_with_one_seed_gives_the_same_policy(tmp_path):
    first, again = (train_policy(tmp_path / name, seed=3, recipe=SMOKE, log=lambda _: None) for name in "ab")
    assert first["sha256"] == again["sha256"] == checksum(tmp_path / "a")
    assert first == json.loads((tmp_path / "a/training.json").read_text())


@pytest.mark.slow
def test_training_in_the_growing_formats_starts_from_the_shipped_policy(tmp_path):
    report = train_stream_policy(tmp_path, seed=1, recipe=SMOKE, log=lambda _: None)
    assert report["sha256"] == checksum(tmp_path)
    carried = carried_settings(ModelAddress("hf", str(tmp_path)))["format"]
    assert carried == {"prompts": "brief", "max_steps": STREAM_STEPS}
