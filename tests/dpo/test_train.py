"""Whole trainings of a tiny model: what they leave behind, and how they survive signals and nonsense."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from reasonrag.core.errors import ConfigError, DataError, Interrupted, RunError
from reasonrag.publish.verify import verify
from reasonrag.training.run import last_checkpoint
from tests import warmed
from tests.faults.test_flips import each_flip, tally
from tests.llm.tiny import save_tiny_model
from tests.training.toys import dpo_settings, pair_row, train, write_pairs

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).parents[2]
EACH = {"logging_steps": 1, "eval_steps": 1}
EVERY_6 = {"logging_steps": 1, "eval_steps": 6}
MARKS = ("complete.json", "training.json")  # name checksums and figures; no weight is read from them


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


@pytest.fixture(scope="module")
def whole(policy, data, tmp_path_factory):
    """Twelve steps without interruption: the folder and the summary."""
    out = tmp_path_factory.mktemp("whole") / "dpo"
    return out, quietly(dpo_settings(data, policy, max_steps=12, save_steps=3, trainer=EVERY_6), out)


def quietly(settings, out):
    return train(settings, out, log=lambda line: None)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(one, other, tolerance):
    return one.keys() == other.keys() and all((one[k] - other[k]).abs().max() <= tolerance for k in one)


def test_a_policy_is_held_to_the_reference_model_that_is_named(policy, data, whole, tmp_path):
    losses = []
    for reference in (None, str(policy)):
        settings = dpo_settings(
            data, whole[0], max_steps=1, trainer=EVERY_6, reference_model=reference, loss_type="sigmoid"
        )
        losses.append(quietly(settings, tmp_path / str(bool(reference)))["history"][0]["eval_loss"])
    assert losses[0] == pytest.approx(math.log(2)) and losses[1] < losses[0] - 0.05
    other = Path(shutil.copytree(whole[0], tmp_path / "other" / policy.name))
    with pytest.raises(RunError, match=r"content\.data"):
        quietly(settings.model_copy(update={"reference_model": str(other)}), tmp_path / "True")


CHILD = """
import json, sys
from pathlib import Path
from reasonrag.dpo.train import train_dpo
from reasonrag.training.settings import DPOSettings

tree, out = json.loads(sys.argv[1]), Path(sys.argv[2])
train_dpo(DPOSettings.model_validate(tree), out, log=lambda line: print(line, flush=True))
"""


def child(settings, out, *, processes=1):
    script = out.parent / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    arguments = [json.dumps(settings.model_dump(mode="json")), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if processes == 1:
        return warmed.run(warmed.script, str(script), *arguments, environment=environment)
    return warmed.run_ranks(processes, warmed.script, str(script), *arguments, environment=environment)


@pytest.mark.slow
def test_twelve_steps_raise_the_margin(whole):
    _, summary = whole
    margins = [entry["rewards/margins"] for entry in summary["history"] if "rewards/margins" in entry]
    held_out = [entry["eval_rewards/margins"] for entry in summary["history"] if "eval_rewards/margins" in entry]
    assert len(margins) == 12
    assert margins[0] == 0.0
    assert margins[-1] > margins[4] > 0.0
    assert held_out[-1] > held_out[1] > held_out[0] == 0.0
    assert summary["final"]["held_out"]["eval_rewards/accuracies"] == 1.0


@pytest.mark.slow
def test_the_folder_holds_the_model_and_how_it_was_made(whole, policy, data):
    out, summary = whole
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert summary == json.loads((out / "training.json").read_text())
    assert summary["steps"] == 12
    assert summary["data"]["train"] == {"pairs": 48, "questions": 48}
    assert summary["tokens_seen"] > 1000
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"checkpoint-9", "checkpoint-12", "identity.json"}
    assert {p.name for p in out.iterdir()} >= {"config.yaml", "curves.svg", "curves.png", "generation_config.json"}
    assert not list(out.glob("*.bin"))
    text = (out / "training.json").read_text()
    assert str(policy) not in text
    assert str(data) not in text


@pytest.mark.slow
@pytest.mark.fault(
    "flips",
    "a random bit of a checkpoint (weights, optimizer, trainer state, every other file), and of the trained model",
    "noticed, or in no file that a weight is read from; resuming leaves the checkpoint out",
)
def test_a_flipped_bit_of_a_checkpoint_or_of_the_policy_is_noticed(whole, rounds, figure):
    out = whole[0]
    last = out / "checkpoints" / "checkpoint-12"
    parts = {"checkpoint": last.glob("*"), "trained model": (*out.glob("*.json"), *out.glob("*.safetensors"))}
    for what, found in parts.items():
        files = sorted(file for file in found if file.is_file())
        seen = tally(files, rounds(20, 300), lambda: verify(out).problems, lambda file: file.name in MARKS)
        figure(f"{what}, {len(files)} files: {seen}")
    for _ in each_flip([last / "model.safetensors", last / "optimizer.pt", last / "trainer_state.json"], 3):
        lines = []
        assert last_checkpoint(out, lines.append).name == "checkpoint-9"
        assert lines[0].startswith("checkpoint-12 is left out: ")


@pytest.mark.slow
def test_the_same_settings_and_seed_give_the_same_weights_and_another_seed_others(whole, policy, data, tmp_path):
    settings = {"max_steps": 12, "save_steps": 3, "trainer": EVERY_6}
    quietly(dpo_settings(data, policy, **settings), tmp_path / "again")
    quietly(dpo_settings(data, policy, **settings, seed=1), tmp_path / "other")
    assert same(weights(tmp_path / "again"), weights(whole[0]), 0.0)
    assert not same(weights(tmp_path / "other"), weights(whole[0]), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["precomputed"])
def test_two_processes_train_one_policy_and_the_first_one_writes(reference, policy, data, tmp_path):
    few = {"max_steps": 4, "save_steps": 2, "loss_type": "sigmoid"}
    settings = dpo_settings(data, policy, per_device_train_batch_size=4, reference=reference, **few)
    done = child(settings, tmp_path / "dpo", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 4/4  loss") == 1
    summary = json.loads((tmp_path / "dpo" / "training.json").read_text())
    assert (summary["processes"], summary["steps"]) == (2, 4)
    states = sorted(p.name for p in last_checkpoint(tmp_path / "dpo").glob("rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]
    alone = quietly(dpo_settings(data, policy, per_device_train_batch_size=8, **few), tmp_path / "alone")
    assert summary["final"]["held_out"]["eval_loss"] == pytest.approx(alone["final"]["held_out"]["eval_loss"], abs=0.02)
    first = next(entry for entry in summary["history"] if "loss" in entry)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_ends_after_the_step_and_the_same_call_goes_on(number, policy, data, tmp_path):
    settings = dpo_settings(data, policy, save_steps=100)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    lines = []

    def log(line):
        lines.append(line)
        if line.startswith("step 2/"):
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=r"after step 3 of 6"):
        train(settings, tmp_path / "dpo", log=log)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert any(line.startswith("stopping after this step") for line in lines)
    assert last_checkpoint(tmp_path / "dpo").name == "checkpoint-3"
    summary = quietly(settings, tmp_path / "dpo")
    assert summary["steps"] == 6
    assert [entry["step"] for entry in summary["history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]


def test_the_checkpoint_before_held_out_steps_are_unlearned_is_kept_also_by_a_run_that_was_stopped(policy, tmp_path):
    rows = [pair_row(number) for number in range(56)]
    for row in rows[48:]:  # what is chosen here is rejected in training
        row |= {side: row[other] for side, other in (("chosen", "rejected"), ("rejected", "chosen"))}
    data = write_pairs(tmp_path / "pairs", rows=rows)
    falling = dpo_settings(data, policy, max_steps=8, warmup_ratio=0.5, save_steps=100, trainer=EACH)
    lines = []
    whole = train(falling, tmp_path / "whole", log=lines.append)
    (said,) = [line for line in lines if "kept step" in line]
    figure = re.fullmatch(r"the held-out chosen .* fell too far .* by step (\d): kept step (\d) of 8; .*", said)
    assert figure and int(figure[1]) > int(figure[2]) == whole["kept_step"]
    losses = [entry["eval_loss"] for entry in whole["history"] if "eval_loss" in entry]
    assert losses[-1] == losses[whole["kept_step"]] <= 1.01 * min(losses[1:]), "of the weights that are kept"

    kept = tmp_path / "whole" / "checkpoints" / f"checkpoint-{whole['kept_step']}"
    assert same(weights(tmp_path / "whole"), weights(kept), 0.0)

    def stop(line):
        if line.startswith("step 6/8  loss"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(falling, tmp_path / "cut", log=stop)
    (tmp_path / "cut").rename(tmp_path / "moved")
    assert quietly(falling, tmp_path / "moved")["kept_step"] == whole["kept_step"]
    assert same(weights(tmp_path / "moved"), weights(tmp_path / "whole"), 0.0)


@pytest.mark.fault("24", "a training run that diverges to NaN", "one line, and the last good checkpoint is kept")
@pytest.mark.parametrize(
    ("learning_rate", "said", "kept"),
    [
        (1e30, "the loss is not a finite number in step 2.*checkpoints before step 2 are kept", "checkpoint-1"),
        (1e39, r"the weight model\.\S+ is not a finite number in step 1.*nothing was trained", None),
    ],
)
def test_a_training_that_diverges_ends_and_keeps_the_last_good_checkpoint(
    policy, data, tmp_path, figure, learning_rate, said, kept
):
    import torch

    constant = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "save_steps": 1}
    with pytest.raises(RunError, match=rf"{said}.*learning_rate") as ended:
        # Beyond what a flag may set.
        settings = dpo_settings(data, policy, **constant).model_copy(update={"learning_rate": learning_rate})
        quietly(settings, tmp_path / "dpo")
    last = last_checkpoint(tmp_path / "dpo")
    figure(f"{str(ended.value).partition(',')[0]}: kept {last.name if last else 'none'}")
    assert (last.name if last else None) == kept
    assert last is None or all(torch.isfinite(value).all() for value in weights(last).values())
    assert not (tmp_path / "dpo" / "training.json").exists()


@pytest.mark.slow
def test_a_checkpoint_that_was_damaged_is_named_and_written_anew(policy, data, tmp_path):
    settings, out = dpo_settings(data, policy, save_steps=2), tmp_path / "dpo"
    first = quietly(settings, out)
    (out / "training.json").unlink()
    state = out / "checkpoints" / "checkpoint-6" / "optimizer.pt"
    flipped = bytearray(state.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    state.write_bytes(flipped)
    lines = []
    second = train(settings, out, log=lines.append)
    damaged = "checkpoint-6 is left out: optimizer.pt is damaged: its checksum differs"
    assert lines[(at := lines.index(damaged)) : at + 2] == [damaged, "resuming from checkpoint-4"]
    assert second["final"]["train"]["loss"] == pytest.approx(first["final"]["train"]["loss"], abs=1e-6)
    assert last_checkpoint(out).name == "checkpoint-6"


@pytest.mark.fault(
    "power cut",
    "the model of a finished training run is cut to nothing; the same command",
    "refused in a line; once training.json is deleted, the same model is written from the last checkpoint",
    before="'already finished', exit code 0",
)
def test_a_finished_training_is_not_done_again(policy, data, tmp_path, figure):
    settings = dpo_settings(data, policy, max_steps=1)
    first, lines = quietly(settings, tmp_path / "dpo"), []
    stamp = (tmp_path / "dpo" / "model.safetensors").stat().st_mtime_ns
    assert train(settings, tmp_path / "dpo", log=lines.append) == first
    assert lines[-1] == "this training run is already finished"
    assert (tmp_path / "dpo" / "model.safetensors").stat().st_mtime_ns == stamp
    os.truncate(tmp_path / "dpo" / "model.safetensors", 0)
    with pytest.raises(RunError, match=r"since then model.safetensors has 0 bytes, not \d+; bring that back"):
        train(settings, tmp_path / "dpo")
    (tmp_path / "dpo" / "training.json").unlink()
    again = quietly(settings, tmp_path / "dpo")["files"]
    figure(
        f"refused in one line; {sum(again[name] == first['files'][name] for name in again)} of {len(again)} files equal"
    )
    assert again == first["files"]


def test_a_run_that_died_after_its_last_checkpoint_makes_no_further_step(policy, data, tmp_path):
    settings, out = dpo_settings(data, policy, max_steps=1, lr_scheduler_type="constant", warmup_ratio=0.0), tmp_path
    first, trained = quietly(settings, out / "dpo"), weights(out / "dpo")
    for written_last in ("training.json", "model.safetensors"):
        (out / "dpo" / written_last).unlink()
    second = quietly(settings, out / "dpo")
    assert second["steps"] == first["steps"] == 1
    again = weights(out / "dpo")
    assert all(again[name].equal(value) for name, value in trained.items())


def test_a_folder_with_another_training_is_refused_and_the_settings_are_named(policy, data, tmp_path):
    quietly(dpo_settings(data, policy, max_steps=1), tmp_path / "dpo")
    with pytest.raises(RunError, match=r"beta: 0.3 there, 0.1 now"):
        quietly(dpo_settings(data, policy, max_steps=1, beta=0.1), tmp_path / "dpo")
    with pytest.raises(RunError, match=r"content.data: '\w+' there, '\w+' now"):
        quietly(dpo_settings(write_pairs(tmp_path / "more", train=47), policy, max_steps=1), tmp_path / "dpo")


def test_what_cannot_change_the_result_may_differ(policy, data, tmp_path):
    first = quietly(dpo_settings(data, policy, max_steps=1), tmp_path / "dpo")
    assert quietly(dpo_settings(data, policy, max_steps=1, save_steps=7), tmp_path / "dpo") == first


def test_few_pairs_are_refused_in_one_line_unless_they_are_asked_for(policy, tmp_path):
    few = write_pairs(tmp_path / "pairs", train=25, test=5)
    with pytest.raises(DataError) as refused:
        quietly(dpo_settings(few, policy, min_examples=200, min_questions=26), tmp_path / "dpo")
    assert str(refused.value).startswith("pairs: 25 pairs of 25 questions to train on; so few teach")
    assert str(refused.value).endswith("train on these with --min-examples 25 --min-questions 25")
    assert "\n" not in str(refused.value) and not (tmp_path / "dpo").exists()


def test_pairs_of_which_nothing_is_known_teach_nothing_if_the_labels_are_smoothed(policy, tmp_path):
    rows = [pair_row(number) | {"confidence": 0.5} for number in range(16)]
    data, margins = write_pairs(tmp_path / "pairs", train=16, rows=rows), []
    for smooth in (True, False):
        settings = dpo_settings(data, policy, max_steps=3, loss_type="sigmoid", smooth_by_confidence=smooth)
        margins.append(quietly(settings, tmp_path / str(smooth))["final"]["train"]["rewards/margins"])
    assert abs(margins[0]) < 0.01 < margins[1]


def test_a_training_without_held_out_questions_has_no_held_out_figures(policy, tmp_path):
    data = write_pairs(tmp_path / "pairs", train=16, test=0)
    summary = quietly(dpo_settings(data, policy, max_steps=2), tmp_path / "dpo")
    assert summary["final"]["held_out"] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"trainer": {"weight_dekay": 0.1}},
            "trainer.weight_dekay is unknown to DPOConfig; did you mean 'weight_decay'",
        ),
        ({"trainer": {"learning_rate": 0.1}}, "trainer.learning_rate cannot be set"),
        ({"trainer": {"output_dir": "/tmp"}}, "trainer.output_dir cannot be set"),
        ({"trainer": {"optim": "no_such"}}, "TRL refuses these settings"),
        ({"trainer": {"report_to": "trackio"}}, "TRL or peft refuses these settings"),
        ({"trainer": {"use_liger_kernel": True}}, "transformers cannot train with these settings"),
        ({"loss_type": "sigmiod"}, "did you mean 'sigmoid'"),
    ],
)
def test_settings_that_cannot_work_say_so(overrides, message, policy, data, tmp_path):
    with pytest.raises(ConfigError) as caught:
        quietly(dpo_settings(data, policy, **overrides), tmp_path / "dpo")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    quietly(dpo_settings(data, policy, max_steps=1), tmp_path / "dpo")  # a mistake does not take the folder


def write_trajectories(folder, count):
    from reasonrag.storage.parquet import write_parquet
    from reasonrag.storage.tables import trajectory_pair_schema

    def side(number, name, steps):
        return [
            {
                "prompt": [{"role": "user", "content": f"Question {number}, step {step}?"}],
                "prefix": "",
                "text": f"<query>{name}</query>" if step + 1 < steps else f"<answer>{name}</answer>",
                "end": "stop",
            }
            for step in range(steps)
        ]

    rows = [
        {
            "chosen_steps": side(number, "Steven Spielberg", 1 + number % 2),
            "rejected_steps": side(number, "the sea", 2 + number % 2),
            "question_id": str(number),
            "dataset": "toy",
            "depth": 0,
            "margin": 0.5 + number % 3,
        }
        for number in range(count)
    ]
    rows = [dict.fromkeys(trajectory_pair_schema().names) | row | {"pair_id": row["question_id"]} for row in rows]
    folder.mkdir()
    for split, some in (("train", rows[:-6]), ("test", rows[-6:])):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", some, trajectory_pair_schema())
    return folder


def test_the_held_out_loss_counts_every_pair_alike_whatever_its_length(policy, tmp_path):
    """In batches of four and two, with sides of one to three steps."""
    data = write_trajectories(tmp_path / "trajectories", 30)
    losses = []
    for size in (4, 6):
        settings = dpo_settings(
            data, policy, loss_type="sigmoid", max_steps=2, trainer={"per_device_eval_batch_size": size}
        )
        losses.append(quietly(settings, tmp_path / str(size))["final"]["held_out"]["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
