import asyncio
import hashlib
import json

import pytest

from reasonrag.core.models import demo_folder
from reasonrag.core.text import exact_match
from reasonrag.core.types import Answer
from reasonrag.demo.judge import demo_format
from reasonrag.demo.world import demo_questions
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM
from tools.demo_policy.measure import measure
from tools.demo_policy.train import Recipe, train_policy

SMOKE = Recipe(steps=3, dev_questions=5)


def checksum(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_shipped_policy_is_the_one_that_its_training_report_describes():
    report = json.loads((demo_folder() / "training.json").read_text())
    assert report["sha256"] == checksum(demo_folder())
    assert report["seed"] == 0
    assert (demo_folder() / "model.safetensors").stat().st_size < 10_000_000


def test_the_shipped_folder_holds_no_code_and_no_pickle():
    assert {path.suffix for path in demo_folder().iterdir()} <= {".json", ".jinja", ".safetensors", ".yaml"}


@pytest.mark.slow
@pytest.mark.parametrize("world_seed", [0, 7])
def test_the_shipped_policy_answers_about_half_of_the_held_out_questions(world_seed):
    llm = TransformersLLM(str(demo_folder()), batch_size=64)
    questions = demo_questions("test", seed=world_seed, limit=100)
    figures = measure(llm, questions, temperature=0.0, world_seed=world_seed)
    assert 0.35 <= figures["all"]["em"] <= 0.65
    assert figures["all"]["malformed"] < 0.03
    assert figures["one_hop"]["searches"] > 1.2


@pytest.mark.slow
def test_the_shipped_policy_knows_famous_facts_by_heart_and_no_others():
    llm = TransformersLLM(str(demo_folder()), batch_size=64)

    async def answered_from_memory(question):
        prompt = demo_format().prompt(question, (), final=True)
        (completion,) = await llm.complete(prompt, Sampling(temperature=0.0, max_tokens=16))
        action = demo_format().parse(completion.text, (), final=True)
        return exact_match(action.answer, question.golden_answers) if isinstance(action, Answer) else 0.0

    async def share(*, known):
        asked = [q for q in demo_questions("test", limit=600) if q.metadata["kind"] == "one_hop"]
        asked = [q for q in asked if q.metadata["known"] is known]
        return sum(await asyncio.gather(*map(answered_from_memory, asked))) / len(asked)

    assert asyncio.run(share(known=True)) > 0.9
    assert asyncio.run(share(known=False)) < 0.2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A policy of three steps: its folder, the report, the lines. Read only."""
    out = tmp_path_factory.mktemp("trained") / "policy"
    lines = []
    return out, train_policy(out, seed=3, recipe=SMOKE, log=lines.append), lines


@pytest.mark.slow
def test_training_writes_a_policy_that_loads_and_a_report_of_it(trained):
    out, report, lines = trained
    assert report == json.loads((out / "training.json").read_text())
    assert report["sha256"] == checksum(out)
    assert report["dev"]["temperature 0"]["all"]["n"] == 5
    assert lines
    llm = TransformersLLM(str(out))
    assert measure(llm, demo_questions("dev", limit=2), temperature=1.0)["all"]["n"] == 2


@pytest.mark.slow
def test_training_twice_with_one_seed_gives_the_same_file(trained, tmp_path):
    again, other = (
        train_policy(tmp_path / str(seed), seed=seed, recipe=SMOKE, log=lambda _: None)["sha256"] for seed in (3, 2)
    )
    assert trained[1]["sha256"] == again != other
