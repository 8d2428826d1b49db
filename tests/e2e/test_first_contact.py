"""A model that somebody brings along, and that cannot work as it is: one line, and what to do next."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e import product
from tests.faults.matrix import Figure
from tests.llm.tiny import save_tiny_model
from tests.training.toys import write_pairs

DEMO = ("build-tree", "--preset", "demo", "--limit", "6")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a chat template, 512 positions."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def huge(tiny: Path) -> Path:
    """The same, with weights whose header says that they are a trillion numbers."""
    folder = tiny.with_name("huge")
    shutil.copytree(tiny, folder)
    tensor = {"dtype": "BF16", "shape": [2**20, 2**20], "data_offsets": [0, 2**41]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def last_line(code: int, *args: str | Path) -> str:
    """The last line that `reasonrag` says on stderr, without a traceback."""
    done = product.run(*args)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "No pairs" not in done.stdout  # where no question was finished, that is not why there are none
    line = done.stderr.splitlines()[-1]
    print(line)
    return line


def test_a_base_model_without_a_chat_template(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", chat_template=None)
    done = product.run(*DEMO, "--policy", f"hf:{base}", "--out", tmp_path / "run")
    assert done.returncode == 2
    line, command = done.stderr.splitlines()[-2:]
    assert line.startswith("error: ") and "chat template" in line
    assert command.startswith("try: reasonrag build-tree ") and "--chat-template" in command


def test_a_model_that_never_writes_a_step_that_can_be_read(tiny: Path, tmp_path: Path) -> None:
    args = (*DEMO, "--policy", f"hf:{tiny}", "--max-tokens", "12", "--iterations", "1", "--out", tmp_path / "run")
    line = last_line(2, *args)
    assert line.startswith("error: hf:tiny@") and ": 0 of the first 12 steps can be read (" in line
    assert "--max-tokens 48" in line and line.endswith("pass --max-unreadable 1 to continue anyway")
    done = product.run(*args, "--max-unreadable", "1")
    assert done.returncode == 0, done.stderr
    assert "0 of the first 12 steps can be read" in done.stderr
    assert "steps that cannot be read" in done.stdout


def test_evaluating_and_training_it_online_say_the_same(tiny: Path, tmp_path: Path) -> None:
    asked = ("--prompts", "brief", "--top-k", "1")
    policy = ("--policy", f"base=hf:{tiny}", "--max-tokens", "12")
    line = last_line(2, "eval", "--dataset", "demo", "--limit", "12", *policy, *asked, "--out", tmp_path / "eval")
    assert ": 0 of the first 12 steps can be read (" in line and "--max-tokens 48" in line
    small = ("--group-size", "8", "--questions-per-step", "2", "--batch-size", "4", "--max-steps", "1")
    sets = ("--set", "rollout.max_tokens=12", "--set", "device=cpu", "--set", "validation.steps=0")
    train = ("rl", "train", "--dataset", "demo", "--model", tiny, "--reward", "outcome", *asked, *small, *sets)
    line = last_line(2, *train, "--out", tmp_path / "rl")
    assert ": 0 of the first 12 steps can be read (" in line and "--set rollout.max_tokens=48" in line
    assert not (tmp_path / "rl/training.json").exists()


@pytest.mark.fault(
    "18", "prompts longer than the context of a model in this process", "set aside and counted, no reward"
)
def test_a_prompt_that_is_longer_than_the_context(tiny: Path, tmp_path: Path, figure: Figure) -> None:
    args = (*DEMO, "--policy", f"hf:{tiny}", "--prompts", "default", "--out", tmp_path / "run")
    line = last_line(1, *args, "--max-failed", "0.9")  # all six are tried
    figure(line.partition(";")[0])
    assert line.startswith("6 questions failed, 0 were not tried (6 context_overflow)")


def test_too_little_memory_for_the_weights(huge: Path, tmp_path: Path) -> None:
    line = last_line(2, *DEMO, "--policy", f"hf:{huge}", "--out", tmp_path / "run")
    assert "it takes at least 2,199.0 GB of memory (1,099.51 billion parameters)" in line
    assert "GB are free; take a smaller model" in line
    pairs = write_pairs(tmp_path / "pairs")
    full = ("sft", "train", "--data", pairs, "--model", huge, "--method", "full", "--set", "device=cpu")
    line = last_line(2, *full, "--min-examples", "48", "--out", tmp_path / "sft")
    assert "it takes at least 17,592.2 GB of memory" in line
    assert line.endswith("GB are free; take a smaller model, --method lora, or a machine with more memory")
