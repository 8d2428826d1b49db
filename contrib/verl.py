"""A whole online task for verl: questions, our reward of its texts, and our rollouts or our search.

    python -m contrib.verl --preset search-r1 --set data=questions.jsonl --set retrieval.corpus=corpus.jsonl --out OUT
    python -m verl.trainer.main_ppo $(cat OUT/overrides.txt) trainer.total_training_steps=1005

verl scores a response by its text alone. So the text is taken apart into the steps that our engine would have made of
it, and the reward reads these. Our engine rolls out a format of one growing turn on verl's own servers (`agent_loop`).
verl has to run where `contrib` can be imported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from reasonrag.agents.environment import CurrentPolicy
from reasonrag.core.errors import ConfigError, RunError
from reasonrag.core.settings import dump
from reasonrag.core.types import (  # fmt: skip
    Answer,
    Completion,
    FinishReason,
    Malformed,
    Passage,
    Prompt,
    Question,
    Search,
    Span,
    Step,
    StopReason,
    Trajectory,
)
from reasonrag.formats import Format, PromptSet, open_format
from reasonrag.formats.base import Reading
from reasonrag.formats.stream import StreamFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.local import sampled_completion
from reasonrag.online_rl.reference_plans import load_plans
from reasonrag.online_rl.rows import transcripts
from reasonrag.online_rl.settings import RLSettings, load_rl_settings, rl_presets
from reasonrag.online_rl.task import Task, batched_retrievers, needs_of, open_task
from reasonrag.pipeline.parts import judge_service, open_engine, open_llm
from reasonrag.publish.exporters import output, verl_row, verl_schema
from reasonrag.retrieval.base import Retriever
from reasonrag.retrieval.encoders import open_encoder
from reasonrag.rewards import Reward, RewardParts, open_reward
from reasonrag.rewards.base import MISSING, trajectory_text
from reasonrag.storage.files import write_text
from reasonrag.storage.parquet import write_parquet

_LOADER = """\
\"\"\"Written by `python -m contrib.verl`; the settings are in task.yaml in this folder.\"\"\"

from pathlib import Path

from contrib import verl

compute_score = verl.reward_function(Path(__file__).parent)
"""


def export_task(settings: RLSettings, out: Path) -> dict[str, int]:
    """Write what `rl train` would train on, for verl; return the number of questions of `train` and of validation."""
    task = open_task(settings)
    check(settings, task.format)
    rollout, folder, numbers = "actor_rollout_ref.rollout", out.resolve(), count()
    named: dict[str, object] = {"data.return_raw_chat": "true", f"{rollout}.n": settings.rollout.group_size}
    with output(out, "verl-task.json", "*.parquet", "*.py", "task.yaml", "agent.yaml", "overrides.txt") as counts:
        for split, key, questions in (("train", "train", task.questions), ("test", "val", task.held_out)):
            rows = []
            for question in questions:
                messages = task.format.prompt(question, ()).messages
                rows.append(verl_row(question, question.dataset, messages, split, next(numbers)))
            if rows:
                counts[split] = len(rows)
                write_parquet(out / f"{split}.parquet", rows, verl_schema())
                named[f"data.{key}_files"] = folder / f"{split}.parquet"
        write_text(out / "task.yaml", dump(settings))
        write_text(out / "reward.py", _LOADER)
        named["reward.custom_reward_function.path"] = folder / "reward.py"
        loop = {"name": "reasonrag", "_target_": "contrib.verl.agent_loop", "folder": str(folder)}
        write_text(out / "agent.yaml", json.dumps([loop], indent=2) + "\n")
        named[f"{rollout}.agent.default_agent_loop"] = "reasonrag"
        named[f"{rollout}.agent.agent_loop_config_path"] = folder / "agent.yaml"
        write_text(out / "overrides.txt", "".join(f"{name}={value}\n" for name, value in named.items()))
    return counts


def check(settings: RLSettings, form: Format) -> frozenset[str]:
    """Return what the reward needs; raise ConfigError if that is more than a text shows."""
    if not isinstance(form, StreamFormat):
        raise ConfigError(f"format {form.name!r} is not one growing turn, and verl scores one text; choose another")
    name, when = settings.reward.name, settings.reward.when_to_search
    if name in ("spre", "prm"):
        raise ConfigError(f"reward {name} is of single steps, which verl's texts do not show; choose another")
    if name == "when-to-search" and when.stages == "both":
        raise ConfigError(
            "verl gives a reward no training step, so the stage has to be fixed: export twice, with "
            "reward.when_to_search.stages=one and then with two"
        )
    needs = needs_of(settings, form)
    if hidden := needs - {"judge", "encoder", "plans"}:
        raise ConfigError(f"reward {name} needs {MISSING[min(hidden)]}; verl shows it texts alone")
    return needs


def trajectory_of(form: StreamFormat, question: Question, response: str) -> Trajectory:
    """Return the steps that the engine would have made of a response: a search for each observation, and the last one.

    `response` begins with the policy's first token, after the words that open the format's turn.
    """
    text = form.opening + response
    steps: list[Step] = []
    for written, passages in form.observed(text):
        action = form.parse(written.rstrip(), tuple(steps))
        steps.append(Step(Prompt(()), Completion(written), action, (Passage("", passages),) if passages else ()))
    last = steps.pop()
    if isinstance(last.action, Search):  # nothing was found, so nothing was searched: an answer had been asked for
        last = replace(last, action=Malformed("unexpected_search", ends=True))
    ended = StopReason.ANSWERED if isinstance(last.action, Answer) else StopReason.NO_ANSWER
    whole = replace(last, prompt=Prompt((), (Span(text),)), completion=Completion(""))
    return Trajectory(question, (*steps, whole), ended)


class TextFormat:
    """A format that reads a trajectory by its text, as that is all there is."""

    def __init__(self, form: StreamFormat) -> None:
        self._form = form

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def read(self, trajectory: Trajectory) -> Reading:
        return self._form.read_text(trajectory_text(trajectory))


def reward_function(folder: Path) -> Callable[..., Any]:
    """Return verl's `compute_score`. A reward that is missing, as after a failure of the judge, is a RunError."""

    async def compute_score(
        data_source: str, solution_str: str, ground_truth: Mapping[str, Any], extra_info: Mapping[str, Any], **_: Any
    ) -> dict[str, float]:
        form, reward = _reward(folder)
        question = question_of({"extra_info": extra_info, "reward_model": {"ground_truth": ground_truth}})
        (score,) = await reward.score([trajectory_of(form, question, solution_str)], step=0)
        if score.value is None:
            raise RunError(f"a response to question {question.id} has no reward ({score.cause})")
        common = ("em", "f1", "cem", "rc", "well_formed")
        return {"score": score.value, **{name: float(score.parts[name] or 0.0) for name in common}}

    return compute_score


def question_of(row: Mapping[str, Any]) -> Question:
    """Return the question of a row of `verl_schema`."""
    about, golden = row["extra_info"], row["reward_model"]["ground_truth"]["target"]
    return Question(about["question_id"], about["question"], tuple(map(str, golden)), dataset=about["dataset"])


@cache
def _reward(folder: Path) -> tuple[Any, Reward]:
    settings = load_rl_settings(file=folder / "task.yaml")
    form: Any = open_format(settings.as_config(), warn=False)
    needs, as_text = check(settings, form), TextFormat(form)
    parts: partial[RewardParts] = partial(RewardParts, as_text)
    if "judge" in needs:
        prompts = PromptSet.find(settings.format.prompts)
        parts = partial(parts, judge=judge_service(open_llm(settings.judge.llm, "judge"), settings.judge, prompts))
    if "encoder" in needs:
        parts = partial(parts, encoder=open_encoder(settings.reward.when_to_search.encoder))
    if "plans" in needs and settings.plans is not None:
        parts = partial(parts, plans=load_plans(Path(settings.plans)))
    return form, open_reward(settings.reward, parts())


@cache
def _task(folder: Path) -> tuple[Task, Retriever]:
    task = open_task(load_rl_settings(file=folder / "task.yaml"))
    return task, batched_retrievers(task)[0]


class agent_loop:  # noqa: N801 -- the name of our loop in verl's configuration
    """Our engine as one of verl's agent loops: a trajectory on verl's server, as the tokens that were sampled."""

    def __init__(self, folder: str, *, server_manager: Any, tokenizer: Any, trainer_config: Any, **_: Any) -> None:
        self._task, self._retriever = _task(Path(folder))
        self._server, self._chat = server_manager, ChatTemplate(tokenizer)
        self._most = trainer_config.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """Return an `AgentLoopOutput` whose mask is 1 for what the policy wrote."""
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        self._params = sampling_params
        CurrentPolicy.current.set(self)
        engine = open_engine(self._task.config, CurrentPolicy(), self._retriever, self._task.format)
        (trajectory,) = await engine.run([Trajectory(question_of(row))], seeds=[0])
        (row_tokens,) = transcripts(trajectory, self._chat)
        return AgentLoopOutput(
            prompt_ids=list(row_tokens.prompt_ids),
            response_ids=list(row_tokens.completion_ids[: self._most]),
            response_mask=list(row_tokens.mask[: self._most]),
            response_logprobs=None if row_tokens.logprobs is None else list(row_tokens.logprobs[: self._most]),
            num_turns=2 * len(trajectory.steps),
            metrics=AgentLoopMetrics(),
        )

    async def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        """Return what the policy on verl's server writes, up to a stop string or the token limit."""
        ids = self._chat.token_ids(prompt)
        params = {**self._params, "stop": list(prompt.stop), "max_tokens": sampling.max_tokens}
        sampled = await self._server.generate(request_id=uuid4().hex, prompt_ids=list(ids), sampling_params=params)
        reason = FinishReason.LENGTH if len(sampled.token_ids) >= sampling.max_tokens else FinishReason.STOP
        return sampled_completion(self._chat, ids, sampled.token_ids, sampled.log_probs, reason, prompt.stop)


def main() -> None:
    """Export with the settings of `rl train`: a preset, a file, and KEY=VALUE pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=sorted(rl_presets()))
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, as in rl train")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    overrides = dict(setting.split("=", 1) for setting in given.set)
    settings = load_rl_settings(preset=given.preset, file=given.config, overrides=overrides)
    for split, questions in export_task(settings, given.out).items():
        print(f"{split}: {questions} questions")


if __name__ == "__main__":
    main()
