"""What the engine in this process writes: seeds, laws, log-probabilities, stops, and what cannot be loaded."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from reasonrag.core.errors import ConfigError, LLMError, RunError
from reasonrag.core.types import Completion, FinishReason, Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.local import TransformersLLM, nucleus, words_at
from tests.llm.asking import OTHERS, PROMPT, SAMPLING, ask, ask_together, assert_logprobs_are_real, forward
from tests.llm.tiny import loaded


@pytest.fixture
def biased_llm(tiny_model: Path):
    """The tiny model, whose end token can be made as likely as a test needs."""
    llm = loaded(tiny_model, batch_size=8, device="cpu")
    bias = torch.zeros(llm.model.config.vocab_size)
    llm.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + bias)
    yield llm, bias
    asyncio.run(llm.aclose())


def test_the_same_seed_gives_the_same_text_alone_and_among_others(tiny_llm):
    alone = ask(tiny_llm)
    crowd = [(prompt, Sampling(max_tokens=7 + 5 * i, temperature=0.3 * i, seed=i)) for i, prompt in enumerate(OTHERS)]
    together, *_ = ask_together(tiny_llm, [(PROMPT, SAMPLING), *crowd])
    assert together.token_ids == alone.token_ids
    assert together.text == alone.text
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.fault(
    "A11",
    "NaN in the weights of a policy",
    "one line that names the tensor, and no NaN in the journal",
    before="cause 'bug:ValueError Out of range float values', or the advice to raise --max-tokens",
)
def test_a_policy_with_nan_weights_says_which(tiny_model, figure):
    llm = loaded(tiny_model, device="cpu")
    name, weight = list(llm.model.named_parameters())[4]
    with torch.no_grad():
        weight.view(-1)[7] = float("nan")
    with pytest.raises(RunError, match=rf"its weights hold NaN or infinities, first in {name};") as error:
        ask(llm, sampling=Sampling(max_tokens=3, seed=1))
    figure(str(error.value).partition(";")[0])
    asyncio.run(llm.aclose())


def test_global_random_state_is_neither_read_nor_changed(tiny_llm):
    torch.manual_seed(1)
    first = ask(tiny_llm)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert ask(tiny_llm) == first


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_sampling_temperature(tiny_llm, temperature):
    requests = [(prompt, Sampling(temperature=temperature, top_p=0.8, max_tokens=20, seed=1)) for prompt in OTHERS]
    for completion in ask_together(tiny_llm, requests):
        assert len(completion.logprobs) == len(completion.token_ids) == completion.completion_tokens
        assert_logprobs_are_real(tiny_llm.model, completion, temperature or 1.0)


def test_greedy_is_what_generate_writes(tiny_llm):
    completion = ask(tiny_llm, sampling=Sampling(temperature=0.0, max_tokens=24, seed=5))
    ids = torch.tensor([completion.prompt_token_ids])
    with torch.no_grad():
        law = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 24}
        expected = tiny_llm.model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=1, pad_token_id=0, **law
        )
    assert completion.token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_samples_follow_the_distribution_of_the_model(tiny_llm):
    samplings = [Sampling(max_tokens=1, temperature=0.5, seed=seed) for seed in range(2000)]
    drawn = ask_together(tiny_llm, [(PROMPT, sampling) for sampling in samplings])
    counts = Counter(completion.token_ids[0] for completion in drawn)
    probabilities = forward(tiny_llm.model, drawn[0], 0.5)[0].exp()
    for token in probabilities.topk(5).indices.tolist():
        expected = probabilities[token].item()
        assert counts[token] / 2000 == pytest.approx(expected, abs=4 * (expected / 2000) ** 0.5)


def test_top_p_keeps_the_smallest_nucleus(tiny_llm):
    drawn = ask_together(tiny_llm, [(PROMPT, Sampling(max_tokens=1, top_p=0.3, seed=seed)) for seed in range(500)])
    ordered = forward(tiny_llm.model, drawn[0])[0].exp().sort(descending=True)
    size = int((ordered.values.cumsum(0) < 0.3).sum()) + 1
    assert {completion.token_ids[0] for completion in drawn} == set(ordered.indices[:size].tolist())


def test_a_nucleus_of_many_words_is_found_and_of_equally_likely_ones_the_first():
    probabilities = torch.softmax(torch.linspace(0, 1, 5000).flip(0), 0)[None]
    kept = nucleus(probabilities, torch.tensor([[0.9]]))[0]
    count = int((probabilities.cumsum(1) < 0.9).sum()) + 1
    assert torch.equal(kept[:count], probabilities[0, :count]) and not kept[count:].any()
    even = torch.full((1, 8), 0.125)
    assert nucleus(even, torch.tensor([[0.4]]))[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]


def test_a_draw_hits_the_word_at_which_the_probabilities_exceed_it():
    torch.manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(300, 5000), -1)
    draws = torch.rand(300, 1, dtype=torch.float64)
    sums = probabilities.double().cumsum(1)
    expected = torch.searchsorted(sums, draws * sums[:, -1:], right=True)[:, 0]
    assert (words_at(probabilities, draws) == expected).float().mean() > 0.99  # others lie on a border, by rounding
    edges = torch.zeros(2, 5000).index_fill_(1, torch.tensor([700, 4321]), 0.5)
    assert words_at(edges, torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)).tolist() == [700, 4321]


def test_rows_of_one_batch_keep_their_own_settings(tiny_llm):
    greedy, short = Sampling(temperature=0.0, max_tokens=24), Sampling(max_tokens=3, seed=1)
    a, b, c = ask_together(tiny_llm, [(PROMPT, greedy), (PROMPT, short), (PROMPT, SAMPLING)])
    assert a.token_ids == ask(tiny_llm, sampling=greedy).token_ids
    assert (len(b.token_ids), b.finish_reason) == (3, FinishReason.LENGTH)
    assert len(c.token_ids) == 24


def small_model(kind: str):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = {
        "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
    }[kind]
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**sizes, **heads, **own, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_rows_of_one_prompt_share_it_and_leave_the_batch_when_they_are_done(kind, tiny_llm):
    model, llm = small_model(kind), TransformersLLM(tiny_llm.chat, name="policy", batch_size=8)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda module, _, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    requests = [(OTHERS[i % 2], Sampling(temperature=i % 3 / 2, max_tokens=3 + 5 * i, seed=i)) for i in range(6)]
    with llm.lent(model):
        together = ask_together(llm, requests)
        assert shapes[0][0] == 2 and shapes[1][0] == 6 and shapes[-1][0] == 1
        for completion, request in zip(together, requests, strict=True):
            alone = ask(llm, *request)
            assert completion.token_ids == alone.token_ids
            assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    asyncio.run(llm.aclose())


def mark_across_tokens(llm: TransformersLLM, completion: Completion) -> str:
    """A string that begins at the end of one token and ends in the middle of the next, and occurs once."""
    pieces = [llm.chat.decode([token]) for token in completion.token_ids]
    marks = (a[-1] + b[0] for a, b in pairwise(pieces[3:]) if len(b) > 1 and (a + b).isascii())
    return next(mark for mark in marks if completion.text.count(mark) == 1)


def test_a_stop_string_ends_its_row_and_no_other(tiny_llm):
    greedy = Sampling(temperature=0.0, max_tokens=24)
    free = ask(tiny_llm, sampling=greedy)
    mark = mark_across_tokens(tiny_llm, free)
    stopping = Prompt(PROMPT.messages, stop=("never written", mark))
    stopped, whole = ask_together(tiny_llm, [(stopping, greedy), (PROMPT, greedy)])
    assert stopped.text == free.text[: free.text.index(mark) + len(mark)]
    assert stopped.finish_reason is FinishReason.STOP
    count = len(stopped.token_ids)
    assert stopped.token_ids == free.token_ids[:count] and count < 24
    assert mark in tiny_llm.chat.decode(stopped.token_ids)
    assert mark not in tiny_llm.chat.decode(stopped.token_ids[:-1])
    # The last token is kept whole, though the text ends within it.
    assert len(tiny_llm.chat.decode(stopped.token_ids)) > len(stopped.text)
    assert_logprobs_are_real(tiny_llm.model, stopped)
    assert whole.token_ids == free.token_ids


def test_an_end_token_is_kept_though_it_is_the_padding_too(biased_llm):
    llm, bias = biased_llm
    end = llm.chat.tokenizer.eos_token_id
    assert end == llm.chat.tokenizer.pad_token_id
    bias[end] = 5.0
    rows = ask_together(llm, [(PROMPT, Sampling(max_tokens=60, seed=seed)) for seed in range(8)])
    ended = [row for row in rows if row.finish_reason is FinishReason.STOP]
    assert len({len(row.token_ids) for row in ended}) > 1  # rows that were done waited for longer ones
    for row in ended:
        assert row.token_ids[-1] == end
        assert row.token_ids.count(end) == 1
        assert "<|end|>" not in row.text
        assert_logprobs_are_real(llm.model, row)


def test_a_prompt_that_fills_the_context_is_an_error_for_its_caller_alone(tiny_llm):
    long = Prompt((Message("user", "river " * 2000),))

    async def run():
        calls = (tiny_llm.complete(prompt, SAMPLING) for prompt in (long, PROMPT))
        return await asyncio.gather(*calls, return_exceptions=True)

    refused, answered = asyncio.run(run())
    assert isinstance(refused, LLMError) and refused.cause == "context_overflow"
    assert len(answered.token_ids) == 24


@pytest.mark.parametrize(("device", "lines"), [("meta", 1), ("cpu", 0)])  # any device but the CPU is a GPU here
def test_on_a_gpu_one_line_names_the_engine_for_it(tiny_model, device, lines):
    with capture_logs() as said:
        asyncio.run(loaded(tiny_model, device=device).aclose())
    assert [f"--policy vllm:{tiny_model} or a vLLM server" in line["event"] for line in said] == [True] * lines


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


def begun_alike(chat, model):
    """Completions of four prompts that begin alike, in one batch and alone, and the shapes of the batch's inputs."""
    alike = Message("system", "You answer step by step. " * 12)
    requests = [
        (Prompt((alike, *prompt.messages)), Sampling(max_tokens=9, temperature=0.5 * i, seed=i))
        for i, prompt in enumerate(OTHERS[:4])
    ]
    llm, shapes = TransformersLLM(chat, name="alike", batch_size=8, model=model), []
    hook = model.register_forward_pre_hook(
        lambda module, inputs, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    together = ask_together(llm, requests)
    hook.remove()
    alone = [ask(llm, *request) for request in requests]
    asyncio.run(llm.aclose())
    return together, alone, shapes


def assert_same(together: list[Completion], alone: list[Completion]) -> None:
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_a_beginning_that_prompts_share_is_computed_once_and_changes_nothing(tiny_llm):
    together, alone, shapes = begun_alike(tiny_llm.chat, tiny_llm.model)
    assert_same(together, alone)
    (one, shared), (four, rest) = shapes[:2]
    assert (one, four) == (1, 4) and shared >= 128 > rest


def test_a_sliding_window_reads_each_prompt_whole(tiny_llm):
    """Padding between a shared beginning and what follows would count in the window."""
    from transformers import MistralConfig, MistralForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=len(tiny_llm.chat.tokenizer), num_key_value_heads=2, sliding_window=64, **size)
    torch.manual_seed(0)
    together, alone, shapes = begun_alike(tiny_llm.chat, MistralForCausalLM(config).eval())
    assert_same(together, alone)
    assert shapes[0][0] == 4
