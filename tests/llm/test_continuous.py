"""Continuous batching on a tiny Qwen3 with random weights, on the CPU; `generate` on the same weights beside it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from reasonrag.cli import cli
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.types import Completion, FinishReason, Message, Prompt, Span, Trajectory
from reasonrag.llm.base import LLM, Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.continuous import BorrowingLLM, ContinuousLLM, unsupported
from reasonrag.llm.local import TransformersLLM
from reasonrag.rewards.base import Score
from tests.llm.asking import PROMPT, Pause, assert_logprobs_are_real

OTHERS = [Prompt((Message("user", "The river runs through the old town. " * count),)) for count in range(1, 17)]
GREEDY = Sampling(temperature=0.0, max_tokens=24)
SPARE_ROWS = 4  # of the embedding, for tokens that a test adds


class TextLength:
    """A reward for a training: the longer the text, the better."""

    def __init__(self, settings: object, parts: object) -> None:
        pass

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        return [Score(float(sum(len(step.completion.text) for step in t.steps))) for t in trajectories]

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


def qwen(chat: ChatTemplate, **config: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end = chat.tokenizer.eos_token_id
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(chat.tokenizer) + SPARE_ROWS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **config}))


@pytest.fixture
def chat(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.load(str(tiny_model))


@pytest.fixture
def model(chat: ChatTemplate) -> Any:
    return qwen(chat)


def ask(llm: BorrowingLLM, model: Any, *requests: tuple[Prompt, Sampling]) -> list[Completion]:
    """The completions of requests that are made together, those of one request one after the other."""

    async def together():
        return await asyncio.gather(*(llm.complete(prompt, sampling) for prompt, sampling in requests))

    with llm.lent(model):
        made = asyncio.run(together())
    return [completion for completions in made for completion in completions]


def both(chat: ChatTemplate, model: Any, *requests: tuple[Prompt, Sampling]) -> tuple[list[Completion], ...]:
    """What continuous batching and `generate` make of the same requests."""
    plain = TransformersLLM.borrowing(chat, name="tiny")
    try:
        return ask(continuous(chat), model, *requests), ask(plain, model, *requests)
    finally:
        asyncio.run(plain.aclose())


def continuous(chat: ChatTemplate, **settings: Any) -> ContinuousLLM:
    return ContinuousLLM(chat, name="tiny", **settings)


def said(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.text, c.token_ids, c.finish_reason, c.prompt_token_ids, c.completion_tokens) for c in completions]


def test_greedy_text_is_that_of_generate_for_many_prompts_of_different_lengths(chat, model):
    requests = [(prompt, Sampling(temperature=0.0, max_tokens=5 + 3 * i)) for i, prompt in enumerate(OTHERS)]
    ours, theirs = both(chat, model, *requests)
    assert said(ours) == said(theirs)
    assert len({completion.completion_tokens for completion in ours}) > 8


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(chat, model, temperature):
    requests = [(prompt, Sampling(temperature=temperature, max_tokens=20)) for prompt in OTHERS]
    for completion in ask(continuous(chat), model, *requests):
        assert len(completion.logprobs) == len(completion.token_ids) == completion.completion_tokens
        assert_logprobs_are_real(model.eval(), completion, temperature or 1.0)


def test_requests_of_other_temperatures_at_the_same_time_do_not_disturb_each_other(chat, model):
    laws = [Sampling(temperature=temperature, max_tokens=12) for temperature in (0.3, 0.0, 1.5, 0.3, 0.0)]
    made = ask(continuous(chat), model, *((PROMPT, law) for law in laws))
    for completion, law in zip(made, laws, strict=True):
        assert_logprobs_are_real(model.eval(), completion, law.temperature or 1.0)


def test_a_stop_string_of_several_tokens_ends_at_the_token_that_completes_it(chat, model):
    (whole,) = ask(continuous(chat), model, (PROMPT, GREEDY))
    seven = chat.decode(whole.token_ids[:7])
    stop = seven[-3:] if len(chat.encode(seven[-3:])) > 1 else seven[-4:]
    assert len(chat.encode(stop)) > 1
    ours, theirs = both(chat, model, (Prompt(PROMPT.messages, stop=(stop, "</never>")), GREEDY))
    assert said(ours) == said(theirs)
    assert ours[0].text.endswith(stop)
    assert ours[0].finish_reason is FinishReason.STOP
    assert ours[0].token_ids == whole.token_ids[: len(ours[0].token_ids)] != whole.token_ids
    assert ours[0].logprobs == pytest.approx(whole.logprobs[: len(ours[0].token_ids)], abs=1e-5)


def test_a_stop_string_that_is_one_token_ends_there(chat, model):
    chat.tokenizer.add_tokens(["</search>"])
    (stop_id,) = chat.encode("</search>")
    bias = torch.zeros(model.config.vocab_size)
    bias[stop_id] = 7.0
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias)
    prompt = Prompt(PROMPT.messages, stop=("</search>",))
    made = ask(continuous(chat), model, (prompt, Sampling(n=8, max_tokens=200, seed=3)))
    assert {completion.finish_reason for completion in made} == {FinishReason.STOP}
    for completion in made:
        assert completion.token_ids.index(stop_id) == len(completion.token_ids) - 1 == len(completion.logprobs) - 1
        assert completion.text.endswith("</search>")


def test_a_stop_string_that_is_a_token_is_found_where_it_is_spelled_out(chat, model):
    (whole,) = ask(continuous(chat), model, (PROMPT, GREEDY))
    stop = chat.decode(whole.token_ids[5:8])
    chat.tokenizer.add_tokens([stop])
    assert len(chat.encode(stop)) == 1
    (cut,), (expected,) = both(chat, model, (Prompt(PROMPT.messages, stop=(stop,)), GREEDY))
    assert said([cut]) == said([expected])
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.text.endswith(stop)


def test_the_end_token_ends_a_request(chat, model):
    end = chat.tokenizer.eos_token_id
    bias = torch.zeros(model.config.vocab_size)
    bias[end] = 50.0
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias)
    (completion,) = ask(continuous(chat), model, (PROMPT, Sampling(max_tokens=9)))
    assert (completion.token_ids, completion.text) == ((end,), "")
    assert completion.finish_reason is FinishReason.STOP


def test_sampled_ids_of_the_open_turn_go_in_as_they_are(chat, model):
    spelled = chat.encode("J") + chat.encode("a") + chat.encode("ws")
    prompt = Prompt(PROMPT.messages, (Span("Jaws", spelled, by_policy=True), Span(" directed")))
    (completion,) = ask(continuous(chat), model, (prompt, GREEDY))
    tail = (*spelled, *chat.encode(" directed"))
    assert completion.prompt_token_ids[-len(tail) :] == tail


def test_more_requests_than_places_all_get_their_answer(chat, model):
    requests = [(prompt, Sampling(temperature=0.0, max_tokens=6)) for prompt in OTHERS]
    few = ask(continuous(chat, batch_size=3), model, *requests)
    assert said(few) == said(ask(continuous(chat), model, *requests))


def test_the_samples_of_a_request_differ_and_the_prompt_is_counted_once(chat, model):
    made = ask(continuous(chat), model, (PROMPT, Sampling(n=4, max_tokens=16)))
    assert len({completion.text for completion in made}) == 4
    assert [c.prompt_tokens for c in made] == [len(made[0].prompt_token_ids), 0, 0, 0]


def test_a_request_alone_is_reproducible_from_its_seed(chat, model):
    seeded = [ask(continuous(chat), model, (PROMPT, Sampling(max_tokens=16, seed=seed)))[0] for seed in (5, 5, 6)]
    assert seeded[0].token_ids == seeded[1].token_ids != seeded[2].token_ids


def test_a_nucleus_gives_no_logprobs_as_those_of_the_whole_vocabulary_are_not_known(chat, model):
    nucleus, whole = ask(
        continuous(chat), model, (PROMPT, Sampling(top_p=0.3, max_tokens=8)), (PROMPT, Sampling(max_tokens=8))
    )
    assert nucleus.logprobs is None
    assert nucleus.token_ids and len(whole.logprobs) == len(whole.token_ids)


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_nearly_does_is_cut(chat, model):
    words = "river " * 600
    with pytest.raises(LLMError) as refused:
        ask(continuous(chat), model, (Prompt((Message("user", words),)), GREEDY))
    assert refused.value.cause == "context_overflow"
    room = 512 - len(chat.token_ids(Prompt(PROMPT.messages)))
    almost = Prompt(PROMPT.messages, (Span("x", chat.encode("x") * (room - 3)),))
    (completion,) = ask(continuous(chat), model, (almost, GREEDY))
    assert completion.completion_tokens <= 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(chat, model, attention, training):
    model.set_attn_implementation(attention)
    model.train(training)
    defaults, numbers = model.generation_config, torch.random.get_rng_state()
    ask(continuous(chat), model, (PROMPT, GREEDY), (PROMPT, Sampling(max_tokens=4)))
    assert model.config._attn_implementation == attention
    assert model.training is training
    assert model.generation_config is defaults
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert model(torch.tensor([[1, 2, 3]])).logits.requires_grad


def test_changed_weights_are_those_of_the_next_loan(chat, model):
    llm = continuous(chat)
    ask(llm, model, (PROMPT, GREEDY))
    with torch.no_grad():
        model.lm_head.weight.neg_()
    (completion,) = ask(llm, model, (PROMPT, GREEDY))
    assert_logprobs_are_real(model.eval(), completion, 1.0)


def test_mixed_precision_of_a_trainer_is_left_out_and_put_back(chat, model):
    from accelerate.utils import convert_outputs_to_fp32

    model._original_forward = model.forward
    model.forward = wrapped = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    (completion,) = ask(continuous(chat), model, (PROMPT, GREEDY))
    assert model.forward is wrapped
    model.forward = model._original_forward
    assert_logprobs_are_real(model.eval(), completion, 1.0)


def test_weights_in_16_bits_work_within_mixed_precision(chat, model):
    model.to(torch.bfloat16)
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    (completion,) = ask(continuous(chat), model, (PROMPT, GREEDY))
    assert completion.completion_tokens == 24


def test_adapters_that_are_laid_over_a_model_take_part(chat, model):
    from peft import LoraConfig, get_peft_model

    (before,) = ask(continuous(chat), model, (PROMPT, GREEDY))
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    (after,) = ask(continuous(chat), adapted, (PROMPT, GREEDY))
    assert_logprobs_are_real(adapted.eval(), after, 1.0)
    assert after.logprobs != before.logprobs


def test_a_cancelled_task_cancels_its_request_and_others_go_on(chat, model):
    llm = continuous(chat, batch_size=2)

    async def ends():
        sampling = Sampling(max_tokens=480, seed=7)  # with other seeds the model ends its turn early
        pause = Pause(model)
        endless = [asyncio.ensure_future(llm.complete(PROMPT, sampling)) for _ in range(2)]
        await pause.reached()
        for task in endless:
            task.cancel()
        pause.go_on()
        await asyncio.wait(endless)
        return [task.cancelled() for task in endless], await llm.complete(PROMPT, GREEDY)

    with llm.lent(model):
        cancelled, (completion,) = asyncio.run(ends())
        assert not llm._loan.running
    assert cancelled == [True, True]
    assert completion.completion_tokens == 24


def test_a_forward_pass_that_fails_is_an_error_and_the_next_request_works(chat, model):
    failures: list[Exception] = [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), ValueError("no\nsense")]

    def fail(module, inputs):
        if failures:
            raise failures.pop(0)

    model.lm_head.register_forward_pre_hook(fail)
    llm, causes, said = continuous(chat), [], []

    async def run():
        for _ in range(2):
            with pytest.raises(LLMError) as caught:
                await llm.complete(PROMPT, Sampling(temperature=0.0, n=3, max_tokens=8))
            causes.append(caught.value.cause)
            said.append("set rollout.engine to generate" in str(caught.value))
        return await llm.complete(PROMPT, GREEDY)

    with llm.lent(model):
        (completion,) = asyncio.run(run())
    assert causes == ["out_of_memory", "engine"]
    assert said == [True, False]
    assert completion.completion_tokens == 24


def test_nothing_is_answered_without_a_model_or_after_the_end(chat, model):
    llm = continuous(chat)
    with pytest.raises(LLMError, match="none is lent") as unlent:
        asyncio.run(llm.complete(PROMPT, GREEDY))
    asyncio.run(llm.aclose())
    asyncio.run(llm.aclose())
    with pytest.raises(LLMError) as closed:
        ask(llm, model, (PROMPT, GREEDY))
    assert unlent.value.cause == closed.value.cause == "closed"


def test_no_thread_is_left_behind(chat, model):
    before = threading.active_count()
    ask(continuous(chat), model, (PROMPT, GREEDY), (PROMPT, Sampling(max_tokens=4)))
    assert threading.active_count() == before


def test_layers_whose_state_cannot_be_paged_are_refused_in_words(chat):
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    convolutions = Lfm2ForCausalLM(config)
    assert "conv" in unsupported(convolutions)
    with pytest.raises(ConfigError, match="set rollout\\.engine"), continuous(chat).lent(convolutions):
        pass


def test_a_model_of_attention_alone_is_supported(model):
    assert unsupported(model) is None


@pytest.mark.slow
def test_a_training_samples_from_the_law_that_it_trains(tmp_path, chat):
    tiny = tmp_path / "tiny"
    qwen(chat, max_position_embeddings=2048).save_pretrained(tiny)
    chat.tokenizer.save_pretrained(tiny)
    questions, corpus = tmp_path / "questions.jsonl", tmp_path / "corpus.jsonl"
    films = [{"id": f"q{i}", "question": f"Who directed film {i}?", "golden_answers": ["Lucas"]} for i in range(4)]
    questions.write_text("".join(json.dumps(film) + "\n" for film in films), encoding="utf-8")
    corpus.write_text(json.dumps({"id": "p", "contents": "Film 1\nFilm 1 is by Lucas."}) + "\n", encoding="utf-8")
    settings = {
        "rollout.engine": "continuous", "rollout.max_tokens": "12", "importance": "token_truncate", "device": "cpu",
        "mask_truncated": "false", "validation.steps": "0", "save_steps": "2", "learning_rate": "0.001",
    }  # fmt: skip
    command = [
        "rl", "train", "--dataset", str(questions), "--corpus", str(corpus), "--model", str(tiny), "--out",
        str(tmp_path / "out"), "--format", "search_r1", "--prompts", "brief", "--max-turns", "2", "--method", "full",
        "--reward", "tests.llm.test_continuous:TextLength", "--max-steps", "2", "--questions-per-step", "2",
        "--group-size", "4",
        *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    state = tmp_path / "out/checkpoints/checkpoint-2/trainer_state.json"
    steps = [entry for entry in json.loads(state.read_text(encoding="utf-8"))["log_history"] if "reward" in entry]
    assert len(steps) == 2
    for step in steps:
        assert step["reward"] > 0
        for bound in ("min", "mean", "max"):
            assert step[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx(1.0, abs=1e-3)


def test_it_speaks_the_protocol_of_every_llm(chat):
    llm: LLM = continuous(chat)
    assert llm.name == "tiny"
