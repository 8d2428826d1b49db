"""What a training step of ours costs next to plain TRL's: DPO.

    python -m benchmarks training [--turns 2] [--prompt 200] [--completion 20] [--layers 8 | --model DIR]

The trainers of a table take turns in one process with one thread, so whatever else the machine does hits all alike. A
step is collating, forward, backward and the optimizer; its figure is CPU seconds. Ratios are medians over turns of ours
by TRL's in the same turn. Memory is what one step adds to the process at its peak. The small model is the demo world's
policy, all weights trained; the large one has random weights, the vocabulary of Gemma 3, tied embeddings and adapters,
or is a model in a folder.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.process import memory_bytes
from benchmarks.table import Table, options

os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
warnings.filterwarnings("ignore", category=FutureWarning)

VOCABULARY = 262_144  # of the large model
SMALL_TURNS = 5  # steps of each trainer on the small model, which take a fraction of a second
Step = Callable[[], None]


class Bench:
    """A table, and the model whose trainers are compared.

    Attributes:
        device: arguments of a trainer that say where it computes, and in which precision.
        clock: returns the seconds that are compared, in units of `unit`.
        peak_bytes: returns how far the memory rises during a step.
    """

    device: ClassVar[dict[str, bool]] = {"bf16": False, "use_cpu": True}
    unit = "CPU s"
    clock = staticmethod(time.process_time)

    def __init__(self, table: Table, folder: str) -> None:
        self.table, self.folder = table, folder

    def use(self, path: str, tokenizer: Any, *, adapter: bool) -> None:
        """Train this model from now on: adapters on it, or all its weights."""
        self.path, self.tokenizer, self.adapter = path, tokenizer, adapter

    def weights(self) -> Any:
        """Load the model once more."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def step(self, kind: Any, config: Any, rows: Any, **more: Any) -> Step:
        """Return a step of a trainer of that kind on all of `rows`."""
        from peft import LoraConfig

        arguments = config(
            output_dir=self.folder, **self.device, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False, learning_rate=1e-6, per_device_train_batch_size=len(rows),
            **more.pop("arguments", {}),
        )  # fmt: skip
        adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if self.adapter else None
        trainer = kind(
            model=self.weights(), args=arguments, train_dataset=rows, processing_class=self.tokenizer,
            peft_config=adapter, **more,
        )  # fmt: skip
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1  # set by `train` otherwise
        trainer.model.train()
        batch = list(trainer.train_dataset)

        def run() -> None:
            trainer.training_step(trainer.model, trainer.data_collator(batch), None)
            trainer.optimizer.step()
            trainer.model.zero_grad()

        return run

    def compare(self, title: str, steps: dict[str, Step], turns: int, *, limit: str = "") -> None:
        """Add the figures of steps, the first of which is TRL's; `limit` is that of the second one."""
        print(f"{title} ...", file=sys.stderr)
        theirs, *ours = steps
        peaks = {name: self.peak_bytes(run) for name, run in steps.items()}  # which warms them up, too
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(turns):
            for name in steps if turn % 2 else reversed(steps):
                started = self.clock()
                steps[name]()
                seconds[name].append(self.clock() - started)
        self.table.row(f"{title}: {theirs}", median(seconds[theirs]), f"{self.unit} a step")
        for name in ours:
            ratio = median(a / b for a, b in zip(seconds[name], seconds[theirs], strict=True))
            self.table.row(f"{title}: {name}", ratio, f"of TRL's {self.unit}", limit=limit if name == ours[0] else "")
        unit = f"of TRL's {peaks[theirs] / 1e6:.0f} MB"
        self.table.row(
            f"{title}: {ours[0]}, memory", peaks[ours[0]] / peaks[theirs], unit, limit="<= 1" if limit else ""
        )

    @staticmethod
    def peak_bytes(run: Step) -> float:
        """Return how far the resident memory of this process rises during a step."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is what is resident now
        before = memory_bytes("VmRSS")
        run()
        return memory_bytes("VmHWM") - before


def chats(count: int) -> list[dict[str, Any]]:
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


def token_pair(prompt: int, completion: int) -> dict[str, list[int]]:
    """Return a pair of so many token ids at random."""
    rng = random.Random(0)
    lengths = {"prompt_ids": prompt, "chosen_ids": completion, "rejected_ids": completion}
    return {name: [rng.randrange(VOCABULARY) for _ in range(length)] for name, length in lengths.items()}


def small(bench: Bench) -> None:
    """DPO on the demo world's policy, 16 pairs a step."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from reasonrag.dpo.train import StepDPOTrainer
    from reasonrag.training.model import model_path

    path = model_path("demo")
    bench.use(path, AutoTokenizer.from_pretrained(path), adapter=False)
    rows, unlimited = Dataset.from_list(chats(16)), {"max_length": None}
    ids = DPOTrainer(
        bench.weights(), args=DPOConfig(bench.folder, **bench.device), train_dataset=rows,
        processing_class=bench.tokenizer,
    ).train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])  # fmt: skip

    def step(kind: Any, rows: Any, **more: Any) -> Step:
        return bench.step(kind, DPOConfig, rows, ref_model=bench.weights(), arguments=unlimited, **more)

    steps = {
        "TRL, conversational rows": step(DPOTrainer, rows),
        "ours, token rows": step(StepDPOTrainer, ids),
        "ours, conversational rows": step(StepDPOTrainer, rows),
    }
    bench.compare("DPO, small vocabulary", steps, SMALL_TURNS, limit="<= 1.02")


def large(
    bench: Bench,
    turns: int,
    *,
    layers: int,
    prompt: int,
    completion: int,
    model: str | None = None,
    width: int = 128,
    limit: str = "<= 0.6",
) -> None:
    """DPO with a vocabulary of 262,144 tokens, or on the model in a folder."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    from reasonrag.dpo.train import StepDPOTrainer

    path = model or str(Path(bench.folder, "large"))
    if model is None:
        torch.manual_seed(0)
        shape = AutoConfig.for_model(
            "gemma3_text", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=8 * width, head_dim=32,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=1, sliding_window=512,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    bench.use(path, bench.tokenizer, adapter=True)
    pair = token_pair(prompt, completion)

    class TokenRows(DPOTrainer):  # type: ignore[misc]
        """TRL's own trainer, spared the tokenizing that it knows no way around."""

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    unlimited: dict[str, Any] = {"arguments": {"max_length": None}}
    rows = Dataset.from_list([pair])
    steps = {
        "TRL": bench.step(TokenRows, DPOConfig, rows, **unlimited),
        "ours": bench.step(StepDPOTrainer, DPOConfig, rows, **unlimited),
    }
    bench.compare("DPO, large vocabulary", steps, turns, limit=limit)
    made = Path(model).name if model else f"{layers} of Gemma 3's layers, {width} wide, {VOCABULARY:,} tokens"
    bench.table.note(
        f"large: {made}, LoRA r 16; {prompt} tokens of prompt and {completion} that are scored; one pair a step"
    )


def main() -> None:
    import torch
    from datasets import disable_progress_bars
    from transformers.utils import logging

    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=2, help="DPO steps of each trainer on the large model")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt for the large model")
    parser.add_argument("--completion", type=int, default=20, help="tokens that are scored, for the large model")
    parser.add_argument("--model", help="folder of the large model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the large model")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    torch.set_num_threads(1)
    table = Table(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(table, folder)
        small(bench)
        sizes = {"layers": given.layers, "prompt": given.prompt, "completion": given.completion}
        large(bench, given.turns, **sizes, model=given.model)
    table.show(given.json)


if __name__ == "__main__":
    main()
