"""TRL's GRPOTrainer on our rollouts: it asks for nothing but token rows, and never sees a tag or a judge.

What TRL 1.16 does with `rollout_func` is not all documented; tests/online_rl/test_trainer.py holds it to this:
tokens with mask 0 get no gradient, prompts come repeated and in whole groups, a row without a reward is left out, an
episode without an end token counts as truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from reasonrag.errors import ReasonRAGError
from reasonrag.llm.local import TransformersLLM
from reasonrag.online_rl.collect import Collector
from reasonrag.online_rl.samples import Batch, Sample
from reasonrag.online_rl.watch import Watch

# TRL takes them for names of columns that a reward function reads.
REWARD = "episode_reward"


class Weights(Protocol):
    """Brings the trainer's weights to where trajectories are made."""

    def push(self, model: Any) -> None:
        """Send the weights of a model; trajectories of the older ones must have ended."""
        ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What makes the rollouts of a training.

    Args:
        collector: with the engine.
        local: the engine's LLM where it works on the trainer's own weights; else None.
        weights: sends them away where the engine is elsewhere; else None.
        runner: whose event loop everything runs in.
        seen: told of each batch, with the optimizer steps before it.
        batch_steps: optimizer steps that one batch serves.
    """

    collector: Collector
    local: TransformersLLM | None
    weights: Weights | None
    runner: asyncio.Runner
    seen: Callable[[Batch, int], None]
    batch_steps: int = 1


@cache
def agentic_grpo_trainer() -> Any:
    """The trainer's class; TRL is imported here."""
    from accelerate.utils import gather_object
    from trl import GRPOTrainer
    from trl.models import unwrap_model_for_generation

    class AgenticGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
        def __init__(
            self, *args: Any, rollouts: Rollouts, watch: Watch, importance: bool = False, **kwargs: Any
        ) -> None:
            super().__init__(*args, reward_funcs=[episode_reward], rollout_func=self._rollout, **kwargs)
            self.rollouts = rollouts
            self.watch = watch
            self.pushed: int | None = None  # the step whose weights the engine has
            if importance:
                # Only now, or TRL would build a vLLM engine of its own. From here on this means: sync the weights
                # before rollouts, compute the old log-probabilities, and correct by the ratio to the sampler's.
                self.use_vllm, self.vllm_generation, self._last_loaded_step = True, _Synced(), -1

        def _rollout(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
            step = self.state.global_step
            batch = self._batch(step)
            if len(batch.samples) != len(prompts):
                raise RuntimeError(f"{len(batch.samples)} trajectories for {len(prompts)} places of a batch")
            self.rollouts.seen(batch, step)
            return rows(batch.samples)

        def _batch(self, step: int) -> Batch:
            """The rollouts of a step; where they fail on any process, all save what they have and end."""
            batch, failure = None, None
            try:
                with self.rolling(step):
                    number = step // self.rollouts.batch_steps
                    batch = self.rollouts.runner.run(self.rollouts.collector.batch(number, step=step))
            except ReasonRAGError as error:
                failure = error
            failures = [found for found in gather_object([failure]) if found is not None]
            if batch is None or failures:
                if step:  # the weights are still those of the last step
                    self._save_checkpoint(self.model, trial=None)
                raise failure or failures[0]
            return batch

        def note(self, figures: dict[str, float]) -> None:
            """Figures of a batch, for the log and the guards; means over all processes."""
            found = gather_object([figures])
            means = {
                name: fmean([f[name] for f in found if name in f]) for name in sorted({n for f in found for n in f})
            }
            for name, value in means.items():
                self._metrics["train"][name].append(value)
            self.watch.figures = means

        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            # A look at held-out questions comes between two steps: TRL would file the next step's figures under it.
            parent: Any = GRPOTrainer if not any(name.startswith("eval_") for name in logs) else GRPOTrainer.__base__
            parent.log(self, logs, start_time)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            if self.accelerator.is_main_process:
                self.watch.save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.watch.restore(Path(checkpoint))

        @contextlib.contextmanager
        def rolling(self, step: int) -> Iterator[None]:
            """The engine with the weights of now."""
            local, weights = self.rollouts.local, self.rollouts.weights
            if weights is not None and self.pushed != step:
                weights.push(self.accelerator.unwrap_model(self.model))
                self.pushed = step
            if local is None:
                yield
                return
            with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as model, local.lent(model):
                yield

    return AgenticGRPOTrainer


def rows(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What TRL's `rollout_func` returns: lists by column, one entry a sample.

    A sample without a reward, or one that says nothing, has a mask of zeros: it counts in no mean and no loss.

    Raises:
        ValueError: a row whose columns differ in length: TRL would fill a short mask with ones, without a word.
    """
    for sample in samples:
        written = sample.transcript
        lengths = {len(written.completion_ids), len(written.mask), len(written.logprobs or written.mask)}
        if len(lengths) > 1 or not written.completion_ids:
            raise ValueError(f"a row of question {sample.question.id!r} has columns of lengths {sorted(lengths)}")
    exact = all(sample.transcript.logprobs is not None for sample in samples)
    return {
        "prompt_ids": [list(s.transcript.prompt_ids) for s in samples],
        "completion_ids": [list(s.transcript.completion_ids) for s in samples],
        "logprobs": [list(s.transcript.logprobs or ()) for s in samples] if exact else None,  # type: ignore[dict-item]
        "env_mask": [_mask(sample) for sample in samples],
        REWARD: [sample.score.value for sample in samples],
    }


def _mask(sample: Sample) -> list[int]:
    return list(sample.transcript.mask) if sample.score.value is not None else [0] * len(sample.transcript.mask)


def episode_reward(prompts: Any, completions: Any, episode_reward: list[float | None], **columns: Any) -> Any:
    """The rewards as they were made, in TRL's form of a reward function."""
    return episode_reward


class _Synced:
    """Stands where TRL's vLLM engine would: weights are pushed by `rolling`, before every batch."""

    def sync_weights(self) -> None:
        """Nothing more to do."""
