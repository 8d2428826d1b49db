"""Train the tiny policy from nothing, reproducibly: one thread, one seed, one file.

A language model of about a million parameters with short convolutions (LFM2's configuration) learns to copy names from
documents within minutes on one core; a plain transformer of that size does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import cos, pi
from pathlib import Path
from platform import python_version
from random import Random
from typing import TYPE_CHECKING, Any

from reasonrag.card import copy_card
from reasonrag.demo.curriculum import Curriculum, Row, vocabulary_texts
from reasonrag.demo.measure import Figures, measure
from reasonrag.demo.tokens import make_tokenizer
from reasonrag.demo.world import demo_questions
from reasonrag.llm.local import TransformersLLM

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the policy is trained.

    Args:
        steps: optimizer steps.
        tokens: of one batch, padding included; many small batches teach copying sooner than few large ones.
        lr: peak learning rate; linear warm-up, then a cosine to zero.
        warmup: steps.
        width, layers: of the model; half of the layers are short convolutions.
        dev_questions: to measure the result on, at temperature 0 and 1.
    """

    steps: int = 7000
    tokens: int = 800
    lr: float = 2e-3
    warmup: int = 100
    width: int = 128
    layers: int = 4
    dev_questions: int = 300


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> PreTrainedModel:
    """An untrained policy; torch's seed decides its weights."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=4 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"] * (recipe.layers // 2),
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def train_policy(
    out: Path, *, seed: int = 0, recipe: Recipe | None = None, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train a policy from nothing and write it to `out`, as transformers loads it: about ten minutes of one core.

    The same seed, recipe and machine give the same `model.safetensors`. torch runs on one thread meanwhile.

    Args:
        out: a folder; made if it is not there, and its policy is replaced.
        seed: of the weights and of everything that is drawn.
        recipe: the shipped policy's if None.
        log: is told the loss now and then.

    Returns:
        What is written to `training.json`: seed, recipe, parameters, losses, figures on dev questions, versions and
        the sha256 of `model.safetensors`.
    """
    import torch

    recipe = recipe or Recipe()
    with _quiet_single_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(vocabulary_texts())
        model = make_model(tokenizer, recipe)
        losses = _fit(model, Curriculum(tokenizer, Random(f"demo policy {seed}")), recipe, log)
        # What servers that keep to a model's own defaults do with it: `transformers serve` is greedy otherwise.
        model.generation_config.update(do_sample=True, top_k=0)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        copy_card(Path(__file__).with_name("policy"), out)
        figures = _on_dev(out, recipe.dev_questions)
    report = {
        "seed": seed,
        "recipe": asdict(recipe),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "losses": losses,
        "dev": figures,
        "versions": {"python": python_version(), **{name: version(name) for name in ("torch", "transformers")}},
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for setting, kinds in figures.items():
        log(f"dev, {setting}: exact match {kinds['all']['em']:.3f}, malformed {kinds['all']['malformed']:.4f}")
    return report


@contextmanager
def _quiet_single_thread() -> Iterator[None]:
    """One thread for torch, whose sums would else depend on the number of cores, and no progress bars."""
    import torch
    from transformers.utils import logging

    threads, bars = torch.get_num_threads(), logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            logging.enable_progress_bar()


def _on_dev(folder: Path, limit: int) -> dict[str, Figures]:
    llm = TransformersLLM(str(folder), batch_size=64, device="cpu")
    questions = demo_questions("dev", limit=limit)
    try:
        return {f"temperature {t:g}": measure(llm, questions, temperature=t) for t in (0.0, 1.0)}
    finally:
        asyncio.run(llm.aclose())


def _fit(
    model: PreTrainedModel, curriculum: Curriculum, recipe: Recipe, log: Callable[[str], None]
) -> list[dict[str, float]]:
    """Train in place; returns the mean loss of every 200 steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    losses, recent = list[dict[str, float]](), list[float]()
    model.train()
    batches = curriculum.batches(tokens=recipe.tokens)
    for step in range(recipe.steps):
        loss = _loss(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(float(loss.detach()))
        if (step + 1) % 200 == 0 or step + 1 == recipe.steps:
            losses.append({"step": step + 1, "loss": round(sum(recent) / len(recent), 4)})
            log(f"step {step + 1} loss {losses[-1]['loss']:.4f}")
            recent.clear()
    model.eval()
    return losses


def _rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine to zero: the factor of the peak learning rate."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.5 * (1 + cos(pi * (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)))


def _loss(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Weighted mean of the next-token losses of a batch, padded on the right."""
    import torch

    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [model.config.pad_token_id] * (longest - len(row.ids)) for row in rows])
    weights = torch.tensor([row.weights + [0.0] * (longest - len(row.weights)) for row in rows])
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()
