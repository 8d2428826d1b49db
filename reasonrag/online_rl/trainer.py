"""TRL's GRPOTrainer on our rollouts: it receives token rows with rewards, and never sees a tag or a judge.

TRL expects one row per trajectory. A format that asks with a fresh prompt at each step gives several: TRL
computes the advantages of the trajectories, and then each row gets its share; so do tokens, in PPO. TRL
1.16 documents `rollout_func` only in part; tests/online_rl/test_trainer.py checks the rules used here:
tokens with mask 0 get no gradient, a mask may hold weights, prompts come repeated and in whole groups, a
trajectory without a reward gets no advantage, and a row without an end token counts as truncated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import structlog
import torch
from accelerate.utils import DistributedType, gather_object
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from reasonrag.core.errors import RunError
from reasonrag.core.text import one_line
from reasonrag.llm.local import TransformersLLM
from reasonrag.llm.weight_sync import VLLMServerSync, merged_parameters
from reasonrag.online_rl.collector import (
    Batch,
    Collector,
    RolloutLoop,
    Validation,
    batch_metrics,
    collapse,
    mean_metrics,
    write_rollouts,
)
from reasonrag.online_rl.ppo import Critic, mean, token_advantages, whitened
from reasonrag.online_rl.rows import REWARD, Row, columns, group_advantages, has_variance, training_rows
from reasonrag.online_rl.settings import RLSettings
from reasonrag.training.trainer import ENOUGH_TOKENS, GuardedTrainer

# TRL would print a whole trajectory for each missing reward; the collector counts them.
logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)

log = structlog.get_logger()

Result = TypeVar("Result")

STATE = "online_rl.json"  # of reward and validation, in a checkpoint
_DIFFERENCE = "sampling/sampling_logp_difference/mean"  # of the engine's and the trainer's log-probabilities
_DRIFT, _SMALL = 10, 0.005  # warn above this multiple of the first step's difference, and above these nats
# A forward pass of more tokens is not faster per token, and wastes more on padding.
_ENOUGH_TOKENS = {"cpu": ENOUGH_TOKENS, "gpu": 16_384}


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The parts that make the rollouts of a training run."""

    collector: Collector
    local: TransformersLLM | None  # the engine's LLM if it uses the trainer's own weights
    weights: VLLMServerSync | None  # sends the weights to an engine elsewhere
    loop: RolloutLoop
    folder: Path  # gets a file of trajectories per step


class AgenticGRPOTrainer(GuardedTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer, with rollouts of our engine, scored by our reward.

    Args:
        rollouts: the parts that make them.
        validation: chooses the best policy; None without held-out questions.
        settings: of the training run.
    """

    def __init__(
        self, *args: Any, rollouts: Rollouts, validation: Validation | None, settings: RLSettings, **kwargs: Any
    ) -> None:
        super().__init__(*args, reward_funcs=[episode_reward], rollout_func=self._rollout, **kwargs)
        self.rollouts = rollouts
        self.validation = validation
        self.settings = settings
        self.batch_steps = settings.rollout.minibatches  # optimizer steps that use one batch
        self.pushed: int | None = None  # the step of the weights that the engine has
        self.returns = 0  # of the engine, when it got them
        self.begun: dict[int, Future[Batch]] = {}  # batches that are made beside the training, by number
        self.was_flat = False  # whether no group of the last batch had two different rewards
        self.critic: Critic | None = None  # of PPO; set after __init__, which sets the seed
        self.batch = Batch([])  # of this process
        self.rows: list[Row] = []  # its training rows, and padding
        # `[R, T]` of rows that are scored next: above 0 where the policy wrote a token; the first not scored yet.
        self.written, self.next_row = torch.empty(0), 0
        for model in filter(None, (self.model, self.ref_model)):
            model.register_forward_pre_hook(self._score_written, with_kwargs=True)
        self.averaging: str = self.args.loss_type
        if self.averaging in ("grpo", "dr_grpo"):
            # TRL divides the sum of this loss by a given number: with `weigh` it is any of them.
            self.loss_type: str = "dapo"
        if settings.correction:
            # Set after __init__, which would otherwise start a vLLM engine. From here on it
            # means: sync the weights before rollouts, compute the old log-probabilities,
            # and correct by the ratio to the sampler's. `_current_weights` pushes the
            # weights before every batch, so TRL's call has nothing to do.
            no_engine = SimpleNamespace(sync_weights=lambda: None)
            self.use_vllm, self.vllm_generation, self._last_loaded_step = True, no_engine, -1

    def _rollout(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any] | None]:
        """Return the columns of a new batch; TRL calls this where it would generate."""
        # Questions, G trajectories of each by the current
        # weights, rewards; DAPO replaces groups without a signal.
        self.batch = self.roll_out(self.state.global_step)
        # Token ids as they were sampled and read. Only sampled
        # ones (mask 1) are trained on, passages are not.
        truncated, credit, by_token = self.settings.mask_truncated, self.settings.credit, self.settings.by_token
        rows = training_rows(self.batch.groups, mask_truncated=truncated, credit=credit, by_token=by_token)
        # TRL divides the rows of each process into so many parts of one size, and drops what remains.
        parts = self.args.steps_per_generation
        count = -(-max(gather_object([len(rows)])) // parts) * parts
        self.rows = rows + [Row.padding(self.processing_class.pad_token_id)] * (count - len(rows))
        self.written, self.next_row = pad_sequence([torch.tensor(row.mask) for row in self.rows], batch_first=True), 0
        token_columns = columns(self.rows, self.batch.samples)
        if self.use_vllm and token_columns["logprobs"] is None:
            raise RunError(
                "the rollouts come without log-probabilities, which the correction needs; set importance to off"
            )
        return token_columns

    def roll_out(self, step: int) -> Batch:
        """Return this process's scored rollouts for the optimizer step after `step`, by the current weights."""
        number, collect = step // self.batch_steps, self.rollouts.collector.batch

        async def batch_made() -> Batch:
            return self.begun.pop(number).result() if number in self.begun else await collect(number)

        batch = self.run_everywhere(batch_made, step=step)
        if self.settings.rollout.ahead and step + self.batch_steps < self.state.max_steps:
            self.begun[number + 1] = self.rollouts.loop.begin(collect(number + 1))
        self.record(batch, number)
        return batch

    def run_everywhere(self, work: Callable[[], Coroutine[Any, Any, Result]], *, step: int) -> Result:
        """Run `work` on every process. If it fails on any of them, all save a checkpoint and stop.

        If the server was away meanwhile, the work is repeated: after
        a restart the server answers with its initial weights.

        Raises:
            Exception: the exception of this process.
            RunError: another process failed.
        """
        results: list[Result] = []
        failure: Exception | None = None
        wait(self.begun.values())  # rollouts that are under way have the weights that they began with
        if self.begun and self._was_away():
            self.begun.clear()
        try:
            # A reward with a model of its own may switch gradients off, for ever.
            with self._current_weights(step), torch.set_grad_enabled(torch.is_grad_enabled()):
                results.append(self.rollouts.loop.run(work()))
        except Exception as error:  # of any kind: the other processes wait for this one
            failure = error
        message = one_line(f"{type(failure).__name__}: {failure}")[:500] if failure else None
        if failures := [text for text in gather_object([message]) if text is not None]:
            # A checkpoint, unless the step has one or a batch of rollouts is only partly used.
            exists = gather_object([(Path(self.args.output_dir) / f"checkpoint-{step}").exists()])[0]
            if step and step % self.batch_steps == 0 and not exists:
                self._save_checkpoint(self.model, trial=None)
            raise failure or RunError(f"another process of this training run failed ({failures[0]})")
        return self.run_everywhere(work, step=step) if self._was_away() else results[0]

    def _was_away(self) -> bool:
        """Return whether the server was away since it got the weights, as any process saw it; it gets them again."""
        is_away = self.rollouts.weights is not None and self._engine_returns() != self.returns
        if is_lost := any(gather_object([is_away])):
            log.warning("the server was away: pushing the weights again and repeating these rollouts")
            self.pushed = None
        return is_lost

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's tensors of a new batch with the advantage of each row, or of each token.

        TRL makes the batch (`_rollout`), scores its tokens with the
        old and the reference policy, and computes the advantages of
        GRPO: (reward - mean of the group) / deviation.
        """
        by_token = self.settings.by_token
        if by_token:
            self.beta = self.args.beta  # here TRL scores the tokens with the reference model, too
        tensors: dict[str, Any] = super()._generate_and_score_completions(inputs)
        # `[R, T]` whether the policy wrote a token, and it is trained on.
        own_tokens = (tensors["completion_mask"] * tensors["tool_mask"]) > 0
        if by_token:
            tensors["advantages"] = self._token_advantages(tensors, own_tokens)
            self.beta = 0.0  # the penalty is in the rewards, and not in the loss
        elif self.settings.algorithm == "rloo":
            groups = self.batch.groups
            of_groups = [group_advantages(group.rewards, baseline="others", scale=False) for group in groups]
            tensors["advantages"] = torch.tensor(of_groups, device=tensors["advantages"].device).flatten()
        scored = torch.tensor(sum(row[REWARD] is not None for row in inputs), device=self.accelerator.device)
        weighed = self.weigh(tensors, scored=int(self.accelerator.gather(scored).sum()))
        # The log has the advantages of the loss by trajectory
        # `[N]` and by row `[R]`, also if each token has its own.
        of_trajectories, of_rows = tensors["advantages"], weighed["advantages"]
        if of_rows.dim() == 2:
            of_rows = (of_rows * own_tokens).sum(1) / own_tokens.sum(1).clamp(min=1)
        if of_trajectories.dim() == 2:  # of tokens: a trajectory has the mean of its rows
            counts = [len(sample.transcripts) for sample in self.batch.samples]
            of_trajectories = torch.stack([rows.mean() for rows in of_rows[: sum(counts)].split(counts)])
        write_rollouts(
            self.batch,
            of_trajectories.tolist(),
            of_rows.tolist(),
            self.rollouts.folder,
            step=self.state.global_step // self.batch_steps,
            process=self.args.process_index,
            format=self.rollouts.collector.engine.format,
        )
        return weighed

    def _token_advantages(self, tensors: dict[str, Any], own_tokens: Any) -> Any:
        """Return `[R, T]` whitened advantages of PPO, whose critic then learns from the batch, or of REINFORCE++.

        REINFORCE++ (arXiv:2501.03262) is the same without a critic: all values are 0, and lambda is 1.
        """
        # `[R, T]`: rewards of steps and outcome, at the tokens that earned them.
        rewards = pad_sequence([torch.tensor(row.extra) for row in self.rows], batch_first=True)
        rewards = pad(rewards, (0, own_tokens.size(1) - rewards.size(1))).to(own_tokens.device)
        metrics = {}
        if self.beta:
            # The estimator k1, log p - log p_ref, as verl puts it into the rewards.
            kl = (self._old_logps(tensors) - tensors["ref_per_token_logps"]) * own_tokens
            rewards = rewards - self.beta * kl
            metrics["kl"] = float(mean(kl, own_tokens, self.accelerator))
        values, lam, critic = torch.zeros_like(rewards), 1.0, self.critic
        batch = {name: tensors[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        if critic is not None:
            batch["number"] = torch.arange(len(own_tokens), device=own_tokens.device)
            values, lam = critic.values(self._split(batch), rewards), self.settings.ppo.lam
        owners = [row.owners[0] for row in self.rows]
        advantages = token_advantages(rewards, values, own_tokens, owners, lam=lam)
        if critic is not None:
            batch |= {"own": own_tokens, "values": values, "returns": advantages + values}
            metrics |= critic.learn(batch, self._split, step=self.state.global_step)
            self.check_finite(metrics["critic/loss"], "the loss of the value model", self.state.global_step + 1)
        if self.scale_rewards != "none":
            advantages = whitened(advantages, own_tokens, self.accelerator)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return advantages

    def _old_logps(self, tensors: dict[str, Any]) -> Any:
        """Return the `[R, T]` log-probabilities before this batch, which TRL computes if several steps use it."""
        if (known := tensors.get("old_per_token_logps")) is not None:
            return known
        columns = [torch.cat([tensors[f"prompt_{name}"], tensors[f"completion_{name}"]], 1) for name in ("ids", "mask")]
        length, logps = tensors["completion_ids"].size(1), []
        for ids, mask in zip(*(column.split(self.args.per_device_train_batch_size) for column in columns), strict=True):
            labels = ids.masked_fill(torch.arange(ids.size(1), device=ids.device) < ids.size(1) - length, -100)
            with torch.no_grad(), self.accelerator.autocast():
                output = self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            logps.append(output.log_probs[:, -length:])
        return torch.cat(logps)

    def weigh(self, tensors: dict[str, Any], *, scored: int) -> dict[str, Any]:
        """Return TRL's batch with an advantage for each of its `[R]` rows, and with weights of tokens as its mask.

        The rows of a trajectory share its weight of 1, so a trajectory with more
        steps does not count more. The loss treats a row as it treats a
        trajectory of one row: `grpo` averages its tokens, `dapo` and `bnpo` give
        each of its tokens the same weight, `dr_grpo` divides by a constant.

        Args:
            tensors: its `advantages` are `[N]`, one per trajectory
                of this process, or `[R, T]`, one per token.
            scored: trajectories with a reward, on all processes.
        """
        gather, advantages = self.accelerator.gather, tensors["advantages"]
        # Trained tokens of each row `[R]`: the completion less what was inserted.
        tokens = (tensors["completion_mask"] * tensors["tool_mask"]).sum(1)
        weights = torch.tensor([row.weight for row in self.rows], device=advantages.device)
        total = gather((weights * tokens).sum()).sum()
        if self.averaging == "grpo":
            weights = weights / tokens.clamp(min=1)
            total = torch.full_like(total, scored)
        elif self.averaging == "dr_grpo":
            total = torch.full_like(total, scored * self.max_completion_length)
        # TRL takes a mask whose sum is below 1 for an empty one: no token that counts may weigh less.
        lightest = gather(torch.where(weights > 0, weights, torch.inf).min()).min()
        lightest = torch.where(lightest.isinf(), 1.0, lightest)
        if advantages.dim() == 1:
            advantages = torch.stack([advantages[list(row.owners)].mean() for row in self.rows])
            if any(row.extra for row in self.rows):  # TRL takes an advantage for each token, too
                advantages = advantages[:, None].repeat(1, tensors["completion_mask"].size(1))
                for number, row in enumerate(self.rows):
                    advantages[number, : len(row.extra)] += torch.tensor(row.extra, device=advantages.device)
        return tensors | {
            "advantages": advantages,
            "tool_mask": tensors["tool_mask"] * (weights / lightest)[:, None],
            "num_items_in_batch": total / lightest,
        }

    def _score_written(self, model: Any, args: Any, inputs: dict[str, Any]) -> Any:
        """Score what the policy wrote. Passages between its steps are most of a row, and no part of the loss.

        Whenever TRL scores rows, it takes all of a batch, in their order.
        """
        if (labels := inputs.get("labels")) is None:  # a rollout
            return None
        first = self.next_row % len(self.written)
        self.next_row = first + len(labels)
        # TRL scores completions alone, which begin in one column; `written` is padded to the width of the whole row.
        before = int((labels != -100).any(0).long().argmax())
        rows = pad(self.written[first : self.next_row] > 0, (before, labels.size(1) - before - self.written.size(1)))
        return args, inputs | {"labels": labels.masked_fill(~rows.to(labels.device), -100)}

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        return super().get_high_entropy_mask(entropies, (mask > 0).to(entropies), threshold)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss. Rows are taken in parts of like length, each with its backward.

        So a batch of steps needs no more memory than a batch of trajectories, and less of it is padding.
        """
        parts = self._split(inputs)
        share = 1 / len(parts) if self.averaging == "bnpo" else 1.0  # a mean over each part; the others are sums
        metrics = self._metrics["train" if self.model.training else "eval"]
        before = {name: len(values) for name, values in metrics.items()}
        done = 0.0
        # The trainer itself calls backward for the last part,
        # which also brings the gradients to other processes.
        for part in parts[:-1]:
            self.written, self.next_row = part["tool_mask"], 0
            with self._without_sync(model):
                loss = share * super().compute_loss(model, part, *args, **kwargs)
                is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if is_deepspeed else {}))
            done = done + loss.detach()
        self.written, self.next_row = parts[-1]["tool_mask"], 0
        loss = share * super().compute_loss(model, parts[-1], *args, **kwargs) + done
        weights = torch.stack([(part["completion_mask"] * part["tool_mask"]).sum() for part in parts])
        weights = self.accelerator.reduce(weights).cpu()
        for name, values in metrics.items():
            of_parts = values[before.get(name, 0) :]
            # TRL has appended one mean for each part: one for the whole batch takes their place.
            if len(of_parts) == len(parts) > 1:  # means over tokens of a part
                values[-len(parts) :] = [float((weights * torch.tensor(of_parts)).sum() / weights.sum().clamp(min=1))]
        return loss

    def _split(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of a batch that take a forward pass each, longest rows first, cut to their own length.

        A single part is the batch as it is.
        """
        read, written = inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)
        lengths, order = (read + written).sort(descending=True, stable=True)
        sizes = self._part_sizes(lengths.tolist())
        if len(sizes) == 1:
            return [inputs]
        length, parts = inputs["completion_ids"].size(1), []
        for chosen in order.split(sizes):
            part = {}
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value = value[chosen]
                    if name in ("prompt_ids", "prompt_mask"):
                        value = value[:, -int(read[chosen].max()) :]  # prompts are padded on the left
                    elif value.ndim == 2 and value.size(1) == length:
                        value = value[:, : max(int(written[chosen].max()), 1)]
                part[name] = value
            parts.append(part)
        return parts

    def _part_sizes(self, lengths: Sequence[int]) -> list[int]:
        """Return how many rows of these lengths, the longest first, each forward pass takes."""
        most = self.args.per_device_train_batch_size
        enough: float = _ENOUGH_TOKENS["cpu" if self.accelerator.device.type == "cpu" else "gpu"]
        has_bonus = self.args.entropy_coef != 0.0 or self.args.use_adaptive_entropy
        terms_of_parts = self.aux_loss_enabled or has_bonus or self.averaging == "bnpo"
        if self.accelerator.num_processes > 1 or terms_of_parts:
            # All processes take the same number of passes, and
            # terms that are means over a pass count once a pass.
            enough = math.inf
        sizes: list[int] = []
        while (start := sum(sizes)) < len(lengths):
            sizes.append(int(min(most, len(lengths) - start, max(1, enough // lengths[start]))))
        return sizes

    @contextlib.contextmanager
    def _without_sync(self, model: Any) -> Iterator[None]:
        """Accumulate gradients on this process alone: those of the last part bring them to the others."""
        before, self.accelerator.sync_gradients = self.accelerator.sync_gradients, False
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            self.accelerator.sync_gradients = before

    def record(self, batch: Batch, number: int) -> None:
        """Report a batch to the log and the reward, and warn if there is nothing to learn from it."""
        means = mean_metrics(gather_object([batch_metrics(batch, self.rollouts.collector.engine.format)]))
        for name, value in means.items():
            self._metrics["train"][name].append(value)
        # The reward has to observe the same scores on all processes.
        scores = gather_object([sample.score for sample in batch.samples])
        self.rollouts.collector.reward.observe(scores, step=number)
        rewards = [score.value for score in scores]
        # Algorithms by token compare rewards over the batch, the others within a group.
        is_flat = not has_variance(rewards) if self.settings.by_token else means["rollout/flat_groups"] == 1.0
        known = {reward for reward in rewards if reward is not None}
        if is_flat and known and not self.was_flat and self.accelerator.is_main_process:
            log.warning(
                "the rewards of every group are equal: there is nothing to learn from these rollouts. Take questions "
                "that the policy solves at times, or train it on demonstrations first (sft train)",
                step=number + 1,
                rewards=sorted(known),
                in_form=means.get("rollout/format_rate"),
            )
        self.was_flat = is_flat

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        # A validation comes between two steps: TRL would log the next step's metrics with it.
        parent: Any = GRPOTrainer if not any(name.startswith("eval_") for name in logs) else GRPOTrainer.__base__
        parent.log(self, {**logs, "seconds": round(self.seconds, 2)}, start_time)

    def save_extra_state(self, checkpoint: Path) -> None:
        reward, validation = self.rollouts.collector.reward, self.validation
        state = {"reward": reward.state(), "validation": validation and validation.state()}
        (checkpoint / STATE).write_text(json.dumps(state), encoding="utf-8")
        if self.critic is not None:
            self.critic.save(checkpoint)

    def load_extra_state(self, checkpoint: Path) -> None:
        """Read what `save_extra_state` wrote."""
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        self.rollouts.collector.reward.restore(state["reward"])
        if self.validation is not None and state["validation"] is not None:
            self.validation.restore(state["validation"])
        if self.critic is not None:
            self.critic.restore(checkpoint)

    def _engine_returns(self) -> int:
        """Return how often the engine came back after an outage; 0 for one that does not count."""
        return int(getattr(getattr(self.rollouts.collector.engine.llm, "slots", None), "returns", 0))

    @contextlib.contextmanager
    def _current_weights(self, step: int) -> Iterator[None]:
        """Give the rollout engine the current weights for the duration of the block."""
        local, weights = self.rollouts.local, self.rollouts.weights
        if weights is not None and self.pushed != step:
            if weights.sleeps:
                torch.cuda.empty_cache()
            weights.push(merged_parameters(self.accelerator.unwrap_model(self.model)))
            self.pushed, self.returns = step, self._engine_returns()
        if local is None:
            yield
            if weights is not None and weights.sleeps:
                weights.sleep()
                self.pushed = None  # it sleeps without weights
            return
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator) as model, local.lent(model):
            yield


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Validates, saves the best policy, and stops a collapsing run."""

    def __init__(self, trainer: AgenticGRPOTrainer, save_best: Callable[[], None]) -> None:
        self.trainer = trainer
        self.save_best = save_best

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._validate(args, 0)
        else:
            self.trainer.load_extra_state(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, every = state.global_step, self.trainer.settings.validation.steps * self.trainer.batch_steps
        if every and (step % every == 0 or step >= state.max_steps):
            should_log = control.should_log  # logging the validation resets it
            self._validate(args, step)
            control.should_log = should_log

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Not in the middle of a batch: the run resumes with a new one.
        is_at_end = state.global_step % self.trainer.batch_steps == 0
        if is_at_end and collapse(state.log_history, self.trainer.settings.guards):
            control.should_training_stop = control.should_save = True
        found = [entry[_DIFFERENCE] for entry in state.log_history if _DIFFERENCE in entry]
        # At the first step the server has the weights that it was started with.
        drifts = len(found) > 1 and found[-1] > max(_DRIFT * found[0], _SMALL) >= found[-2]
        if drifts and _DIFFERENCE in state.log_history[-1] and not self.trainer.settings.rollout.ahead:
            log.warning("the server's log-probabilities drift from the trainer's; see docs/online.md", nats=found[-1])

    def _validate(self, args: Any, step: int) -> None:
        if (validation := self.trainer.validation) is None:
            return
        number = step // self.trainer.batch_steps
        share = partial(validation.run, number, process=args.process_index, processes=args.world_size)
        rows = self.trainer.run_everywhere(share, step=step)
        if means := mean_metrics(gather_object(rows)):
            self.trainer.log({f"eval_{name}": value for name, value in means.items()})
            if validation.is_best(means, step):
                self.save_best()


def episode_reward(prompts: Any, completions: Any, episode_reward: list[float | None], **columns: Any) -> Any:
    """Return the collector's rewards, as TRL calls a reward function."""
    return episode_reward
