"""Whole trainings in the demo world: what they leave behind, and how they survive kills, signals and outages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter

import pytest

from reasonrag.core.config import ModelConfig, carried_settings
from reasonrag.core.errors import Interrupted, RunError
from reasonrag.core.models import ModelAddress
from reasonrag.online_rl import collector
from reasonrag.pipeline.parts import open_llm
from reasonrag.storage.files import read_json
from reasonrag.training.run import checkpoint_problem, last_checkpoint, save_policy
from tests import warmed
from tests.online_rl import toys
from tests.online_rl.toys import ROOT, child, farthest, logged, quietly, rollouts, settings, weights

TOYS = "tests.online_rl.toys"
SMALL = {"rollout__questions_per_step": 2, "per_device_train_batch_size": 8, "reward__name": f"python:{TOYS}:OwnReward"}
LONG = SMALL | {"max_steps": 4, "save_steps": 2, "validation__steps": 2, "validation__limit": 6}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps without interruption: the folder, the summary, the lines."""
    out = tmp_path_factory.mktemp("whole") / "rl"
    lines = []
    summary = toys.train(settings(**LONG), out, log=lines.append)
    return out, summary, lines


def test_the_folder_holds_the_policy_and_the_best_one_and_no_pickle(whole):
    out, summary, _ = whole
    for folder in (out, out / "best", out / "checkpoints/checkpoint-4"):
        if folder.parent.name != "checkpoints":  # those hold the optimizer's state, too
            assert not [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("*.pkl")]
        assert not (folder / "README.md").exists()
        assert carried_settings(ModelAddress("hf", str(folder))) == {
            "format": {"name": "search_r1", "prompts": "brief", "max_steps": 3},
            "retrieval": {"top_k": 1, "passage_order": "best_first", "max_passage_chars": 4000},
            "policy": {"max_tokens": 32},
        }
    policy = open_llm(ModelConfig(spec=f"hf:{out / 'best'}", device="cpu"), "policy")
    asyncio.run(policy.aclose())
    assert not [path for path in out.iterdir() if path.name.startswith(".best")]
    assert sorted(path.name for path in (out / "rollouts").iterdir()) == [f"step-{n:06d}.parquet" for n in range(1, 5)]
    assert (
        "code" in read_json(out / "checkpoints/identity.json")["served"]
    )  # of the reward, which a resumed run compares
    assert summary["best"]["step"] in (0, 2, 4)
    assert checkpoint_problem(out / "best") == ""


def test_training_json_is_clean_and_tells_every_step(whole):
    out, summary, _ = whole
    text = (out / "training.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == summary
    assert str(ROOT) not in text and str(out) not in text
    names = ("rollout/reward", "rollout/em", "rollout/format_rate", "rollout/tokens", "rollout/unscored", "entropy")
    for name in (*names, "reward/words"):
        assert len(logged(summary["history"], name)) == 4
    seconds = [entry["seconds"] for entry in summary["history"]]
    assert seconds == sorted(seconds) and seconds[-1] <= summary["seconds"]


def test_validation_looks_before_the_first_step_and_after_the_last(whole):
    _, summary, lines = whole
    looked = [entry for entry in summary["history"] if "eval_em" in entry]
    assert [entry["step"] for entry in looked] == [0, 2, 4]
    assert sum("held-out: em" in line for line in lines) == 3
    assert summary["best"]["value"] == max(entry["eval_em"] for entry in looked)
    assert not any(name.startswith("eval_rollout") for entry in looked for name in entry)


STEPS = SMALL | {
    "preset": "demo-reasonrag",
    "reward__name": f"{TOYS}:KilledReward",
    "rollout__temperature": 1.5,
    "format__max_steps": 6,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "credit": "step",
}


def test_a_training_on_steps_that_was_killed_ends_with_the_same_policy(tmp_path):
    wanted = settings(**STEPS, max_steps=2, save_steps=1, rollout__minibatches=2)
    history = trained(wanted, tmp_path / "whole")
    assert child(wanted, tmp_path / "rl", kill_at=2).returncode == -signal.SIGKILL
    assert last_checkpoint(tmp_path / "rl").name == "checkpoint-2"
    resumed = quietly(wanted, tmp_path / "rl")["history"]
    seconds = logged(resumed, "seconds")
    assert seconds == sorted(seconds), "those before the kill count"
    assert logged(resumed, "loss") == logged(history, "loss")
    assert farthest(weights(tmp_path / "rl"), weights(tmp_path / "whole")) <= 1e-5
    rows = [rollouts(tmp_path / name, 2) for name in ("rl", "whole")]
    assert rows[0] == rows[1]
    states = [read_json(last_checkpoint(tmp_path / name) / "online_rl.json") for name in ("rl", "whole")]
    assert states[0]["reward"] == states[1]["reward"], "no step is forgotten, none is told twice"
    assert len({len(row["row_advantages"]) for row in rows[0]}) > 1, "as many as steps"


def test_a_finished_training_is_not_begun_again(whole):
    out, summary, _ = whole
    lines = []
    assert toys.train(settings(**LONG), out, log=lines.append) == summary
    assert "this training run is already finished" in lines
    with pytest.raises(RunError, match="holds a different training run"):
        quietly(settings(**LONG | {"rollout__temperature": 0.5}), out)


def test_ctrl_c_in_a_rollout_ends_behind_the_whole_batch_and_the_same_call_goes_on(tmp_path):
    wanted = settings(
        **SMALL | {"reward__name": f"{TOYS}:SignalledReward", "per_device_train_batch_size": 4},
        rollout__minibatches=2,
        max_steps=2,
        save_steps=100,
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    toys.SIGNAL_AT = 1
    with pytest.raises(Interrupted, match="stopped after step 2 of 4") as stopped:
        quietly(wanted, tmp_path / "rl")
    assert stopped.value.number == signal.SIGINT
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert last_checkpoint(tmp_path / "rl").name == "checkpoint-2"
    summary = quietly(wanted, tmp_path / "rl")
    assert summary["steps"] == 4
    steps = sorted(path.name for path in (tmp_path / "rl" / "rollouts").iterdir())
    assert steps == ["step-000001.parquet", "step-000002.parquet"]


def test_a_collapse_ends_the_training_with_its_state_and_the_best_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "WINDOW", 1)
    wanted = settings(
        **SMALL,
        max_steps=30,
        save_steps=100,
        learning_rate=2e-3,
        guards__max_length_growth=1.01,
        guards__format_rate_drop=0.05,
        validation__steps=30,
        validation__limit=2,
    )
    with pytest.raises(RunError, match=r"stopped after step \d+ of 30: (trajectories grew|well-formed)"):
        quietly(wanted, tmp_path / "rl")
    assert last_checkpoint(tmp_path / "rl") is not None
    assert (tmp_path / "rl" / "best" / "model.safetensors").exists()
    assert not (tmp_path / "rl" / "training.json").exists()


def trained(wanted, out):
    """What the trainer logs; nothing is finished, so no curves are drawn."""
    with toys.made(wanted, out) as trainer:
        trainer.train()
        save_policy(trainer, out)
        return trainer.state.log_history


def test_rewards_that_are_missing_are_counted_and_no_trajectory_is_printed(tmp_path, capfd):
    wanted = settings(reward__name=f"{TOYS}:HolesReward", outage__max_unscored=1.0)
    history = trained(wanted, tmp_path / "rl")
    causes = Counter()
    for step, share in enumerate(logged(history, "rollout/unscored"), 1):
        rows = rollouts(tmp_path / "rl", step)
        missing = [row for row in rows if row["reward"] is None]
        assert share == pytest.approx(len(missing) / len(rows))
        assert all(row["advantage"] == 0.0 for row in missing)
        assert all(bool(row["cause"]) == (row["reward"] is None) for row in rows)
        causes.update(row["cause"] for row in missing)
    assert causes["no_idea"] and set(causes) <= {"no_idea", "not_finite"}
    told = capfd.readouterr()
    assert "returned None" not in told.err + told.out
    assert "<answer>" not in told.err + told.out


def test_a_judge_that_is_gone_ends_the_training_with_code_2_and_it_goes_on_when_it_is_back(tmp_path, monkeypatch):
    calls, out = tmp_path / "calls", tmp_path / "rl"
    wanted = {
        "max_steps": 3,
        "save_steps": 100,
        "rollout.questions_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_tokens": 32,
        "format.max_steps": 3,
        "per_device_train_batch_size": 16,
        "validation.steps": 0,
        "outage.max_unscored": 0,
        "judge.spec": f"python:{TOYS}:DownJudge",
    }
    calls.write_text("12")
    command = ["rl", "train", "--preset", "demo-hiprag", "--out", str(out)]
    for name, value in wanted.items():
        command += ["--set", f"{name}={value}"]
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOY_JUDGE_CALLS": str(calls),
    }
    done = warmed.run(warmed.reasonrag, *command, environment=os.environ | environment)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "'unreachable'" in done.stderr
    assert "Traceback" not in done.stderr
    reached = int(last_checkpoint(out).name.rpartition("-")[2])
    assert reached >= 1 and not (out / "rollouts" / f"step-{reached + 1:06d}.parquet").exists()

    monkeypatch.setenv("TOY_JUDGE_CALLS", str(calls))
    calls.write_text("100000")
    lines = []
    named = {name.replace(".", "__"): value for name, value in wanted.items()}
    summary = toys.train(settings("demo-hiprag", **named), out, log=lines.append)
    assert f"resuming from checkpoint-{reached}" in lines
    assert summary["steps"] == 3


def test_two_processes_with_different_numbers_of_steps_train_as_one_does(tmp_path):
    ppo = {"algorithm": "ppo", "credit": "trajectory", "beta": 0.01}
    ppo |= {"judge__spec": "demo-judge", "validation__steps": 2, "validation__limit": 3}
    wanted = settings(**STEPS | ppo, seed=4)  # with 0, both questions have as many steps
    done = child(wanted, tmp_path / "two", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    history = trained(wanted, tmp_path / "one")
    for step in (1, 2):
        shares = [rollouts(tmp_path / "two", step, process) for process in range(2)]
        if step == 1:
            assert len({sum(len(row["row_advantages"]) for row in rows) for rows in shares}) == 2
        assert [len({row["question_id"] for row in rows}) for rows in shares] == [1, 1], "a rank holds whole groups"
        alone = rollouts(tmp_path / "one", step)
        for column in ("question_id", "turn", "reward"):
            assert [row[column] for rows in shares for row in rows] == [row[column] for row in alone]
    # Adam makes whole steps of gradients that are almost zero, and these differ in their last digits.
    assert farthest(weights(tmp_path / "two"), weights(tmp_path / "one")) < 2e-4
    assert {path.name for path in (tmp_path / "two").glob("judge-*.sqlite")} == {"judge-0.sqlite", "judge-1.sqlite"}
    summary = json.loads((tmp_path / "two" / "training.json").read_text())
    assert summary["processes"] == 2
    held_out = [[entry["eval_em"] for entry in h if "eval_em" in entry] for h in (summary["history"], history)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2


def test_an_adapter_is_trained_further_next_to_the_one_it_began_with(tmp_path):
    first = SMALL | {"method": "lora", "max_steps": 1, "learning_rate": 1e-2}
    trained(settings(**first), tmp_path / "first")
    again = first | {"model": str(tmp_path / "first"), "beta": 0.1, "max_steps": 2, "format__name": "search_r1"}
    again |= {"format__prompts": "brief", "retrieval__top_k": 1, "validation__steps": 1, "validation__limit": 2}
    start, later = logged(trained(settings(**again), tmp_path / "again"), "kl")
    assert start == pytest.approx(0.0, abs=1e-6), "the reference is the adapter, not the model below it"
    assert later > 1e-6
    for folder in (tmp_path / "again", tmp_path / "again" / "best"):
        assert (folder / "adapter_model.safetensors").exists()
        assert not (folder / "ref").exists()
    assert not (tmp_path / "again" / "best" / "README.md").exists()
