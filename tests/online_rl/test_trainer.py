"""What TRL makes of our rollouts: the contract that `AgenticGRPOTrainer` stands on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from reasonrag.core.errors import ConfigError, Stalled
from reasonrag.online_rl.collector import RolloutLoop
from reasonrag.online_rl.rows import REWARD, group_advantages
from reasonrag.online_rl.train import train_online
from reasonrag.training.model import model_path
from tests.fakes.model_server import FakeOpenAI
from tests.llm.tiny import loaded
from tests.online_rl.toys import made, settings

HOLES = "tests.online_rl.toys:HolesReward"
OWN = "tests.online_rl.toys:OwnReward"
ANY = {"outage__max_unscored": 1.0}  # of the rewards may be missing


def rolled_out(trainer: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A batch of rollouts: rows with their rewards, and the tensors that the loss is made of."""
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    return inputs, trainer._generate_and_score_completions(inputs)


def move(model: Any, seed: int = 0, *, share: float = 0.02) -> None:
    """The policy away from its reference."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += share * parameter.std() * torch.randn(parameter.shape, generator=generator)


def logprobs(model: Any, prompt: Any, completion: Any, temperature: float) -> Any:
    """`[T]` of one row without any padding, by the definition."""
    import torch

    logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(completion)), completion]


def reference_loss(trainer: Any, out: dict[str, Any], inputs: list[dict[str, Any]]) -> Any:
    """Of the policy's tokens in rows with a reward, and nothing else. On rollouts of the policy itself ratios are 1."""
    import torch

    scored = [n for n, row in enumerate(inputs) if row[REWARD] is not None]
    sums, counts = [], []
    for n in scored:
        prompt = out["prompt_ids"][n][out["prompt_mask"][n].bool()]
        mask = out["tool_mask"][n].bool() & out["completion_mask"][n].bool()
        whole = int(out["tool_mask"][n].size(0) if not mask.any() else mask.nonzero().max() + 1)
        completion = out["completion_ids"][n][:whole]
        said = logprobs(trainer.model, prompt, completion, trainer.temperature)
        loss = -out["advantages"][n] * torch.exp(said - said.detach())
        if trainer.beta:
            with torch.no_grad():
                before = logprobs(trainer.ref_model, prompt, completion, trainer.temperature)
            gap = before - said
            loss = loss + trainer.beta * (gap.exp() - gap - 1) * torch.exp(said - said.detach())
        sums.append(loss[mask[:whole]].sum())
        counts.append(int(mask.sum()))
    return sum(sums) / sum(counts)


def gradient(model: Any) -> Any:
    import torch

    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def listen(trainer: Any) -> list[Any]:
    """The log-probabilities that TRL computes from now on, with their gradients."""
    heard: list[Any] = []
    compute = type(trainer)._get_per_token_logps_and_entropies.__get__(trainer)

    def listening(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        if found[0].requires_grad:
            found[0].retain_grad()
            heard.append(found[0])
        return found

    trainer._get_per_token_logps_and_entropies = listening
    return heard


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """A trainer whose policy has moved, and a batch of its rollouts."""
    out = tmp_path_factory.mktemp("rollouts") / "out"
    with made(settings(**ANY, reward__name=HOLES, beta=0.1, rollout__temperature=0.9), out) as trainer:
        move(trainer.model)
        yield (trainer, *rolled_out(trainer))


@pytest.mark.slow
def test_text_that_was_put_in_and_rows_without_a_reward_are_masked(rollouts):
    _, inputs, out = rollouts
    mask = (out["tool_mask"] * out["completion_mask"]).bool()
    paid = [row[REWARD] is not None for row in inputs]
    assert mask.any(dim=1).tolist() == paid
    assert 4 <= sum(paid) <= 16
    assert out["num_items_in_batch"] == mask.sum() > 50
    assert (~mask & out["completion_mask"].bool()).sum() > 100, "passages and ends"


@pytest.mark.slow
def test_only_what_the_policy_wrote_and_was_paid_for_is_learnt(rollouts):
    trainer, inputs, out = rollouts
    trainer.beta = 0.1
    out = trainer.weigh(out, scored=sum(row[REWARD] is not None for row in inputs))
    mask = (out["tool_mask"] * out["completion_mask"]).bool()
    heard = listen(trainer)
    trainer._compute_loss(trainer.model, out).backward()
    (said,) = heard
    assert (said[~mask] == 0.0).all(), "passages are not even scored"
    assert (said.grad[~mask] == 0.0).all()
    assert (said.grad[mask] != 0.0).any()
    trl = gradient(trainer.model)
    reference_loss(trainer, out, inputs).backward()
    ours = gradient(trainer.model)
    assert (trl - ours).norm() / ours.norm() < 1e-5
    assert ours.norm() > 1e-4


@pytest.mark.slow
def test_passes_of_like_length_have_the_loss_and_the_entropy_of_one_pass(rollouts):
    trainer, inputs, out = rollouts
    out = trainer.weigh(out, scored=sum(row[REWARD] is not None for row in inputs))
    assert len(trainer._split(out)) > 1
    trainer.written = out["tool_mask"]
    trainer._metrics["train"].clear()
    whole, entropy = trainer._compute_loss(trainer.model, out), trainer._metrics["train"].pop("entropy")
    whole.backward()
    expected = gradient(trainer.model)
    found = trainer.compute_loss(trainer.model, out)
    found.backward()
    assert found.item() == pytest.approx(whole.item(), rel=1e-5)
    assert (gradient(trainer.model) - expected).norm() / expected.norm() < 1e-5
    assert trainer._metrics["train"]["entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.slow
def test_advantages_are_those_that_trl_computes(rollouts):
    trainer, inputs, _ = rollouts
    out = trainer._generate_and_score_completions(inputs)
    rewards = [row[REWARD] for row in inputs]
    ours = [advantage for first in range(0, 16, 4) for advantage in group_advantages(rewards[first : first + 4])]
    assert out["advantages"].tolist() == pytest.approx(ours, abs=2e-5)
    assert max(ours) > 0.05
    (file,) = Path(trainer.args.output_dir).parent.joinpath("rollouts").iterdir()
    assert read(file, "advantage") == pytest.approx(ours, abs=2e-5)


def read(file: Path, column: str) -> list[Any]:
    import pyarrow.parquet as pq

    return pq.read_table(file)[column].to_pylist()


EXACT = {
    "importance": "token_truncate",
    "learning_rate": 1e-3,
    "reward__name": OWN,
    "rollout__questions_per_step": 2,
    "per_device_train_batch_size": 8,
}


@pytest.mark.slow
def test_an_engine_on_the_trainers_own_weights_is_exact(tmp_path):
    with made(settings("demo-reasonrag", method="lora", **EXACT), tmp_path / "out") as trainer:
        inner = trainer.model.get_base_model()
        defaults = inner.generation_config
        trainer.train()
        assert ratios(trainer) == pytest.approx([1.0, 1.0], abs=1e-3)
        assert differences(trainer) == pytest.approx([0.0, 0.0], abs=1e-3)
        assert inner.generation_config is defaults, "what was lent is left as it was"
        assert trainer.model.training


def ratios(trainer: Any) -> list[float]:
    name = "sampling/importance_sampling_ratio/mean"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def differences(trainer: Any) -> list[float]:
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Copied:
    """Brings weights to an LLM that holds a copy, `late` pushes after they were sent."""

    sleeps = False

    def __init__(self, llm: Any, late: int) -> None:
        self.llm, self.late = llm, late
        self.sent: list[dict[str, Any]] = []

    @property
    def version(self) -> int:
        return len(self.sent)

    def push(self, named_tensors: Iterable[tuple[str, Any]]) -> None:
        self.sent.append({name: tensor.clone() for name, tensor in named_tensors})
        missing, unexpected = self.llm.model.load_state_dict(
            self.sent[max(len(self.sent) - 1 - self.late, 0)], strict=False
        )
        assert not unexpected and set(missing) <= {"lm_head.weight"}

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "late", "ahead"),
    [("lora", 0, False), ("full", 1, False), ("full", 0, True)],
    ids=["up to date", "a step behind", "rollouts ahead"],
)
def test_an_engine_that_is_sent_the_weights_is_corrected(method, late, ahead, tmp_path):
    with FakeOpenAI(models=None) as server, ExitStack() as stack:
        served = {"rollout__url": server.base_url, "rollout__ahead": True} if ahead else {}
        trainer = stack.enter_context(made(settings(method=method, **EXACT, **served), tmp_path / "out"))
        llm = loaded(model_path("demo:search_r1"), batch_size=16, device="cpu", dtype="float32")
        sync = Copied(llm, late)
        trainer.rollouts.collector.engine.llm = llm
        trainer.rollouts = replace(trainer.rollouts, local=None, weights=sync)
        with structlog.testing.capture_logs() as logs:
            trainer.train()
        assert sync.version == 2 and any("drift from the trainer's" in log["event"] for log in logs) == bool(late)
        (first, second), (_, gap) = ratios(trainer), differences(trainer)
        assert first == pytest.approx(1.0, abs=1e-3)
        if late or ahead:
            assert abs(second - 1.0) > 1e-4 and gap > 0.01
        else:
            assert second == pytest.approx(1.0, abs=1e-3) and gap < 1e-3
        asyncio.run(llm.aclose())


def test_a_server_of_another_model_is_refused_before_the_first_rollout(tmp_path):
    with FakeOpenAI(models=("other",)) as server, pytest.raises(ConfigError, match="it lists: other"):
        train_online(settings(rollout__url=server.base_url), tmp_path / "out", log=print)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["in its batch", "while a batch is made ahead"])
def test_a_server_that_was_started_anew_gets_the_weights_again_and_its_rollouts_are_not_used(ahead, tmp_path):
    with FakeOpenAI(models=None) as server, ExitStack() as stack:
        served = {"rollout__url": server.base_url, "rollout__ahead": True} if ahead else {}
        trainer = stack.enter_context(made(settings(method="full", **EXACT, **served), tmp_path / "out"))
        llm = loaded(model_path("demo:search_r1"), batch_size=16, device="cpu", dtype="float32")
        sync, complete = Copied(llm, 0), llm.complete

        async def restarts(*args):
            if (trainer.begun if ahead else sync.version == 2) and not llm.slots.returns:
                llm.model.load_state_dict(sync.sent[0], strict=False)
                llm.slots.returns += 1
            return await complete(*args)

        llm.complete = restarts
        trainer.rollouts.collector.engine.llm = llm
        trainer.rollouts = replace(trainer.rollouts, local=None, weights=sync)
        with structlog.testing.capture_logs() as logs:
            trainer.train()
        assert sync.version == (2 if ahead else 3) and max(differences(trainer)) < 1e-3
        assert [log["event"][:20] for log in logs if log["log_level"] == "warning"] == ["the server was away:"]
        asyncio.run(llm.aclose())


def test_rollouts_that_stand_still_are_ended_after_the_stall_that_is_set():
    stall_s = settings(run__stall_s=0.3).as_config().stall_s
    with closing(RolloutLoop(stall_s)) as loop, pytest.raises(Stalled, match=r"no token, reply or commit for 0\.3 s"):
        loop.run(asyncio.sleep(60))


@pytest.mark.slow
def test_episodes_that_ran_out_of_tokens_teach_nothing(tmp_path):
    wanted = {"reward__name": OWN, "rollout__max_tokens": 6}
    with made(settings(**wanted), tmp_path / "out") as trainer:
        inputs, out = rolled_out(trainer)
        clipped = trainer._metrics["train"]["completions/clipped_ratio"][-1]
        assert clipped > 0.2
        mask = (out["tool_mask"] * out["completion_mask"]).bool()
        ends = [row[row != trainer._tokenizer.pad_token_id][-1].item() for row in out["completion_ids"]]
        cut = [end not in trainer.eos_token_ids for end in ends]
        assert sum(cut) == round(clipped * len(inputs))
        assert [bool(row.any()) for row in mask] == [not gone for gone in cut]
