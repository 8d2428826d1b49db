"""Train the tiny policies from scratch, reproducibly: one thread, one seed, one file.

A language model of about a million parameters with short convolutions (LFM2's configuration) learns to copy names from
documents within minutes on one core; a plain transformer of that size does not.
"""

from __future__ import annotations

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

from reasonrag.core.config import copy_card
from reasonrag.core.models import demo_folder
from tools.demo_policy.curriculum import Curriculum, Row, StreamCurriculum, stream_vocabulary_texts, vocabulary_texts
from tools.demo_policy.tokens import STREAM, make_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the policy is trained.

    Args:
        steps: optimizer steps.
        tokens: tokens per batch, padding included; many small batches teach copying sooner than few large ones.
        lr: peak learning rate; linear warm-up, then a cosine to zero.
        warmup: warm-up steps.
        width, layers: size of the model; half of the layers are short convolutions.
    """

    steps: int = 7000
    tokens: int = 800
    lr: float = 2e-3
    warmup: int = 100
    width: int = 128
    layers: int = 4


# For the policy of the formats of one growing turn, which starts from the weights of the other one.
STREAM_RECIPE = Recipe(steps=5000, tokens=1000)


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, positions: int = 512) -> PreTrainedModel:
    """Return an untrained policy; torch's seed decides its weights."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=4 * recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=positions,
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
    """Train a policy from scratch and write it to `out` in transformers' format (about ten minutes on one core).

    The same seed, recipe and machine give the same `model.safetensors`. torch runs on one thread meanwhile.

    Args:
        out: output folder; created if needed, and a policy in it is replaced.
        seed: random seed for weights and training data.
        recipe: hyperparameters; None means those of the shipped policy.
        log: called with a line about the loss every 200 steps.

    Returns:
        The content of `training.json`: seed, recipe, parameters, losses, versions and the sha256 of
        `model.safetensors`.
    """
    recipe = recipe or Recipe()
    with _seeded(seed):
        tokenizer = make_tokenizer(vocabulary_texts())
        model = make_model(tokenizer, recipe)
        losses = _fit(model, Curriculum(tokenizer, Random(f"demo policy {seed}")), recipe, log)
        _save(model, tokenizer, out, card=demo_folder())
    return _report(out, model, seed, recipe, losses)


def train_stream_policy(
    out: Path, *, seed: int = 0, recipe: Recipe | None = None, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Train the policy for the formats of one growing turn (about a quarter of an hour on one core).

    It starts from the shipped policy, which can copy and knows famous facts: only tokens that are new to it, the tags,
    get random embeddings. So seed, recipe and that policy's weights decide the result.

    Args:
        out: as in `train_policy`.
        seed: as in `train_policy`.
        recipe: None means `STREAM_RECIPE`; width and layers must be those of the shipped policy.
        log: called with a line about the loss every 200 steps.

    Returns:
        As in `train_policy`.
    """
    recipe = recipe or STREAM_RECIPE
    with _seeded(seed):
        tokenizer = make_tokenizer(stream_vocabulary_texts(), STREAM)
        model = make_model(tokenizer, recipe, positions=1024)
        _inherit(model, tokenizer, demo_folder())
        losses = _fit(model, StreamCurriculum(tokenizer, Random(f"demo stream policy {seed}")), recipe, log)
        _save(model, tokenizer, out, card=demo_folder("hiprag"))
    return _report(out, model, seed, recipe, losses)


def _inherit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Copy every weight of the policy in the folder, which has the same shape; embeddings token by token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shipped = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder).get_vocab()
    old = shipped.get_input_embeddings().weight.detach()
    new = model.get_input_embeddings().weight.detach().clone()
    for word, token_id in tokenizer.get_vocab().items():
        if word in words:
            new[token_id] = old[words[word]]
    weights = {name: value for name, value in shipped.state_dict().items() if value.shape != old.shape}
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(new)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path, *, card: Path) -> None:
    # Servers that use a model's own defaults, such as `transformers serve`, would decode greedily otherwise.
    model.generation_config.update(do_sample=True, top_k=0)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if card.resolve() != out.resolve():
        copy_card(card, out)


def _report(
    out: Path, model: PreTrainedModel, seed: int, recipe: Recipe, losses: list[dict[str, float]]
) -> dict[str, Any]:
    """Write `training.json` and return its content."""
    report = {
        "seed": seed,
        "recipe": asdict(recipe),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "losses": losses,
        "versions": {"python": python_version(), **{name: version(name) for name in ("torch", "transformers")}},
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run the body with this seed and one thread for torch; both are restored afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # otherwise sums would depend on the number of cores
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _fit(
    model: PreTrainedModel, curriculum: Curriculum, recipe: Recipe, log: Callable[[str], None]
) -> list[dict[str, float]]:
    """Train in place; return the mean loss of every 200 steps."""
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
    """Return the factor of the peak learning rate: linear warm-up, then a cosine to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return 0.5 * (1 + cos(pi * (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)))


def _loss(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Return the weighted mean of the next-token losses of a batch, padded on the right."""
    import torch

    longest = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [model.config.pad_token_id] * (longest - len(row.ids)) for row in rows])
    weights = torch.tensor([row.weights + [0.0] * (longest - len(row.weights)) for row in rows])
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()
