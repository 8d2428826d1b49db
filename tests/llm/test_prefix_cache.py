from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future

import pytest
import torch

from reasonrag.core.types import Message, Prompt
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.local import TransformersLLM
from reasonrag.llm.row_sampling import PrefixCache, Row, RowBatch, reusable

VOCABULARY = 400


def small_model(kind: str):
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    own = {
        "llama": {},
        "gemma3_text": {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 16,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"]},
    }[kind]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **own, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig()
    return model


def generate_rows(model, chat, rows, **options):
    """The completions of rows that are written in one batch."""
    batch, futures = RowBatch(model, chat, end_ids=(), **options), [Future() for _ in rows]
    batch.join(list(zip(rows, futures, strict=True)))
    while batch:
        batch.write()
    return [future.result() for future in futures]


def trajectories(steps: int = 4) -> list[list[Row]]:
    """The batches of a few trajectories that go on: same system and question, longer thoughts, documents at the end."""
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, VOCABULARY) for _ in range(count))

    system = ids(50)
    prompts = [system + question for question in (ids(40), ids(5)) for _ in range(3)]
    batches = []
    for step in range(steps):
        rows = [
            Row(prompt + ids(45 if step % 2 else 0) + (7,), index, float(index % 3 > 0), 0.9, 3 + 5 * index, ())
            for index, prompt in enumerate(prompts)
        ]
        batches.append(rows)
        prompts = [prompt + ids(9) for prompt in prompts]
    return batches


@pytest.fixture(scope="module")
def chat(tiny_model) -> ChatTemplate:
    return ChatTemplate.load(str(tiny_model))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_shared_prefix_is_computed_once_and_changes_no_text(kind, chat):
    model, prefixes = small_model(kind), PrefixCache()
    assert reusable(model)
    computed: list[int] = []
    for rows in trajectories():
        plain = [generate_rows(model, chat, [row])[0] for row in rows]
        watch = model.register_forward_pre_hook(
            lambda module, _, inputs: computed.append(inputs["input_ids"].numel()), with_kwargs=True
        )
        cached = generate_rows(model, chat, rows, prefixes=prefixes)
        watch.remove()
        for one, other in zip(plain, cached, strict=True):
            assert one.token_ids == other.token_ids
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    read = sum(len(row.prompt_ids) for rows in trajectories() for row in rows)
    written = sum(row.max_tokens for rows in trajectories() for row in rows)
    assert sum(computed) - written < 0.6 * read


def test_rows_that_are_done_leave_the_batch_of_a_model_with_convolutions(chat):
    model = small_model("lfm2")
    assert not reusable(model)
    (rows, *_) = trajectories()
    computed: list[int] = []
    watch = model.register_forward_pre_hook(
        lambda module, _, inputs: computed.append(inputs["input_ids"].shape[0]), with_kwargs=True
    )
    together = generate_rows(model, chat, rows)
    watch.remove()
    alone = [generate_rows(model, chat, [row])[0] for row in rows]
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    assert computed[0] == len(rows) and computed[-1] == 1


def test_it_holds_no_more_than_its_bound_between_batches(chat):
    model, prefixes = small_model("llama"), PrefixCache(max_bytes=60_000)
    for rows in trajectories():
        generate_rows(model, chat, rows, prefixes=prefixes)
        held = sum(tensor.nbytes for entry in prefixes._entries.values() for tensor in entry)
        assert 0 < held == prefixes._bytes <= 60_000
        assert sorted(prefixes._entries) == prefixes._sorted


def test_a_prompt_of_one_token_has_no_prefix(chat):
    model = small_model("llama")
    rows = [Row((5,), 0, 0.0, 1.0, 4, ()), Row((5,), 0, 0.0, 1.0, 4, ())]
    plain = generate_rows(model, chat, rows)
    assert plain == generate_rows(model, chat, rows, prefixes=PrefixCache())


def test_nothing_is_kept_over_a_change_of_the_weights(chat):
    model, asked = small_model("llama"), Prompt((Message("user", "Who directed Jaws? " * 8),))
    llm = TransformersLLM.borrowing(chat, name="policy")
    texts = []
    for scale in (1.0, 0.5, 1.0):
        with llm.lent(model), torch.no_grad():
            model.lm_head.weight.mul_(scale)
            model.model.layers[0].self_attn.k_proj.weight.mul_(scale)
            (made,) = asyncio.run(llm.complete(asked, Sampling(temperature=0.0, max_tokens=12, seed=0)))
            (plain,) = generate_rows(model, chat, [Row(made.prompt_token_ids, 0, 0.0, 1.0, 12, asked.stop)])
        texts.append(made.token_ids)
        assert made.token_ids == plain.token_ids
        assert llm._prefixes is None
    asyncio.run(llm.aclose())
    assert len(set(texts)) > 1
