"""Trajectories of the real engine as tokens: nothing that was sampled is encoded again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from reasonrag.core.errors import LLMError
from reasonrag.core.models import demo_folder
from reasonrag.core.types import Completion, FinishReason, Search, StopReason, Trajectory
from reasonrag.demo.world import demo_corpus, demo_questions
from reasonrag.formats import FORMATS, PromptSet
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.online_rl.rows import Transcript, transcripts
from reasonrag.retrieval.bm25 import BM25Retriever
from reasonrag.rollout import Engine
from tests.fakes.scripted import ScriptedLLM
from tests.llm.tiny import TEMPLATE, loaded
from tests.toys import QUESTION, ToyRetriever

STREAMS = ("search_r1", "hiprag")


@pytest.fixture(scope="module")
def demo_policy():
    llm = loaded(demo_folder("hiprag"), batch_size=16, device="cpu")
    yield llm
    asyncio.run(llm.aclose())


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    return BM25Retriever.open(demo_corpus(0), cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE tokenizer that merges whatever it has seen together, over tags and line ends, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(
        ["</search>\n<information>[1] Jaws", "</information>\n<think>b", "<reasoning>r"] * 9, trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return ChatTemplate(tokenizer)


def spoken(chat: ChatTemplate, *words: str | Completion, format: str = "search_r1", max_steps: int = 8) -> Trajectory:
    """What the engine makes of a policy that samples these words, token by token."""

    def sampled(text: str | Completion) -> Completion:
        if isinstance(text, Completion):
            return text
        ids = chat.encode(text)
        return Completion(text, token_ids=ids, logprobs=tuple(-0.5 - 0.01 * n for n in range(len(ids))))

    engine = Engine(ScriptedLLM([sampled(w) for w in words]), ToyRetriever(), FORMATS[format](), max_steps=max_steps)
    (made,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    return made


def check(made: Transcript, trajectory: Trajectory, chat: ChatTemplate) -> None:
    """What holds of every transcript, worked out from the steps alone."""
    last = trajectory.steps[-1]
    read = chat.token_ids(last.prompt)
    assert made.prompt_ids + made.completion_ids == read + (last.completion.token_ids or ())
    own = [token for step in trajectory.steps for token in step.completion.token_ids or ()]
    assert [token for token, by in zip(made.completion_ids, made.mask, strict=True) if by] == own
    assert made.logprobs is not None
    said = [value for step in trajectory.steps for value in step.completion.logprobs or ()]
    assert [value for value, by in zip(made.logprobs, made.mask, strict=True) if by] == said
    assert all(value == 0.0 for value, by in zip(made.logprobs, made.mask, strict=True) if not by)


@pytest.mark.slow
@pytest.mark.parametrize("format", STREAMS)
def test_rollouts_of_the_demo_policy_keep_the_very_ids_that_were_read_and_sampled(format, demo_policy, retriever):
    shape = FORMATS[format](PromptSet.find("brief"))
    engine = Engine(
        demo_policy, retriever, shape, max_steps=4, top_k=1, sampling=Sampling(temperature=1.0, max_tokens=48)
    )
    questions = demo_questions("dev")[:8]
    done = asyncio.run(engine.run([Trajectory(q) for q in questions], seeds=list(range(8))))
    assert sum(isinstance(step.action, Search) for t in done for step in t.steps) > 4
    for trajectory in done:
        (made,) = transcripts(trajectory, demo_policy.chat)
        check(made, trajectory, demo_policy.chat)
        for step in trajectory.steps:  # each prompt of the episode is a beginning of the row
            asked = step.completion.prompt_token_ids
            assert (made.prompt_ids + made.completion_ids)[: len(asked)] == asked


def test_tokens_never_merge_over_the_border_of_what_was_sampled_and_what_was_put_in(bpe):
    trajectory = spoken(bpe, "<think>a</think>\n<search>Jaws</search>", "<think>b</think>\n<answer>x</answer>")
    assert isinstance(trajectory.steps[0].action, Search)
    (made,) = transcripts(trajectory, bpe)
    check(made, trajectory, bpe)
    passages = trajectory.steps[1].prompt.turn[-1]
    assert not passages.by_policy and "Spielberg" in passages.text
    between = len(bpe.encode(passages.text))
    first, second = (len(step.completion.token_ids) for step in trajectory.steps)
    assert made.mask == (1,) * first + (0,) * between + (1,) * second
    parts = [step.completion.text for step in trajectory.steps]
    joined = bpe.encode(passages.text.join(parts))
    assert joined != made.completion_ids, "the tokenizer has to merge over a border, or this test shows nothing"
    assert made.completion_ids == bpe.encode(parts[0]) + bpe.encode(passages.text) + bpe.encode(parts[1])


@pytest.mark.parametrize("format", ["hiprag", "search_p1"])
def test_what_is_put_in_before_the_first_word_belongs_to_the_prompt(format, bpe):
    trajectory = spoken(bpe, "r</reasoning>\n<answer>x</answer>", format=format)
    opening = FORMATS[format]().opening
    assert opening
    (made,) = transcripts(trajectory, bpe)
    check(made, trajectory, bpe)
    chat = bpe.chat_ids(trajectory.steps[0].prompt)
    assert made.prompt_ids == chat + bpe.encode(opening)
    assert set(made.mask) == {1}


def test_a_forced_answer_has_its_cue_masked(bpe):
    trajectory = spoken(bpe, "<think>a</think><search>Jaws</search>", "Spielberg</answer>", max_steps=2)
    assert trajectory.stop_reason is StopReason.FORCED_ANSWER
    (made,) = transcripts(trajectory, bpe)
    check(made, trajectory, bpe)
    cue = bpe.encode(trajectory.steps[1].prompt.turn[-1].text)
    own = len(trajectory.steps[1].completion.token_ids)
    assert "<answer>" in trajectory.steps[1].prompt.turn[-1].text
    assert made.completion_ids[-own - len(cue) : -own] == cue
    assert made.mask[-own - len(cue) : -own] == (0,) * len(cue)


def test_a_turn_that_the_policy_ends_itself_gets_no_second_end(bpe):
    end = bpe.tokenizer.eos_token_id
    ids = (*bpe.encode("no idea"), end)
    trajectory = spoken(bpe, Completion("no idea", token_ids=ids, logprobs=(-1.0,) * len(ids)))
    (made,) = transcripts(trajectory, bpe)
    assert (made.completion_ids[-1], made.mask[-1]) == (end, 1)
    assert made.ended(end) == made


def test_a_turn_that_ends_with_a_stop_string_gets_a_masked_end(bpe):
    end = bpe.tokenizer.eos_token_id
    (made,) = transcripts(spoken(bpe, "<think>a</think><answer>x</answer>"), bpe)
    ended = made.ended(end)
    assert ended.completion_ids == (*made.completion_ids, end)
    assert ended.mask == (*made.mask, 0)
    assert ended.logprobs == (*made.logprobs, 0.0)


def test_a_turn_that_ran_out_of_tokens_is_truncated_and_has_no_end(bpe):
    ids = bpe.encode("<think>on and on")
    long = Completion("<think>on and on", FinishReason.LENGTH, ids, (-1.0,) * len(ids))
    (made,) = transcripts(spoken(bpe, long), bpe)
    assert made.truncated
    assert made.ended(bpe.tokenizer.eos_token_id) == made


def test_a_policy_that_says_nothing_has_no_row(bpe):
    assert transcripts(spoken(bpe, Completion("", token_ids=(), logprobs=())), bpe) == ()


def test_a_backend_without_token_ids_is_refused(bpe):
    with pytest.raises(LLMError, match="must not be encoded again"):
        transcripts(spoken(bpe, Completion("<answer>x</answer>")), bpe)


def test_a_format_that_asks_anew_at_each_step_gives_a_row_per_step(bpe):
    words = ("<query>Jaws</query>", "what?", "<evidence>by Spielberg</evidence>", "<answer>Spielberg</answer>")
    trajectory = spoken(bpe, *words, format="reasonrag")
    rows = transcripts(trajectory, bpe)
    assert [row.steps for row in rows] == [1, 2, 3, 4], "an unreadable step is written by the policy, too"
    for row, step in zip(rows, trajectory.steps, strict=True):
        check(row, replace(trajectory, steps=(step,)), bpe)
        assert set(row.mask) == {1}
    assert rows[1].prompt_ids == rows[2].prompt_ids, "and hidden from the next one"


def test_a_prompt_that_forgets_what_was_said_begins_a_new_row(bpe):
    trajectory = spoken(bpe, "<think>a</think><search>Jaws</search>", "<think>b</think><answer>x</answer>")
    first, second = trajectory.steps
    forgetful = replace(second, prompt=replace(second.prompt, turn=second.prompt.turn[1:]))
    one, other = transcripts(replace(trajectory, steps=(first, forgetful)), bpe)
    check(one, replace(trajectory, steps=(first,)), bpe)
    check(other, replace(trajectory, steps=(forgetful,)), bpe)
