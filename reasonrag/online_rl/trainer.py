"""TRL's GRPOTrainer on our rollouts: it asks for nothing but token rows, and never sees a tag or a judge.

What TRL 1.16 does with `rollout_func` is not all documented; tests/online_rl/test_trainer.py holds it to this:
tokens with mask 0 get no gradient, prompts come repeated and in whole groups, a row without a reward gets no advantage,
an episode without an end token counts as truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from reasonrag.core.errors import RunError
from reasonrag.core.text import one_line
from reasonrag.llm.continuous import BorrowingLLM
from reasonrag.llm.weight_sync import WeightSync
from reasonrag.llm.weight_transfer import merged_parameters
from reasonrag.online_rl.collector import Collector
from reasonrag.online_rl.samples import Batch, Sample
from reasonrag.online_rl.validation import Watch, mean_figures
from reasonrag.training.callbacks import GuardedTrainer

# It would print a whole trajectory wherever a reward is missing; those are counted, see `collector`.
logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)

T = TypeVar("T")

# TRL takes them for names of columns that a reward function reads.
REWARD = "episode_reward"


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
    local: BorrowingLLM | None
    weights: WeightSync | None
    runner: asyncio.Runner
    seen: Callable[[Batch, int], None]
    batch_steps: int = 1


class AgenticGRPOTrainer(GuardedTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer, whose rollouts are made by our engine and scored by our reward."""

    def __init__(self, *args: Any, rollouts: Rollouts, watch: Watch, importance: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, reward_funcs=[episode_reward], rollout_func=self._rollout, **kwargs)
        self.rollouts = rollouts
        self.watch = watch
        self.pushed: int | None = None  # the step whose weights the engine has
        if importance:
            # Only now, or TRL would build a vLLM engine of its own. From here on this means: sync the weights
            # before rollouts, compute the old log-probabilities, and correct by the ratio to the sampler's.
            self.use_vllm, self.vllm_generation, self._last_loaded_step = True, _Synced(), -1

    def _rollout(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any] | None]:
        step = self.state.global_step
        number = step // self.rollouts.batch_steps
        batch = self.together(lambda: self.rollouts.collector.batch(number, step=step), step=step)
        if len(batch.samples) != len(prompts):
            raise RuntimeError(f"{len(batch.samples)} trajectories for {len(prompts)} places of a batch")
        self.rollouts.seen(batch, step)
        made = rows(batch.samples, mask_truncated=self.mask_truncated_completions)
        if self.use_vllm and made["logprobs"] is None:
            raise RunError(
                "the rollouts come without log-probabilities, which the correction needs; set importance to off"
            )
        return made

    def together(self, work: Callable[[], Coroutine[Any, Any, T]], *, step: int) -> T:
        """What comes of `work` with the engine; where it fails on any process, all save what they have and end.

        Raises:
            Exception: what this process's raised.
            RunError: another process failed.
        """
        made: list[T] = []
        failure: Exception | None = None
        try:
            with self.rolling(step):
                made.append(self.rollouts.runner.run(work()))
        except Exception as error:  # whatever it is: the other processes wait for this one
            failure = error
        told = one_line(f"{type(failure).__name__}: {failure}")[:500] if failure else None
        failures = [found for found in gather_object([told]) if found is not None]
        if failures:
            self._keep(step)
            raise failure or RunError(f"another process of this training failed ({failures[0]})")
        return made[0]

    def _keep(self, step: int) -> None:
        """A checkpoint of a step's weights, unless there is one, or a batch of rollouts is half used."""
        there = gather_object([(Path(self.args.output_dir) / f"checkpoint-{step}").exists()])[0]
        if step and step % self.rollouts.batch_steps == 0 and not there:
            self._save_checkpoint(self.model, trial=None)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # A training goes on with a new batch: it is neither stopped nor saved in the middle of one. A signal, or a
        # collapse, is noticed again after the next step.
        if self.state.global_step % self.rollouts.batch_steps and self.state.global_step < self.state.max_steps:
            self.control.should_training_stop = self.control.should_save = False
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        scored = torch.tensor([row[REWARD] is not None for row in inputs], device=self.accelerator.device)
        scored = self.accelerator.gather(scored.float())
        out["rows_per_scored"] = scored.numel() / scored.sum().clamp(min=1.0)
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        # These are means over rows, of which those without a reward are none.
        return loss * inputs["rows_per_scored"] if self.loss_type in ("grpo", "dr_grpo") else loss

    def note(self, figures: dict[str, float]) -> None:
        """Figures of a batch, for the log and the guards; means over all processes."""
        means = mean_figures(gather_object([figures]))
        for name, value in means.items():
            self._metrics["train"][name].append(value)
        self.watch.figures = means

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        # A look at held-out questions comes between two steps: TRL would file the next step's figures under it.
        parent: Any = GRPOTrainer if not any(name.startswith("eval_") for name in logs) else GRPOTrainer.__base__
        parent.log(self, logs, start_time)

    def save_extra_state(self, checkpoint: Path) -> None:
        self.watch.save(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.watch.restore(Path(checkpoint))

    @contextlib.contextmanager
    def rolling(self, step: int) -> Iterator[None]:
        """The engine with the weights of now."""
        local, weights = self.rollouts.local, self.rollouts.weights
        if weights is not None and self.pushed != step:
            weights.push(merged_parameters(self.accelerator.unwrap_model(self.model)))
            self.pushed = step
        if local is None:
            yield
            return
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as model, local.lent(model):
            yield


def rows(samples: Sequence[Sample], *, mask_truncated: bool) -> dict[str, list[Any] | None]:
    """What TRL's `rollout_func` returns: lists by column, one entry a sample.

    A sample without a reward has a mask of zeros: it counts in no mean and no loss. So has one that was cut off, if
    `mask_truncated`: TRL itself would miss one that is over its budget and ends with an end token.

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
        "logprobs": [list(s.transcript.logprobs or ()) for s in samples] if exact else None,
        "env_mask": [_mask(sample, mask_truncated) for sample in samples],
        REWARD: [sample.score.value for sample in samples],
    }


def _mask(sample: Sample, mask_truncated: bool) -> list[int]:
    written = sample.transcript
    teaches = sample.score.value is not None and not (written.truncated and mask_truncated)
    return list(written.mask) if teaches else [0] * len(written.mask)


def episode_reward(prompts: Any, completions: Any, episode_reward: list[float | None], **columns: Any) -> Any:
    """The rewards as they were made, in TRL's form of a reward function."""
    return episode_reward


class _Synced:
    """Stands where TRL's vLLM engine would: weights are pushed by `rolling`, before every batch."""

    def sync_weights(self) -> None:
        """Nothing more to do."""
