"""A tiny model, pairs in which the better step is plain to see, and trainings of one to two seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasonrag.core.settings import gather, validate
from reasonrag.core.types import Message, Prompt
from reasonrag.dpo.preferences import read_preferences
from reasonrag.dpo.token_rows import Pair, Segment, TokenPairs, data_of, tokenise
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.settings import DPOSettings, SFTSettings
from tests.llm.tiny import save_tiny_model

NAMES = ("Jaws", "Steven", "river", "town", "sea", "query", "birth", "first")


def pair_row(number: int) -> dict[str, Any]:
    """A pair of data: the chosen step names what the prompt asks for."""
    rng = random.Random(number)
    wanted, other = rng.sample(NAMES, 2)
    return {
        "prompt": [{"role": "user", "content": f"Question {number} is about {wanted}?"}],
        "chosen": [{"role": "assistant", "content": f"So the next query is <query>{wanted}</query>"}],
        "rejected": [{"role": "assistant", "content": f"<answer>{other} {number % 7}</answer>"}],
        "chosen_end": "stop",
        "rejected_end": "turn" if number % 3 else "stop",
        "margin": round(0.1 + rng.random(), 3),
        "depth": number % 4,
        "dataset": "toy",
        "question_id": str(number),
    }


def write_pairs(folder: Path, train: int = 48, test: int = 8, rows: list[dict[str, Any]] | None = None) -> Path:
    """A folder of pairs with a split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rows = rows or [pair_row(number) for number in range(train + test)]
    for split, part in (("train", rows[:train]), ("test", rows[train:])):
        if part:
            pq.write_table(pa.Table.from_pylist(part), folder / f"{split}-00000-of-00001.parquet")
    return folder


def step_pairs(chat: ChatTemplate, count: int) -> list[Pair]:
    """The same as token ids."""
    pairs = []
    for row in map(pair_row, range(count)):
        prompt = ids_of(chat, row["prompt"][0]["content"])
        sides = [Segment(prompt, step_ids(chat, row[side][0]["content"])) for side in ("chosen", "rejected")]
        pairs.append(Pair((sides[0],), (sides[1],), row["margin"], row["depth"], ("toy", row["question_id"])))
    return pairs


def trajectory_pairs(chat: ChatTemplate, count: int) -> list[Pair]:
    """Sides of one to three steps, each in a prompt of its own."""
    pairs = []
    for number, pair in enumerate(step_pairs(chat, count)):
        sides = []
        for side, segment in enumerate((pair.chosen[0], pair.rejected[0])):
            later = [
                Segment(ids_of(chat, f"Then {n} of {number}"), step_ids(chat, f"<evidence>{side} {n}</evidence>"))
                for n in range((number + side) % 3)
            ]
            sides.append((segment, *later))
        pairs.append(Pair(sides[0], sides[1], pair.margin, 0, pair.group))
    return pairs


def ids_of(chat: ChatTemplate, question: str) -> tuple[int, ...]:
    return chat.token_ids(Prompt((Message("user", question),)))


def step_ids(chat: ChatTemplate, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def dpo_settings(data: Path, model: Path | str, **overrides: Any) -> DPOSettings:
    return validate(DPOSettings, gather({}, overrides=_quick(data, model) | {"beta": 0.3} | overrides))


def sft_settings(data: Path, model: Path | str, **overrides: Any) -> SFTSettings:
    return validate(SFTSettings, gather({}, overrides=_quick(data, model) | overrides))


def token_pairs(settings: Any, chat: ChatTemplate, *, context: int | None = None, log: Any = print) -> TokenPairs:
    """Return the pairs of `settings.data` as `dpo train` reads and tokenises them."""
    return tokenise(read_preferences(data_of(settings)), settings, chat, context=context, log=log)


def train(settings: DPOSettings | SFTSettings, out: Path, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the kind of training that the settings are of."""
    from reasonrag.dpo.train import train_dpo, train_sft  # imports TRL

    if isinstance(settings, SFTSettings):
        return train_sft(settings, out, log=log).summary
    return train_dpo(settings, out, log=log).summary


def _quick(data: Path, model: Path | str) -> dict[str, Any]:
    return {
        "data": str(data),
        "model": str(model),
        "method": "full",
        "device": "cpu",
        "learning_rate": 1e-3,
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "trainer": {"logging_steps": 1, "eval_steps": 3},
        "save_steps": 3,
        "min_examples": 1,
        "min_questions": 1,
    }


def save_calm_model(folder: Path) -> Path:
    """The tiny model, less sure of itself: in float32 its logits have the digits that exact comparisons need."""
    import torch
    from transformers import AutoModelForCausalLM

    save_tiny_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 0.2
    model.save_pretrained(folder)
    return folder
