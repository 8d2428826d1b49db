"""A two-layer model with random weights and a tokenizer of its own, saved the way a real one is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import ModelConfig
from reasonrag.core.models import ModelAddress
from reasonrag.llm.local import TransformersLLM, open_transformers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SENTENCES = [
    "Who directed Jaws? Steven Spielberg directed Jaws in 1975.",
    "<query>who directed Jaws</query> <answer>Steven Spielberg</answer> <evidence>None</evidence>",
    "The river runs through the old town, and the town stands by the sea.",
    "Which of the two was born first? So the next query is the date of birth.",
]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def loaded(folder: Path, **settings: Any) -> TransformersLLM:
    """The engine in this process on a model."""
    return open_transformers(ModelAddress("hf", str(folder)), ModelConfig(**settings))


def save_base_model(
    folder: Path, *, words: tuple[str, ...] = ("<start_of_turn>", "<end_of_turn>"), **more: int
) -> Path:
    """Save one as a base model comes: no chat template, and an end of text that ends no turn."""
    return save_tiny_model(folder, chat_template=None, special_tokens=("<pad>", "<eos>", "<bos>", *words), **more)


def save_tiny_model(
    folder: Path,
    *,
    chat_template: str | None = TEMPLATE,
    vocab_size: int = 400,
    context: int = 512,
    special_tokens: tuple[str, ...] = ("<|start|>", "<|end|>"),
) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    named = {"eos_token": special_tokens[1]} | ({"bos_token": "<bos>"} if "<bos>" in special_tokens else {})
    return save_random_model(folder, bpe, chat_template=chat_template, context=context, **named)


def save_random_model(
    folder: Path,
    trained: Tokenizer,
    *,
    chat_template: str | None = TEMPLATE,
    context: int = 512,
    eos_token: str = "<|end|>",
    **special: str,
) -> Path:
    """Save a model for a trained tokenizer that has these special tokens, and those of its chat template."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # Padding and end are the same token, as in many real models.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=eos_token, pad_token=eos_token, **special)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    # Defaults that come with a model must not colour our samples.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=5, repetition_penalty=1.3, temperature=0.4, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(folder)
    return folder
