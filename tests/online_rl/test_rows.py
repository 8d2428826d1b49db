"""Rows from trajectories: what is trained on, how much it weighs, and whose advantage it gets."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from reasonrag.core.types import Answer, Completion, Prompt, Search, Step, StopReason, Trajectory
from reasonrag.online_rl.collector import Group, Sample
from reasonrag.online_rl.rows import REWARD, Row, Transcript, columns, group_advantages, training_rows
from reasonrag.rewards import Score
from tests.online_rl.test_trainer import gradient, logprobs, move, rolled_out
from tests.online_rl.toys import made, settings
from tests.toys import QUESTION

WHOLE = Transcript((1, 2), (3, 4, 5), (1, 0, 1), (-0.1, 0.0, -0.2), False)


def sample(*rows: Transcript, value: float | None = 1.0, number: int = 0, words: str = "") -> Sample:
    """An attempt with these rows; its steps say these words, if it has any."""
    steps = tuple(Step(Prompt(()), Completion(word), Search(word)) for word in words.split())
    attempt = Trajectory(QUESTION, steps, StopReason.NO_ANSWER) if steps else None
    return Sample(QUESTION, number, attempt, rows, Score(value, cause="" if value is not None else "timeout"))


def made_of(*samples: Sample, mask_truncated: bool = True) -> tuple[list[Row], dict[str, Any]]:
    rows = training_rows([Group(QUESTION, samples)], mask_truncated=mask_truncated)
    return rows, columns(rows, samples)


def test_rows_are_columns_of_lists():
    _, found = made_of(sample(WHOLE), sample(WHOLE, WHOLE, value=None, number=1))
    assert found["prompt_ids"] == [[1, 2]] * 3
    assert found["completion_ids"] == [[3, 4, 5]] * 3
    assert found["env_mask"] == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert found["logprobs"] == [[-0.1, 0.0, -0.2]] * 3
    assert found[REWARD] == [1.0, None], "one per trajectory"


@pytest.mark.parametrize(("mask_truncated", "mask"), [(True, [0, 0, 0]), (False, [1, 0, 1])])
def test_what_was_cut_off_is_masked_only_if_asked_for(mask_truncated, mask):
    rows, found = made_of(sample(replace(WHOLE, truncated=True), WHOLE), mask_truncated=mask_truncated)
    assert found["env_mask"] == [mask, [1, 0, 1]]
    assert [row.weight for row in rows] == ([0.0, 1.0] if mask_truncated else [0.5, 0.5])


def test_one_row_without_logprobs_leaves_the_batch_without():
    assert made_of(sample(WHOLE, replace(WHOLE, logprobs=None)))[1]["logprobs"] is None


def test_a_step_is_credited_with_the_mean_of_the_trajectories_that_take_it():
    steps = [replace(WHOLE, steps=number) for number in (1, 2)]
    samples = [
        sample(*steps, value=1.0, number=0, words="Jaws Spielberg"),
        sample(*steps, value=0.0, number=1, words="Jaws Lucas"),
        sample(*steps, value=None, number=2, words="Jaws Spielberg"),
        sample(*steps, value=0.5, number=3, words="Shark Spielberg"),
    ]
    groups = [Group(QUESTION, (sample(WHOLE),)), Group(QUESTION, tuple(samples))]
    rows = training_rows(groups, mask_truncated=True, credit="step")
    own = [(row.owners) for row in rows[1:]]
    assert own == [(1, 2), (1,), (1, 2), (2,), (1, 2), (1,), (4,), (4,)]
    whole = training_rows(groups, mask_truncated=True)
    assert [row.owners for row in whole] == [(0,), (1,), (1,), (2,), (2,), (3,), (3,), (4,), (4,)]


@pytest.fixture(scope="module")
def reasonrag(tmp_path_factory):
    """A trainer on ReasonRAG's format, four rows a pass, whose policy has moved away from the one that rolled out."""
    import torch

    wanted = settings(
        "demo-reasonrag",
        reward__name="tests.online_rl.toys:HolesReward",
        outage__max_unscored=1.0,
        format__max_steps=6,
        rollout__max_tokens=24,
        rollout__temperature=1.5,
        rollout__questions_per_step=2,
        per_device_train_batch_size=4,
    )
    with made(wanted, tmp_path_factory.mktemp("reasonrag") / "out") as trainer:
        advantages: list[Any] = []
        weigh = trainer.weigh
        trainer.weigh = lambda out, scored: advantages.append((out, scored)) or weigh(out, scored=scored)
        inputs, _ = rolled_out(trainer)
        trainer.weigh = weigh
        ((out, scored),) = advantages
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        attention = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        length = out["completion_ids"].size(1)
        with torch.no_grad():
            old, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, length)
            alone = [row_logprobs(trainer, row) for row in trainer.rows]
        move(trainer.model, share=0.2)
        yield trainer, inputs, out | {"old_per_token_logps": old}, scored, alone


def row_logprobs(trainer: Any, row: Row) -> Any:
    import torch

    prompt, said = torch.tensor(row.tokens.prompt_ids), torch.tensor(row.tokens.completion_ids)
    return logprobs(trainer.model, prompt, said, trainer.temperature)


def by_trajectory(trainer: Any) -> dict[int, list[Row]]:
    found = defaultdict(list)
    for row in trainer.rows:
        if row.weight:
            found[row.owners[0]].append(row)
    return found


@pytest.mark.slow
def test_the_weights_of_a_trajectory_sum_to_one_however_many_steps_it_has(reasonrag):
    trainer, _, _, scored, _ = reasonrag
    rows = by_trajectory(trainer)
    assert len({len(steps) for steps in rows.values()}) > 1, "the trajectories have to differ in length"
    assert [sum(row.weight for row in steps) for steps in rows.values()] == pytest.approx([1.0] * len(rows), abs=1e-12)
    assert len(rows) == scored < 8, "one without a reward has no weight"
    assert len(trainer.rows) % trainer.args.steps_per_generation == 0


def hand_written(trainer: Any, old: list[Any], inputs: Any, loss: str) -> Any:
    """PPO's clipped loss, a row at a time without any padding, from rewards to the mean over trajectories."""
    import torch

    rewards = [row[REWARD] for row in inputs]
    advantages = [a for first in (0, 4) for a in group_advantages(rewards[first : first + 4])]
    total, counted, clipped = 0.0, 0.0, 0
    for number, rows in by_trajectory(trainer).items():
        for row in rows:
            mask = torch.tensor(row.mask, dtype=torch.float32)
            ratio = torch.exp(row_logprobs(trainer, row) - old[trainer.rows.index(row)])
            kept = ratio.clamp(1 - 0.2, 1 + 0.28)
            objective = torch.minimum(ratio * advantages[number], kept * advantages[number])
            clipped += int(((objective != ratio * advantages[number]) * mask).sum())
            share = 1 / len(rows)
            total = total - share * (objective * mask).sum() / (mask.sum() if loss == "grpo" else 1)
            counted += share * float(mask.sum())
    assert clipped > 2, "clipping has to matter"
    scored = sum(reward is not None for reward in rewards)
    return total / {"grpo": scored, "dapo": counted, "dr_grpo": scored * trainer.max_completion_length}[loss]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_the_gradient_of_a_step_is_that_of_a_loss_written_by_hand(loss, reasonrag):
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    trainer, inputs, out, scored, old = reasonrag
    trainer.averaging = loss
    weighed = shuffle_sequence_dict(trainer.weigh(out, scored=scored))
    parts = split_tensor_dict(weighed, trainer.args.steps_per_generation)
    assert len(parts) == 2 and len(parts[0]["advantages"]) > 8, "several passes of four rows"
    value = 0.0
    for part in parts:
        one = trainer.compute_loss(trainer.model, part)
        one.backward()
        value += float(one.detach())
    trl = gradient(trainer.model)
    reference = hand_written(trainer, old, inputs, loss)
    reference.backward()
    ours = gradient(trainer.model)
    assert value == pytest.approx(float(reference.detach()), rel=1e-4)
    assert (trl - ours).norm() / ours.norm() < 1e-5
    assert ours.norm() > 1e-5


def test_an_answer_at_once_weighs_as_much_as_eight_steps():
    short = Trajectory(QUESTION, (Step(Prompt(()), Completion("x"), Answer("x")),), StopReason.ANSWERED)
    rows, _ = made_of(replace(sample(WHOLE), trajectory=short), sample(*[WHOLE] * 8, number=1))
    assert [row.weight for row in rows] == [1.0] + [0.125] * 8
