"""How the commands that train end: `dpo`, `sft`, `prm` and `rl train` share `run_training`."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import click
import pytest

from reasonrag.commands.train import dpo_train, rl_train, run_training
from reasonrag.core.errors import Interrupted
from reasonrag.storage.files import write_json


def _stopped(number, out, log):
    raise Interrupted("stopped after step 4 of 6", number=number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_a_signal_stopped_ends_with_its_code_and_says_how_to_go_on(number, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reasonrag", "rl", "train", "--out", "policies/rl"])
    with pytest.raises(SystemExit) as ended:
        run_training(f"{__name__}:_stopped", number, None)
    assert ended.value.code == 128 + number
    said = capsys.readouterr().err
    assert "stopped after step 4 of 6. Resume with:" in said and "reasonrag rl train --out policies/rl" in said


def _trained(config, out, log):
    log("trained")
    write_json(out / "training.json", {})
    return SimpleNamespace(summary={"steps": 1}, out=out)


def test_a_training_that_is_finished_is_not_imported_again(tmp_path, capsys):
    for _ in range(2):
        run_training(f"{__name__}:_trained", "settings", tmp_path)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["trained", "this training run is already finished"]
    assert printed.out == 2 * f"policy: {tmp_path}\n"
    (tmp_path / "training.json").unlink()
    run_training(f"{__name__}:_trained", "settings", tmp_path)
    assert capsys.readouterr().err == "trained\n"


@pytest.mark.parametrize("spell", [str, lambda name: name.replace("_", "-")], ids=["underscores", "hyphens"])
def test_arguments_of_trl_are_options_of_a_training(spell):
    typed = {
        **{"--output_dir": "out", "--model_name_or_path": "org/model", "--dataset_name": "runs/demo"},
        **{"--per_device_train_batch_size": "4", "--num_train_epochs": "2", "--learning_rate": "1e-5"},
        **{"--max_steps": "7", "--logging_steps": "1", "--eval_steps": "5", "--deepspeed": "zero3.json"},
    }
    words = [word for name, value in typed.items() for word in (spell(name), value)]
    given = dpo_train.make_context("train", [*words, spell("--use_peft"), spell("--bf16"), "--beta=0.1"]).params
    shown = {name: str(value) for name, value in given.items() if value and name != "assignments"}
    assert shown == {
        **{"out": "out", "model": "org/model", "data": "runs/demo", "beta": "0.1"},
        **{"per_device_train_batch_size": "4", "num_train_epochs": "2.0", "learning_rate": "1e-05"},
    }
    of_trainer = {
        "trainer.logging_steps=1",
        "trainer.eval_steps=5",
        "trainer.deepspeed=zero3.json",
        "trainer.bf16=true",
    }
    assert set(given["assignments"]) == {"max_steps=7", "method=lora", *of_trainer}


def test_arguments_of_trl_mean_what_the_training_calls_them():
    given = rl_train.make_context("train", ["--dataset_name", "nq", "--num-generations=8", "--max_steps", "3"]).params
    assert (given["data"], given["rollout__group_size"], given["max_steps"]) == ("nq", 8, 3)
    full = dpo_train.make_context("train", ["--gradient_checkpointing", "False", "--use-peft=false"]).params
    assert full["assignments"] == ("trainer.gradient_checkpointing=False", "method=full")


def test_a_mistyped_argument_of_trl_is_refused_with_the_name_that_was_meant():
    with pytest.raises(click.NoSuchOption, match="per_device_train_batchsize") as raised:
        dpo_train.make_context("train", ["--per_device_train_batchsize", "4"])
    assert raised.value.possibilities == ["--per_device_train_batch_size"]


@pytest.mark.parametrize("word", ["--push_to_hub", "--resume-from-checkpoint"])
def test_an_argument_of_trl_that_is_another_command_names_it(word):
    with pytest.raises(click.UsageError, match=r"reasonrag publish|the same command resumes"):
        dpo_train.make_context("train", [word])
