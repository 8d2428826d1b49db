"""What a step of our trainer costs next to TRL's own, on the same batch.

    python benchmarks/dpo_step.py [--model FOLDER_OR_HUB_ID] [--steps 40] [--batch 16]

Both trainers live in one process and take turns, so that whatever else the machine does hits both alike. A step is
collating, forward, backward and the optimizer. The last two rows are losses that TRL has not got.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from statistics import median
from typing import Any

os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
warnings.filterwarnings("ignore", category=FutureWarning)

WARM_UP = 5


def rows(count: int) -> list[dict[str, Any]]:
    """Conversational pairs, as TRL reads them."""
    facts = " ".join(f"The {word} stands by the river and the sea." for word in ("town", "mill", "inn", "tower"))
    return [
        {
            "prompt": [{"role": "user", "content": f"{facts} Question {number}: where was the director born?"}],
            "chosen": [{"role": "assistant", "content": f"<query>where was director {number} born</query>"}],
            "rejected": [{"role": "assistant", "content": f"<answer>town {number}</answer>"}],
        }
        for number in range(count)
    ]


def trainer(kind: Any, model: str, folder: str, data: Any, **more: Any) -> Any:
    """A trainer that is ready for steps of its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig

    gpu = torch.cuda.is_available()
    arguments = DPOConfig(
        output_dir=folder, max_length=None, bf16=gpu, use_cpu=not gpu, gradient_checkpointing=gpu,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=gpu, learning_rate=1e-6,
    )  # fmt: skip
    weights = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)]
    made = kind(
        model=weights[0],
        ref_model=weights[1],
        args=arguments,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        **more,
    )
    made.create_optimizer()
    made.current_gradient_accumulation_steps = 1  # set by `train` otherwise
    return made


def step_s(trainer: Any, extra: dict[str, float]) -> float:
    """Seconds of one step on the whole data set."""
    import torch

    start = time.perf_counter()
    batch = trainer.data_collator([{**row, **extra} for row in trainer.train_dataset])
    trainer.training_step(trainer.model, batch)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers.utils import logging
    from trl import DPOTrainer

    from reasonrag.dpo.trainer import StepCollator, StepDPOTrainer
    from reasonrag.training.model import model_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    logging.disable_progress_bar()
    disable_progress_bars()
    torch.set_num_threads(1)
    model, data = model_path(options.model), Dataset.from_list(rows(options.batch))
    with tempfile.TemporaryDirectory() as folder:
        plain = trainer(DPOTrainer, model, folder, data)
        ids = plain.train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
        collator = StepCollator(plain.processing_class.pad_token_id)
        weighted = trainer(StepDPOTrainer, model, folder, ids, data_collator=collator)
        entries: list[tuple[str, Any, dict[str, float]]] = [
            ("TRL, conversational rows", plain, {}),
            ("ours, conversational rows", trainer(StepDPOTrainer, model, folder, data), {}),
            ("ours, token rows", trainer(StepDPOTrainer, model, folder, ids), {}),
            ("ours, weights and margins", weighted, {"pair_weight": 1.0, "pair_margin": 0.1}),
            ("ours, with an SFT term", trainer(StepDPOTrainer, model, folder, ids, sft_weight=0.1), {}),
        ]
        times: list[list[float]] = [[] for _ in entries]
        for turn in range(WARM_UP + options.steps):
            order = range(len(entries)) if turn % 2 else reversed(range(len(entries)))
            for index in order:
                _, made, extra = entries[index]
                seconds = step_s(made, extra)
                if turn >= WARM_UP:
                    times[index].append(seconds)
    print(f"{options.batch} pairs a step, {options.steps} steps each, medians")
    for (name, _, _), measured in zip(entries, times, strict=True):
        ratio = median(a / b for a, b in zip(measured, times[0], strict=True))
        print(
            f"{name:28}{1e3 * median(measured):9.2f} ms{median(measured) / median(times[0]):8.3f} x{ratio:8.3f} paired"
        )


if __name__ == "__main__":
    main()
