"""Row 20b: a GPU that has no memory left, as other work has it. An engine takes smaller batches; all else says so.

The memory is taken by a plain allocation of this process, all but so many bytes.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from reasonrag.core.types import Completion, Message, Prompt
from reasonrag.llm.base import Sampling
from tests.e2e import product
from tests.faults.matrix import Figure
from tests.llm.tiny import loaded, save_tiny_model
from tests.training.toys import write_pairs

pytestmark = pytest.mark.gpu

GB = 10**9
# About 1,800 tokens each, no two of which begin alike; a token's keys and values take 32 kB.
PROMPTS = [
    Prompt((Message("user", f"{number} {'The river runs through the old town. ' * 200}"),)) for number in range(48)
]
GREEDY = Sampling(temperature=0.0, max_tokens=16)
_LINE = re.compile(r"error: .*the GPU has no memory left.*\n?")


@contextmanager
def free_bytes(left: int) -> Iterator[None]:
    """Take all of the GPU's memory but so many bytes, also what the allocator of this process keeps in between."""
    import torch

    torch.cuda.empty_cache()
    spare = torch.empty(left, dtype=torch.uint8, device="cuda")
    taken = []
    for size in (GB, GB // 10, GB // 100, 2 * 1024**2):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    del spare
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values need room: 20 M random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = save_tiny_model(tmp_path_factory.mktemp("roomy"), context=4096)
    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    shape = AutoConfig.from_pretrained(folder, num_key_value_heads=8, head_dim=64, **size)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def answers(llm: Any, prompts: Sequence[Prompt]) -> list[Completion | BaseException]:
    async def together() -> list[Completion | BaseException]:
        return await asyncio.gather(*(llm.complete(prompt, GREEDY) for prompt in prompts), return_exceptions=True)

    return asyncio.run(together())


def said(made: Sequence[Completion | BaseException]) -> list[Any]:
    """The ids of each answer, or why there is none."""
    return [each.token_ids if isinstance(each, Completion) else getattr(each, "cause", repr(each)) for each in made]


@pytest.mark.fault("20b", "a GPU without memory for the batch of an engine", "it says so, and answers later")
def test_an_engine_goes_on_with_what_is_left(roomy_model: Path, figure: Figure) -> None:
    llm = loaded(roomy_model, batch_size=4, device="cuda")
    with free_bytes(GB // 50):
        refused = said(answers(llm, PROMPTS[:4]))
    later = said(answers(llm, PROMPTS[:4]))
    answered = [each for each in later if not isinstance(each, str)]
    figure(f"20 MB left: {refused.count('engine')} of 4 fail so; {len(answered)} of 4 answered later")
    asyncio.run(llm.aclose())
    assert refused == ["engine"] * 4
    assert len(answered) == 4


def steps(out: Path) -> int:
    return len(list((out / "checkpoints").glob("checkpoint-*/complete.json")))


@pytest.mark.fault(
    "20b",
    "a training on a GPU without memory",
    "one line, exit code 2; with memory again it goes on to the weights of one that always had it",
)
def test_a_training_goes_on_when_there_is_memory_again(roomy_model: Path, tmp_path: Path, figure: Figure) -> None:
    from safetensors.torch import load_file

    command = ("dpo", "train", "--data", write_pairs(tmp_path / "pairs"), "--model", roomy_model)
    command += ("--batch-size", "4", "--save-steps", "1", "--set", "method=full", "--set", "max_steps=6")
    command += ("--min-examples", "1")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert product.run(*command, "--out", whole, fresh=True).returncode == 0
    child = product.start(*command, "--out", out, fresh=True)
    product.wait_until(lambda: steps(out) > 0 or child.poll() is not None)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    for left in (GB, GB // 5):
        with free_bytes(left):
            refused = product.run(*command, "--out", out, fresh=True)
        lines = [line for line in refused.stderr.splitlines() if "memory" in line]
        figure(f"dpo train, {left / GB:g} GB left: exit code {refused.returncode}, {len(lines)} line")
        print(refused.stdout, refused.stderr)
        assert refused.returncode == 2 and len(lines) == 1 and _LINE.fullmatch(lines[0])
        assert "Traceback" not in refused.stderr
    done = product.run(*command, "--out", out, fresh=True)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, out))
    farthest = max(float((one[name] - other[name]).abs().max()) for name in one)
    figure(f"with memory again: exit code {done.returncode}, weights differ by {farthest:.1g} at most")
    assert "resuming from checkpoint-" in done.stdout + done.stderr
    assert done.returncode == 0 and farthest < 1e-5
