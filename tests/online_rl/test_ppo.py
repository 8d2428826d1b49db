"""PPO, RLOO and REINFORCE++: advantages by hand, whose tokens they are, and a value model that survives a kill."""

from __future__ import annotations

import signal
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from reasonrag.core.errors import RunError
from reasonrag.core.types import Completion, Prompt, Search, Step, StopReason, Trajectory
from reasonrag.online_rl.rows import REWARD, Transcript, gae, token_rewards
from reasonrag.rewards import Score
from tests.online_rl.test_rows import sample
from tests.online_rl.test_trainer import gradient, listen, logprobs, move, read, rolled_out
from tests.online_rl.toys import child, farthest, logged, made, quietly, settings, weights
from tests.toys import QUESTION

TOYS = "tests.online_rl.toys"
ANY: dict[str, Any] = {"outage__max_unscored": 1.0, "reward__name": f"{TOYS}:HolesReward"}


def test_gae_is_the_sum_of_its_definition():
    """Eq. 16 of arXiv:1506.02438 with gamma 1: the advantage at t is the sum of lambda^l delta at t + l."""
    rewards, values, lam = [0.1, 0.0, -0.2, 1.0], [0.5, 0.4, 0.9, 0.3], 0.8
    following = [*values[1:], 0.0]
    deltas = [reward + later - value for reward, later, value in zip(rewards, following, values, strict=True)]
    for place, advantage in enumerate(gae(rewards, values, lam=lam)):
        expected = sum(lam**ahead * delta for ahead, delta in enumerate(deltas[place:]))
        assert advantage == pytest.approx(expected, abs=1e-12)
    returns = [sum(rewards[place:]) for place in range(4)]
    assert gae(rewards, [0.0] * 4) == pytest.approx(returns, abs=1e-12), "V = 0, lambda = 1"
    assert gae(rewards, values) == pytest.approx([r - v for r, v in zip(returns, values, strict=True)], abs=1e-12)


def test_tokens_of_others_are_no_steps_in_time_and_rows_of_a_trajectory_follow_each_other():
    """By hand: the own tokens of rows 0 and 2 are one trajectory of four tokens, that of row 1 is another."""
    import torch

    from reasonrag.online_rl.ppo import token_advantages, whitened

    own = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]]) > 0
    rewards = torch.tensor([[0.0, 9.0, 0.0, 9.0], [9.0, 1.0, 9.0, 9.0], [9.0, 0.0, 1.0, 9.0]])
    values = torch.tensor([[0.5, 7.0, 0.25, 7.0], [7.0, 0.5, 7.0, 7.0], [7.0, 0.5, 0.75, 7.0]])
    found = token_advantages(rewards, values, own, [3, 5, 3], lam=0.5)
    # deltas: -0.25, 0.25, 0.25, 0.25; backwards: 0.25, 0.375, 0.4375, -0.03125
    expected = [[-0.03125, 0.0, 0.4375, 0.0], [0.0, 0.5, 0.0, 0.0], [0.0, 0.375, 0.25, 0.0]]
    assert found.tolist() == expected

    class Alone:
        def reduce(self, tensor: Any, reduction: str) -> Any:
            return tensor

    white = whitened(found, own, Alone())
    assert float(white[own].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white[own].std(correction=0)) == pytest.approx(1.0, abs=1e-5)
    assert (white[~own] == 0.0).all()


def test_a_value_that_moves_too_far_is_clipped_only_if_that_costs_more():
    import torch

    from reasonrag.online_rl.ppo import value_loss

    values, before, returns = torch.tensor([0.9, 0.2, -2.0]), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    assert value_loss(values, before, returns, 0.5).tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.64, 0.5 * 9.0])


def test_a_reward_stands_at_the_last_token_that_it_is_for():
    first = Transcript((1,), (3, 4, 5, 6), (1, 0, 1, 1), None, False, steps=2)
    second = Transcript((1,), (7, 8, 9), (1, 1, 0), None, False, steps=3)
    steps = tuple(Step(Prompt(()), Completion("x", token_ids=ids), Search("x")) for ids in ((3,), (5, 6), (7, 8)))
    attempt = Trajectory(QUESTION, steps, StopReason.NO_ANSWER)
    made_of = replace(sample(first, second), trajectory=attempt, score=Score(1.0, steps=(0.1, None, 0.3)))
    assert token_rewards(made_of, [True, True]) == [(0.1, 0.0, 0.0, 0.0), (0.0, 1.3, 0.0)]
    assert token_rewards(made_of, [True, False]) == [(0.1, 0.0, 0.0, 1.0), ()], "the last one was cut off"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    """A trainer with a fresh value model and a KL penalty, whose policy has moved; advantages are not whitened."""
    wanted = settings(
        algorithm="ppo", **ANY, beta=0.1, trainer={"scale_rewards": "none"}, rollout__temperature=0.9, loss_type="dapo"
    )
    with made(wanted, tmp_path_factory.mktemp("ppo") / "out") as trainer:
        move(trainer.model)
        yield (trainer, *rolled_out(trainer))


@pytest.mark.slow
def test_without_a_value_an_advantage_is_the_return_with_the_kl_penalty_of_what_is_left(ppo):
    trainer, inputs, out = ppo
    mask = (out["tool_mask"] * out["completion_mask"]).bool()
    paid = 0
    for n, row in enumerate(inputs):
        assert mask[n].any() == (row[REWARD] is not None)
        assert (out["advantages"][n][~mask[n]] == 0.0).all()
        if row[REWARD] is None:
            continue
        prompt = out["prompt_ids"][n][out["prompt_mask"][n].bool()]
        said = out["completion_ids"][n][: int(out["completion_mask"][n].sum())]
        gap = logprobs(trainer.model, prompt, said, 0.9) - logprobs(trainer.ref_model, prompt, said, 0.9)
        own = gap[mask[n][: len(said)]].detach()
        expected = row[REWARD] - 0.1 * own.flip(0).cumsum(0).flip(0)
        assert out["advantages"][n][mask[n]].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert own.abs().max() > 1e-3, "the penalty has to matter"
        paid += 1
    assert paid > 4
    (file,) = (trainer.rollouts.folder).iterdir()
    means = [float(a[m].mean()) if m.any() else 0.0 for a, m in zip(out["advantages"], mask, strict=True)]
    assert read(file, "advantage") == pytest.approx(means, abs=1e-5)
    assert trainer.beta == 0.0, "the penalty is not in the loss a second time"


@pytest.mark.slow
def test_only_the_policys_tokens_have_a_gradient_and_it_is_that_of_the_definition(ppo):
    trainer, inputs, out = ppo
    mask = (out["tool_mask"] * out["completion_mask"]).bool()
    trainer.written = out["tool_mask"]
    heard = listen(trainer)
    trainer._compute_loss(trainer.model, out).backward()
    (said,) = heard
    assert (said.grad[~mask] == 0.0).all() and (said.grad[mask] != 0.0).any()
    trl = gradient(trainer.model)
    total = 0.0
    for n in range(len(inputs)):
        if mask[n].any():
            prompt = out["prompt_ids"][n][out["prompt_mask"][n].bool()]
            length = int(out["completion_mask"][n].sum())
            own = logprobs(trainer.model, prompt, out["completion_ids"][n][:length], 0.9)
            ratio = (own - own.detach()).exp()
            total = total - (out["advantages"][n][:length] * ratio)[mask[n][:length]].sum()
    (total / mask.sum()).backward()
    ours = gradient(trainer.model)
    assert (trl - ours).norm() / ours.norm() < 1e-5
    assert ours.norm() > 1e-4


@pytest.mark.slow
def test_the_value_model_learns_from_own_tokens_alone_and_is_restored_exactly(tmp_path):
    import torch

    wanted = settings(
        algorithm="ppo",
        method="lora",
        **ANY,
        ppo__learning_rate=3e-3,
        rollout__minibatches=2,
        per_device_train_batch_size=8,
    )
    with made(wanted, tmp_path / "out") as trainer:
        critic, batches = trainer.critic, []
        learn = critic.learn
        critic.learn = lambda batch, split, step: batches.append(batch) or learn(batch, split, step=step)
        adapters = [name for name in critic.weights if "lora_" in name]
        assert len(critic.weights) == len(adapters) + 2 > 2, "and the head"
        rolled_out(trainer)
        (batch,) = batches
        assert batch["values"].abs().max() == 0.0, "it begins at zero"
        errors = [critic.learn(batch, trainer._split, step=step)["critic/loss"] for step in range(2, 20, 2)]
        assert errors[-1] < 0.5 * errors[0]
        critic.save(tmp_path)
        noisy = dict(batch)
        for name in ("values", "returns"):
            noisy[name] = torch.where(batch["own"], batch[name], torch.tensor(50.0))
        after = []
        for one in (batch, noisy):
            critic.restore(tmp_path)
            learn(one, trainer._split, step=20)
            after.append({name: weight.detach().clone() for name, weight in critic.weights.items()})
        assert farthest(*after) == 0.0, "what others wrote has no value, and a restored state goes the same way"
        assert farthest(after[0], {name: w for name, w in load(tmp_path).items() if ":" not in name}) > 1e-6


def load(folder: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "critic.safetensors")


@pytest.mark.slow
def test_a_value_model_that_diverges_ends_the_training_in_one_line(tmp_path):
    wanted = settings(algorithm="ppo", reward__name=f"{TOYS}:HugeReward")
    said = pytest.raises(RunError, match="the loss of the value model is not a finite number in step 1")
    with made(wanted, tmp_path / "out") as trainer, said:
        rolled_out(trainer)


@pytest.mark.slow
def test_rloo_and_reinforce_need_no_value_model(tmp_path):
    with made(settings(algorithm="rloo", **ANY), tmp_path / "rloo") as trainer:
        inputs, out = rolled_out(trainer)
        rewards = [row[REWARD] for row in inputs]
        for n, reward in enumerate(rewards):
            others = [r for m, r in enumerate(rewards) if m // 4 == n // 4 and m != n and r is not None]
            expected = 0.0 if reward is None or not others else reward - fmean(others)
            assert float(out["advantages"][n]) == pytest.approx(expected, abs=1e-6)
        assert trainer.critic is None and max(out["advantages"]) > 0.05
    wanted = settings(algorithm="reinforce++", **ANY, rollout__group_size=1, rollout__questions_per_step=16)
    with made(wanted, tmp_path / "reinforce") as trainer:
        inputs, out = rolled_out(trainer)
        mask = (out["tool_mask"] * out["completion_mask"]).bool()
        white = out["advantages"][mask]
        assert trainer.critic is None
        assert float(white.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(white.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
        counts = mask.sum(1)
        paid = [n for n, row in enumerate(inputs) if row[REWARD] is not None]
        mean = sum(inputs[n][REWARD] * int(counts[n]) for n in paid) / int(counts.sum())
        signs = {(inputs[n][REWARD] > mean) == bool((out["advantages"][n][mask[n]] > 0).all()) for n in paid}
        assert signs == {True}


@pytest.mark.slow
def test_a_ppo_training_that_was_killed_ends_with_the_same_policy_and_the_same_values(tmp_path):
    wanted = settings(
        "demo-hiprag-ppo",
        reward__name=f"{TOYS}:KilledReward",
        rollout__group_size=1,
        rollout__questions_per_step=8,
        rollout__minibatches=2,
        per_device_train_batch_size=4,
        beta=0.01,
        max_steps=2,
        save_steps=1,
    )
    history = quietly(wanted, tmp_path / "whole")["history"]
    assert child(wanted, tmp_path / "rl", kill_at=2).returncode == -signal.SIGKILL
    resumed = quietly(wanted, tmp_path / "rl")["history"]
    for name in ("loss", "critic/loss", "critic/value", "kl"):
        assert logged(resumed, name) == logged(history, name) != []
    assert farthest(weights(tmp_path / "rl"), weights(tmp_path / "whole")) == 0.0
    last = [load(tmp_path / name / "checkpoints" / "checkpoint-4") for name in ("rl", "whole")]
    assert farthest(*last) == 0.0
