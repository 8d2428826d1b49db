import random
from itertools import pairwise

import pytest

from reasonrag.core.text import exact_match
from reasonrag.core.types import StopReason
from reasonrag.demo.judge import demo_format
from reasonrag.demo.world import KINDS, Part, demo_questions, make_world, names
from reasonrag.llm.chat_template import ChatTemplate
from tools.demo_policy.curriculum import StreamCurriculum, stream_vocabulary_texts
from tools.demo_policy.demonstrations import FAULTLESS, NO_WHIMS, STREAM_HABITS, Improviser
from tools.demo_policy.tokens import ASSISTANT, END, STREAM, make_tokenizer
from tools.demo_policy.writing import STREAM_FORMATS, STREAM_STEPS, demonstrate

WORLD = make_world(0)
PARTS = (WORLD.parts["dev"], WORLD.famous)
PAGES = Part({k: v for p in PARTS for k, v in p.kinds.items()}, {k: v for p in PARTS for k, v in p.facts.items()})
DEV = demo_questions("dev")

every_format = pytest.mark.parametrize("name", STREAM_FORMATS)


def demonstrations(name, *, limit=100, max_steps=STREAM_STEPS):
    rng = random.Random(0)
    return [demonstrate(Improviser(q, PAGES, rng, STREAM_HABITS), name, max_steps=max_steps) for q in DEV[:limit]]


def faultless(name, *, limit=100):
    rng = random.Random(0)
    return [demonstrate(Improviser(q, PAGES, rng, FAULTLESS, whims=NO_WHIMS), name) for q in DEV[:limit]]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(stream_vocabulary_texts(), STREAM)


@every_format
def test_nearly_every_demonstration_is_well_formed(name):
    reasons = [demo_format(name).read(done).reason for done in demonstrations(name, limit=300)]
    assert reasons.count("") / len(reasons) >= 0.98


@every_format
def test_a_demonstration_without_faults_searches_what_is_needed_and_is_right(name):
    for done in faultless(name):
        reading = demo_format(name).read(done)
        assert reading.well_formed
        assert reading.queries == tuple(hop["query"] for hop in done.question.metadata["path"])
        assert exact_match(reading.answer, done.question.golden_answers) == 1.0


@every_format
def test_no_demonstration_goes_past_the_limit_and_what_reaches_it_is_asked_for_its_answer(name):
    forced = 0
    for done in demonstrations(name, max_steps=2):
        final = done.steps[-1].prompt.stop == ("</answer>",)
        assert final is (done.stop_reason is StopReason.FORCED_ANSWER)
        assert demo_format(name).must_answer(done.steps[:-1], 2) is final
        assert not any(demo_format(name).must_answer(done.steps[:n], 2) for n in range(len(done.steps) - 1))
        forced += final
    assert forced > 20


@every_format
def test_a_turn_cut_into_spans_has_the_tokens_of_the_whole(name, tokenizer):
    chat = ChatTemplate(tokenizer)
    for done in demonstrations(name, limit=30):
        prompt = done.steps[-1].prompt
        assert chat.token_ids(prompt) == chat.encode(chat.text(prompt))


def test_a_row_of_these_formats_is_the_chat_with_the_whole_turn(tokenizer):
    chat = ChatTemplate(tokenizer)
    rows = StreamCurriculum(tokenizer, random.Random(1)).chunk(questions=20)
    opening, end = tokenizer.convert_tokens_to_ids([ASSISTANT, END])
    turns = [row for row in rows if opening in row.ids]
    assert len(turns) == 20 + 8 + 40 + 60
    for row in turns:
        assert len(row.ids) == len(row.weights)
        assert (row.ids[-1], row.weights[-1]) == (end, 1.0)
        place = row.ids.index(opening)
        assert list(chat.encode(tokenizer.decode(row.ids[:-1]))) == row.ids[:-1]
        assert max(row.weights[: place + 1]) < 1.0 in row.weights[place + 1 :]


def test_training_in_these_formats_never_sees_a_name_of_another_split(tokenizer):
    held_out = {tuple(name.split()) for kind in KINDS for split in ("dev", "test") for name in names(kind, split)}
    for row in StreamCurriculum(tokenizer, random.Random(2)).chunk():
        assert not held_out & set(pairwise(tokenizer.convert_ids_to_tokens(row.ids)))
