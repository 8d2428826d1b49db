import hashlib
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from reasonrag.core.text import exact_match
from reasonrag.demo.judge import demo_format
from reasonrag.demo.world import KINDS, Part, demo_questions, make_world, names
from reasonrag.formats.base import last_tag
from tools.demo_policy.curriculum import Curriculum, vocabulary_texts
from tools.demo_policy.demonstrations import FAULTLESS, MAX_STEPS, Demonstrator, Habits
from tools.demo_policy.tokens import make_tokenizer


def pages(world):
    parts = (world.parts["test"], world.famous)
    return Part({k: v for p in parts for k, v in p.kinds.items()}, {k: v for p in parts for k, v in p.facts.items()})


def attempts(habits, *, limit=300):
    world, rng = pages(make_world(0)), Random(0)
    for question in demo_questions("test", limit=limit):
        yield question, list(Demonstrator(question, world, rng, habits).examples())


def answer_of(examples):
    return last_tag(examples[-1][1], ["answer"])[1]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(vocabulary_texts())


def test_without_faults_every_question_is_answered_with_exactly_the_searches_it_needs():
    for question, examples in attempts(FAULTLESS):
        assert exact_match(answer_of(examples), question.golden_answers) == 1.0
        assert len(examples) == 2 * question.metadata["hops"] + 1


def test_no_attempt_is_longer_than_the_step_limit_and_the_last_step_is_asked_to_answer():
    lengths = Counter()
    for _, examples in attempts(Habits(), limit=1200):
        lengths[len(examples)] += 1
        if len(examples) == MAX_STEPS:
            assert examples[-1][0].stop == ("</answer>",)
    assert max(lengths) == MAX_STEPS


def test_tokens_of_a_prompt_are_a_prefix_of_those_with_its_completion(tokenizer):
    for _, examples in attempts(Habits(), limit=100):
        for prompt, text in examples:
            chat = [{"role": m.role, "content": m.content} for m in prompt.messages]
            before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": text}], return_dict=False)
            assert whole[: len(before)] == before
            assert whole[len(before) :] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_stop_strings_of_the_format_end_a_generation_in_transformers(tokenizer):
    import torch
    from transformers.generation.stopping_criteria import StopStringCriteria

    question, examples = next(attempts(FAULTLESS, limit=1))
    prompt = demo_format().prompt(question, ())
    stop = StopStringCriteria(tokenizer, list(prompt.stop))
    ids = tokenizer(examples[0][1])["input_ids"]
    assert stop(torch.tensor([ids]), None).item()
    assert not stop(torch.tensor([ids[:-1]]), None).item()


def test_what_the_shipped_policy_was_trained_on_has_not_changed(tokenizer):
    rows = Curriculum(tokenizer, Random("demo policy 0")).chunk()
    written = repr([(row.ids, row.weights) for row in rows])
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == "84634d9995788a0c"


def test_training_never_sees_a_name_of_another_split(tokenizer):
    held_out = {tuple(name.split()) for kind in KINDS for split in ("dev", "test") for name in names(kind, split)}
    curriculum = Curriculum(tokenizer, Random(2))
    for row in curriculum.chunk() + curriculum.chunk():
        tokens = tokenizer.convert_ids_to_tokens(row.ids)
        assert not held_out & set(pairwise(tokens))
