"""Finished trainings and evaluations of any size, written by the product, whose texts attack their reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reasonrag.core.config import load_config
from reasonrag.core.types import Answer, Completion, Passage, Question, Search, Step, StopReason, Trajectory
from reasonrag.evaluation.metrics import NOT_JUDGED, Attempt, attempt_values, trajectory_row
from reasonrag.evaluation.summary import Outcome, PolicyResult, Setting, summarize
from reasonrag.formats import FORMATS
from reasonrag.formats.base import Reading
from reasonrag.online_rl.collector import Batch, Group, Sample, write_rollouts
from reasonrag.online_rl.rows import Transcript, group_advantages
from reasonrag.online_rl.settings import RLSettings
from reasonrag.rewards.base import Score
from reasonrag.storage.files import write_text
from reasonrag.storage.parquet import ShardWriter
from reasonrag.storage.tables import trajectory_schema
from reasonrag.training.run import summarise
from tests.report.hostile import HOSTILE

SETTING = Setting(0.0, 8, 3)
GOLD = "gold"
Texts = Callable[[int], str]


def hostile(words: int) -> str:
    """The attack, whatever the number of words."""
    return HOSTILE


def question(number: int, text: Texts = hostile) -> Question:
    return Question(f"q{number} {text(1)}", f"Who? {text(9)}", (GOLD, text(2)), dataset="d", metadata={"type": text(1)})


def trajectory(of: Question, searches: Sequence[str], answer: str, text: Texts = hostile) -> Trajectory:
    """A turn in Search-R1's format that searches for each of some things, and answers."""
    made = FORMATS["search_r1"]()
    steps: tuple[Step, ...] = ()
    for query in searches:
        passages = tuple(Passage(text(1), f"Title\n{text(100)}", 1.5) for _ in range(3))
        steps += (
            _step(made, of, steps, f"<think>{text(12)}</think><search>{query}</search>", Search(query), passages),
        )
    steps += (_step(made, of, steps, f"<think>{text(12)}</think><answer>{answer}</answer>", Answer(answer)),)
    return Trajectory(of, steps, StopReason.ANSWERED)


def _step(made: Any, of: Question, steps: tuple[Step, ...], text: str, action: Any, passages: Any = ()) -> Step:
    prompt = made.prompt(of, steps)
    return Step(prompt, Completion(text, prompt_tokens=50, completion_tokens=20), action, passages)


def write_training(
    folder: Path, *, steps: int = 3, questions: int = 2, size: int = 4, text: Texts = hostile, reward: str = "hiprag"
) -> Path:
    """An online training: of each group the last attempt has no verdict, and the one before it is cut off."""
    folder.mkdir(parents=True)
    settings = RLSettings.model_validate(
        {"data": text(1), "model": text(1), "format": {"name": "search_r1"}, "reward": {"name": reward}}
    )
    for step in range(steps):
        made = [_group(question(step * questions + n, text), size, text) for n in range(questions)]
        batch = Batch(made)
        advantages = [advantage for group in made for advantage in group_advantages(group.rewards)]
        form = FORMATS["search_r1"]()
        write_rollouts(batch, advantages, advantages, folder / "rollouts", step=step, process=0, format=form)
    history = [_entry(step, text) for step in range(1, steps + 1)]
    _write_summary(folder, "rl", settings, history, text, {"reward": reward})
    return folder


def _group(of: Question, size: int, text: Texts) -> Group:
    attempts = [
        trajectory(of, [f"query {text(2)}"] * (n % 3), GOLD if n % 2 else f"not {text(2)}", text) for n in range(size)
    ]
    samples = []
    for n, attempt in enumerate(attempts):
        right = float(attempt.answer == GOLD)
        parts = {"em": right, "answer": right, "format": 1.0, "bonus": None if n == size - 1 else 0.4, text(1): 0.5}
        score = Score(None, parts, "unreachable") if n == size - 1 else Score(right + n / 100, parts)
        written = Transcript((1,), (1,) * 30, (1,) * 20 + (0,) * 10, None, n == size - 2)
        samples.append(Sample(of, n, attempt, (written,), score))
    return Group(of, tuple(samples))


def _entry(step: int, text: Texts) -> dict[str, Any]:
    parts = {f"reward/part {n}": n + step / 7 for n in range(8)} | {f"reward/{text(1)}": 0.5}
    return {
        "loss": 1 / step,
        "rollout/em": step / 50,
        "rollout/reward": step / 40,
        "eval_em": 0.3,
        "step": step,
    } | parts


def write_pair_training(folder: Path, *, text: Texts = hostile) -> Path:
    """A DPO training of two logged steps."""
    folder.mkdir(parents=True)
    settings = RLSettings.model_validate({"data": text(1), "model": text(1)})  # pages read the identity alone
    history = [
        {"loss": 0.7, "rewards/margins": 0.1, "step": 10},
        {"eval_loss": 0.65, "eval_rewards/margins": 0.2, "step": 10},
        {"loss": 0.6, "rewards/margins": float("nan"), "step": 20},
    ]
    _write_summary(folder, "dpo", settings, history, text, {})
    return folder


def _write_summary(
    folder: Path, stage: str, settings: RLSettings, history: list[dict[str, Any]], text: Texts, more: dict[str, Any]
) -> None:
    state = SimpleNamespace(global_step=history[-1]["step"], epoch=1.0, num_input_tokens_seen=99, log_history=history)
    lengths = {"longest": 3, "max_length": 12345}
    data = {"source": text(1), "checksum": "0", "train": {"pairs": 7}, "lengths": lengths}
    identity = {"beta": 0.3, "content.model": text(1)}
    facts = {"data": data, "model": {"name": text(1), "checksum": "0"}, "device": "a machine", "processes": 1, **more}
    summary = summarise(state, settings, identity, seconds=1.0, stage=stage, **facts)
    write_text(folder / "training.json", json.dumps(summary))


def write_evaluation(
    folder: Path,
    count: int,
    policies: Sequence[str] = ("base", "other"),
    *,
    text: Texts = hostile,
    failing: Sequence[tuple[str, int]] = (),
    settings: Sequence[Setting] = (SETTING,),
) -> Path:
    """An evaluation: policy p answers question q right unless q is a multiple of p + 2; `failing` are set aside."""
    asked = [question(n, text) for n in range(count)]
    results = [_result(folder, name, p, asked, failing, settings, text) for p, name in enumerate(policies)]
    figures = summarize(results, asked, rules="house")
    write_text(folder / "metrics.json", json.dumps(figures))
    return folder


def _result(
    folder: Path,
    name: str,
    place: int,
    asked: Sequence[Question],
    failing: Sequence[tuple[str, int]],
    settings: Sequence[Setting],
    text: Texts,
) -> PolicyResult:
    outcomes = []
    for setting in settings:
        outcome = Outcome(setting, [None] * len(asked), [None] * len(asked))
        writer = ShardWriter(folder / name / "trajectories", setting.name, trajectory_schema(), shard_rows=2_000)
        for n, of in enumerate(asked):
            if (name, n) in failing:
                outcome.failures[n] = text(1)
                continue
            # The first step is the same for all policies, the second is a policy's own.
            steps = ["shared", *([f"own {place}"] * (n % 4))]
            attempt = Attempt(trajectory(of, steps, _answer(n, place, text), text), Reading(True))
            values = outcome.values[n] = attempt_values(attempt)
            outcome.verdicts[n] = NOT_JUDGED
            outcome.ends["answered"] += 1
            writer.add(trajectory_row(attempt, values))
        writer.close()
        outcomes.append(outcome)
    content = {"questions": "0", "corpus": "0", "prompts": "0", "policy": text(1)}
    return PolicyResult(name, load_config(), content, outcomes, {"policy": {"calls": 5}})


def _answer(number: int, place: int, text: Texts) -> str:
    return GOLD if number % (place + 2) else f"not {text(2)}"
