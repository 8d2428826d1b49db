"""Figures of a batch, and its trajectories on disk."""

from __future__ import annotations

from dataclasses import replace

from reasonrag.core.types import Completion, Span
from reasonrag.formats import FORMATS
from reasonrag.online_rl.collector import Batch, Group, Sample, batch_metrics, over_under, write_rollouts
from reasonrag.online_rl.rows import Transcript
from reasonrag.rewards import Score
from tests.online_rl.toys import rollouts
from tests.rewards.toys import hiprag

FORMAT = FORMATS["hiprag"]()
RIGHT = hiprag(("Jaws", "by Spielberg"))
MUTE = Transcript((1,), (1,), (0,), (0.0,), False)


def batch(*scores: Score) -> Batch:
    written = Transcript((1, 2), (3, 4, 5), (1, 0, 1), None, False)
    samples = [
        Sample(RIGHT.question, n, RIGHT if score.parts else None, (written if score.parts else MUTE,), score)
        for n, score in enumerate(scores)
    ]
    return Batch([Group(RIGHT.question, tuple(samples))])


PARTS = {"over": 1.0, "under": 0.0, "searches": 2.0, "searches_known": 1.0, "own_steps": 2.0, "own_steps_known": 1.0}
MADE = batch(
    Score(1.0, PARTS),
    Score(0.5, {**PARTS, "over": 0.0}),
    Score(None, {**PARTS, "over": None, "under": None, "searches_known": None, "own_steps_known": None}, "timeout"),
    Score(None, cause="context_overflow"),
)


def test_means_are_over_what_is_there():
    found = batch_metrics(MADE, FORMAT)
    assert found["rollout/reward"] == 0.75
    assert found["rollout/unscored"] == 0.5
    assert found["reward/over"] == 0.5
    assert found["rollout/em"] == 1.0, "the attempt that could not be made is in no mean"
    assert found["rollout/tokens"] == 1.5


def test_over_and_under_search_are_shares_of_the_steps_with_a_verdict():
    found = batch_metrics(MADE, FORMAT)
    assert (found["rollout/osr"], found["rollout/usr"]) == (0.5, 0.0), "1 of the 2 known searches, of 4 that were made"
    assert over_under([{"known_steps": 3.0, "silent": 1.0}]) == {"rollout/silent": 0.25}
    assert over_under([{"em": 1.0}]) == over_under([{**PARTS, "searches_known": 0.0, "own_steps_known": 0.0}]) == {}


def test_every_trajectory_is_kept_with_all_that_its_reward_is_made_of(tmp_path):
    advantages = [0.7, -0.7, 0.0, 0.0]
    write_rollouts(MADE, advantages, advantages, tmp_path / "rollouts", step=6, process=1, format=FORMAT)
    rows = rollouts(tmp_path, 7, process=1)
    assert [row["reward"] for row in rows] == [1.0, 0.5, None, None]
    assert [row["cause"] for row in rows] == ["", "", "timeout", "context_overflow"]
    assert [row["advantage"] for row in rows] == advantages
    assert [row["row_advantages"] for row in rows] == [[advantage] for advantage in advantages]
    assert dict(rows[0]["parts"]) == PARTS
    assert dict(rows[2]["parts"])["over"] is None
    assert rows[0]["turn"].endswith("</answer>") and rows[3]["turn"] == ""
    assert (rows[0]["tokens"], rows[0]["policy_tokens"], rows[0]["well_formed"]) == (3, 2, True)


def test_a_secret_is_not_written_and_what_is_trained_on_keeps_it(tmp_path):
    key = "sk-" + "aB3dE5fG7h" * 5
    last = RIGHT.steps[-1]
    prompt = replace(last.prompt, turn=(*last.prompt.turn, Span(f"<context>{key}</context>")))
    step = replace(last, prompt=prompt, completion=Completion(f"<answer>{key}</answer>", token_ids=(3, 4, 5)))
    question = replace(RIGHT.question, golden_answers=(key, "Jaws"))
    trajectory = replace(RIGHT, question=question, steps=(*RIGHT.steps[:-1], step))
    (sample, *_) = MADE.samples
    told = Batch([Group(question, (replace(sample, question=question, trajectory=trajectory),))])
    write_rollouts(told, [0.0], [0.0], tmp_path / "rollouts", step=0, process=0, format=FORMAT)
    (row,) = rollouts(tmp_path, 1)
    assert key not in str(row)
    assert row["turn"].endswith("<context>***</context><answer>***</answer>")
    assert row["golden_answers"] == ["***", "Jaws"]
    assert told.samples[0].trajectory.steps[-1] is step


def test_two_groups_of_one_question_have_samples_of_different_numbers(tmp_path):
    twice = Batch([*MADE.groups, *MADE.groups])
    write_rollouts(twice, [0.0] * 8, [0.0] * 8, tmp_path / "rollouts", step=0, process=0, format=FORMAT)
    assert [row["sample"] for row in rollouts(tmp_path, 1)] == list(range(8))
