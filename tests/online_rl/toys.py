"""Rewards, judges and trainings that the tests of online training share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, raises

from reasonrag.core.config import ModelConfig
from reasonrag.core.errors import LLMError
from reasonrag.core.types import Completion, FinishReason, Prompt, Trajectory
from reasonrag.llm.base import Sampling
from reasonrag.online_rl.collector import RolloutLoop
from reasonrag.online_rl.settings import RLSettings, load_rl_settings
from reasonrag.online_rl.train import train_online
from reasonrag.pipeline.parts import open_llm
from reasonrag.rewards import RewardParts, RewardSettings, Score
from reasonrag.training.run import TrainingRun
from tests import warmed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # of processes of their own

# A run of seconds: the demo world's policy of one format, four questions with four attempts each.
QUICK: dict[str, Any] = {
    "max_steps": 2,
    "save_steps": 2,
    "rollout.questions_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_tokens": 32,
    "format.max_steps": 3,
    "per_device_train_batch_size": 16,
    "validation.steps": 0,
}


def settings(preset: str = "demo-outcome", **overrides: Any) -> RLSettings:
    """Of a quick training; names have `__` for a dot."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_rl_settings(preset=preset, overrides=QUICK | named)


def train(wanted: RLSettings, out: Path, *, log: Callable[[str], None]) -> dict[str, Any]:
    """The training, its lines to `log`."""
    return train_online(wanted, out, log=log).summary


def quietly(wanted: RLSettings, out: Path) -> dict[str, Any]:
    """The training, without its lines."""
    return train(wanted, out, log=lambda line: None)


class _Ready(Exception):
    """Carries a trainer out of `train_online`, before its first step."""


@contextmanager
def made(wanted: RLSettings, out: Path) -> Iterator[Any]:
    """The real trainer of some settings, ready to make rollouts; nothing is trained yet."""

    def ready(run: Any, trainer: Any, **_: Any) -> None:
        trainer.current_gradient_accumulation_steps = run.arguments.gradient_accumulation_steps
        raise _Ready(trainer)

    with MonkeyPatch.context() as patch, ExitStack() as stack:
        close = RolloutLoop.close
        patch.setattr(RolloutLoop, "close", lambda loop: stack.callback(close, loop))  # once the test has ended
        patch.setattr(TrainingRun, "train", ready)
        with raises(_Ready) as caught:
            train_online(wanted, out, log=lambda line: None)
        patch.undo()
        yield caught.value.args[0]


def rollouts(out: Path, step: int, process: int = 0) -> list[dict[str, Any]]:
    """The rows of a step."""
    import pyarrow.parquet as pq

    suffix = f"-{process}" if process else ""
    return pq.read_table(out / "rollouts" / f"step-{step:06d}{suffix}.parquet").to_pylist()


def weights(folder: Path) -> dict[str, Any]:
    """Of a saved policy."""
    from safetensors.torch import load_file

    (file,) = (folder / name for name in ("model.safetensors", "adapter_model.safetensors") if (folder / name).exists())
    return load_file(file)


def farthest(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def logged(history: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure of every step."""
    return [entry[name] for entry in history if "loss" in entry and name in entry]


CHILD = """
import json, os, signal, sys
from pathlib import Path
from reasonrag.online_rl.settings import load_rl_settings
from reasonrag.online_rl.train import train_online

tree, out, at = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

if at:  # while the rewards of that step are worked out
    import tests.online_rl.toys as toys
    toys.KILL_AT = at

train_online(load_rl_settings(overrides=tree), out, log=lambda line: print(line, flush=True))
"""


def child(wanted: RLSettings, out: Path, *, kill_at: int = 0, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """The same training in a process, or in several, of its own."""
    script = out.parent / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    arguments = [json.dumps(wanted.model_dump(mode="json", exclude_unset=True)), str(out), str(kill_at)]
    environment = os.environ | ENVIRONMENT
    if processes == 1:
        return warmed.run(warmed.script, str(script), *arguments, environment=environment)
    return warmed.run_ranks(processes, warmed.script, str(script), *arguments, environment=environment)


KILL_AT = 0
SIGNAL_AT = 0


class OwnReward:
    """A reward of one's own, as its author would write it: the length of what was said decides, so groups differ."""

    def __init__(self, settings: RewardSettings, parts: RewardParts) -> None:
        self.format = parts.format
        self.seen: list[int] = []

    async def score(self, trajectories: Sequence[Trajectory], *, step: int) -> list[Score]:
        return [self.one(trajectory, step) for trajectory in trajectories]

    def one(self, trajectory: Trajectory, step: int) -> Score:
        words = sum(len(step.completion.text.split()) for step in trajectory.steps)
        return Score(1.0 / (1.0 + words % 7), {"words": float(words)})

    def observe(self, scores: Sequence[Score], *, step: int) -> None:
        self.seen.append(step)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


class KilledReward(OwnReward):
    """Ends the process, as kill -9 does, while the rewards of a step are worked out."""

    def one(self, trajectory: Trajectory, step: int) -> Score:
        if KILL_AT and step + 1 == KILL_AT:
            os.kill(os.getpid(), 9)
        return super().one(trajectory, step)


class SignalledReward(OwnReward):
    """Somebody presses Ctrl-C while the rewards of a step are worked out."""

    def one(self, trajectory: Trajectory, step: int) -> Score:
        global SIGNAL_AT
        if SIGNAL_AT and step + 1 == SIGNAL_AT:
            SIGNAL_AT = 0
            signal.raise_signal(signal.SIGINT)
        return super().one(trajectory, step)


class HolesReward(OwnReward):
    """No reward for every fifth trajectory or so, none that is a number for some, and gradients switched off."""

    def one(self, trajectory: Trajectory, step: int) -> Score:
        import torch

        torch.set_grad_enabled(False)  # as for a model of its own
        score = super().one(trajectory, step)
        match int(score.parts["words"] or 0) % 5:
            case 0:
                return Score(None, score.parts, "no_idea")
            case 1 if score.value and score.value < 0.2:
                return Score(float("nan"), score.parts)
        return score


class HugeReward(OwnReward):
    """A finite number, whose square is none."""

    def one(self, trajectory: Trajectory, step: int) -> Score:
        return Score(1e30)


class DownJudge:
    """A judge that goes away after as many calls as the file says that the environment names."""

    name = "demo-judge:0:0"

    def __init__(self, config: ModelConfig) -> None:
        self.inner = open_llm(config.model_copy(update={"spec": "demo-judge"}), "judge")

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        if not self._is_there():
            raise LLMError("connection refused", cause="unreachable")
        return await self.inner.complete(prompt, sampling)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _is_there(self) -> bool:
        left = Path(os.environ["TOY_JUDGE_CALLS"])
        calls = int(left.read_text())
        left.write_text(str(max(calls - 1, 0)))
        return calls > 0


class Words:
    """An LLM that says what a function of prompt and seed says, with the ids of a vocabulary of its own words."""

    name = "words"

    def __init__(self, say: Callable[[Prompt, int], str | Completion | Exception]) -> None:
        self.say = say
        self.asked: list[tuple[str, int]] = []

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        seed = sampling.seed or 0
        self.asked.append((prompt.messages[-1].content, seed))
        await asyncio.sleep(0)
        said = self.say(prompt, seed)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Completion):
            return said
        ids = tuple(sum(map(ord, word)) % 97 + 5 for word in said.split())
        return Completion(said, FinishReason.STOP, ids, (-0.7,) * len(ids))

    async def aclose(self) -> None:
        pass
