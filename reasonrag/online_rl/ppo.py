"""PPO's value model, and advantages of tokens (arXiv:1707.06347, arXiv:1506.02438), as verl has them.

HiPRAG and Search-R1 train with verl's PPO: a critic that starts as a copy of the policy and has its own
learning rate, the outcome at the last token, the KL penalty in the rewards, advantages that are whitened
over the batch, a clipped value loss. Here only what the policy wrote has values, as in verl's multi-turn
rollouts, and the head starts at zero.

Imports torch, so it is itself imported only once a training run starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from reasonrag.online_rl.rows import gae
from reasonrag.online_rl.settings import RLSettings

STATE = "critic.safetensors"
_VALUE_CLIP = 0.5  # how far a value may move from that before the update, as in verl
_MAX_GRAD_NORM = 1.0
Split = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]


def token_advantages(rewards: Any, values: Any, own_tokens: Any, owners: Sequence[int], *, lam: float) -> Any:
    """Return `[R, T]` advantages of the tokens that the policy wrote, 0 at others.

    Args:
        rewards: `[R, T]`.
        values: `[R, T]`.
        own_tokens: `[R, T]` whether the policy wrote the token, and it is trained on.
        owners: `[R]` the number of each row's trajectory; its rows, in order, are one sequence of tokens.
        lam: see `gae`.
    """
    # `gae` is a loop over tokens, which is slow on a GPU.
    rewards, written, expected = rewards.cpu(), own_tokens.cpu(), values.cpu()
    advantages, rows_of = torch.zeros_like(expected), defaultdict(list)
    for row, owner in enumerate(owners):
        rows_of[owner].append(row)
    for rows in rows_of.values():
        mask, of_rows = written[rows], advantages[rows]
        of_sequence = gae(rewards[rows][mask].tolist(), expected[rows][mask].tolist(), lam=lam)
        of_rows[mask] = torch.tensor(of_sequence, dtype=of_rows.dtype)
        advantages[rows] = of_rows
    return advantages.to(values.device)


def mean(numbers: Any, own_tokens: Any, accelerator: Any) -> Any:
    """Return the mean of `[R, T]` numbers over the tokens of all processes that are the policy's own."""
    sums = torch.stack([(numbers * own_tokens).sum(), own_tokens.sum().float()])
    total, count = accelerator.reduce(sums, reduction="sum")
    return total / count.clamp(min=1)


def whitened(advantages: Any, own_tokens: Any, accelerator: Any) -> Any:
    """Return `[R, T]` advantages with mean 0 and deviation 1 over the same tokens; others are 0."""
    centred = (advantages - mean(advantages, own_tokens, accelerator)) * own_tokens
    return centred * (mean(centred**2, own_tokens, accelerator) + 1e-8).rsqrt()


def value_loss(values: Any, before: Any, returns: Any, clip: float) -> Any:
    """Return `[S]` half the squared error of a value, or of the value clipped around that before, if that is larger."""
    clipped = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


class Critic:
    """A value model: the policy's network with a head of one number, trained as the policy is (all weights, or LoRA).

    Every process has the same weights and adds up the gradients of all.

    Args:
        model: a copy of the policy that training starts from, whose trainable weights are trained.
        settings: of the training run.
        accelerator: of the trainer.
    """

    def __init__(self, model: Any, settings: RLSettings, accelerator: Any) -> None:
        # `base_model` is the network without its language head.
        backbone = (model.get_base_model() if is_peft_model(model) else model).base_model
        head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)  # a value of 0 before anything is known, and no seed
        nn.init.zeros_(head.bias)
        self.model = nn.ModuleDict({"backbone": backbone, "head": head}).to(accelerator.device)
        self.settings = settings
        self.accelerator = accelerator
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), weight_decay=0.0)

    def values(self, parts: Sequence[dict[str, Any]], like: Any) -> Any:
        """Return values before each token of a batch, in the shape of `like` `[R, T]`; `parts` have a `number`."""
        predicted = torch.zeros_like(like)
        self.model.eval()
        with torch.no_grad():
            for part in parts:
                values = self._forward(part)
                predicted[part["number"], : values.size(1)] = values
        return predicted

    def learn(self, batch: dict[str, Any], split: Split, *, step: int) -> dict[str, float]:
        """Take the optimizer steps of a batch on its `values` and `returns`, and return metrics.

        Args:
            batch: of this process, `own` marks the tokens that count.
            split: cuts some of its rows into forward passes.
            step: of the training run, before this batch.
        """
        self.model.train()
        settings, ppo = self.settings, self.settings.ppo
        losses, norms = [], []
        for number in range(settings.rollout.minibatches):
            # Every n-th row: attempts at one question come one after another.
            rows = {name: column[number :: settings.rollout.minibatches] for name, column in batch.items()}
            tokens = self.sum(rows["own"].sum()).clamp(min=1)
            done = torch.zeros((), device=self.accelerator.device)
            for part in split(rows):
                own = part["own"]
                error = value_loss(self._forward(part)[own], part["values"][own], part["returns"][own], _VALUE_CLIP)
                loss = error.sum() / tokens
                loss.backward()
                done += loss.detach()
            # Not wrapped in DDP: its reducer expects one backward for each forward pass on every process.
            for weight in self.weights.values():
                if self.accelerator.num_processes > 1:
                    weight.grad = self.sum(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            norms.append(float(nn.utils.clip_grad_norm_(self.weights.values(), _MAX_GRAD_NORM)))
            rising = ppo.warmup_ratio * settings.max_steps * settings.rollout.minibatches
            rate = ppo.learning_rate * min(1.0, (step + number) / rising if rising else 1.0)
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(self.sum(done)))
        own_tokens, returns, everywhere = batch["own"], batch["returns"], self.accelerator
        errors = mean((returns - batch["values"]) ** 2, own_tokens, everywhere)
        variance = mean((returns - mean(returns, own_tokens, everywhere)) ** 2, own_tokens, everywhere)
        return {
            "critic/loss": sum(losses) / len(losses),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/value": float(mean(batch["values"], own_tokens, everywhere)),
            "critic/explained_variance": float(1 - errors / (variance + 1e-8)),
        }

    def sum(self, tensor: Any) -> Any:  # over all processes
        return self.accelerator.reduce(tensor, reduction="sum")

    def save(self, folder: Path) -> None:
        """Write the trained weights and the state of their optimizer."""
        # AdamW's state is a few tensors for each weight: safetensors holds them without a pickle.
        tensors = {}
        for name, weight in self.weights.items():
            tensors[name] = weight.data
            tensors |= {f"{name}:{key}": value for key, value in self.optimizer.state[weight].items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / STATE)

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        for stored, tensor in load_file(folder / STATE).items():
            name, _, key = stored.partition(":")
            weight = self.weights[name]
            if key:  # AdamW counts its steps on the CPU
                self.optimizer.state[weight][key] = tensor if key == "step" else tensor.to(weight.device)
            else:
                weight.data.copy_(tensor)

    def _forward(self, part: dict[str, Any]) -> Any:
        """Return `[R, T]` values before each token of the completions."""
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
        mask = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
        with self.accelerator.autocast():
            hidden = self.model["backbone"](input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            # The state before a token predicts what comes from
            # this token on: shifted by one, as logits are.
            states = hidden[:, part["prompt_ids"].size(1) - 1 : -1]
            return self.model["head"](states.to(self.model["head"].weight.dtype))[..., 0].float()
