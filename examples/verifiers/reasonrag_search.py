"""An environment of verifiers: questions are its tasks, and the rollout engine is the harness that plays them.

`pip install ./examples/verifiers`, then evaluate a served policy; the settings are those of `rl train`:

    vf-eval reasonrag-search -m MODEL --client.base-url http://127.0.0.1:8000/v1 --sampling.temperature 0 \\
        --env.agent.runtime.type subprocess --env.taskset.preset search-r1 \\
        --env.taskset.settings '{"retrieval.index": "indexes/wiki18"}'

Every call of the engine goes through verifiers' endpoint, which records it; its sampling settings replace ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from reasonrag.agents.environment import CurrentPolicy, open_environment
from reasonrag.core.types import Question, Trajectory
from reasonrag.llm.server import ServerLLM
from reasonrag.online_rl.settings import load_rl_settings
from reasonrag.online_rl.task import Task
from reasonrag.rewards import Reward
from reasonrag.rollout import Engine, derive_seed

__all__ = ["SearchHarness", "SearchTaskset"]


class SearchData(vf.TaskData):  # type: ignore[misc]
    """A question, and the settings with which it is played."""

    question: str
    golden_answers: list[str]
    dataset: str
    settings: str


class SearchTask(vf.Task[SearchData]):  # type: ignore[misc]
    """A question. The harness scores it, because a reward reads the engine's trajectory."""


class SearchConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Settings of `rl train`, by their dotted names, over those of a preset."""

    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


class SearchTaskset(vf.Taskset[SearchTask, SearchConfig]):  # type: ignore[misc]
    """The questions that `rl train` would train on."""

    def load(self) -> Iterator[SearchTask]:
        """Yield the questions as tasks."""
        settings = json.dumps([self.config.preset, self.config.settings], sort_keys=True)
        for question in _opened(settings)[0].questions:
            data = SearchData(
                id=question.id,
                prompt=question.question,
                question=question.question,
                golden_answers=list(question.golden_answers),
                dataset=question.dataset,
                settings=settings,
            )
            yield SearchTask(data, self.config.task)


class SearchHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays a question with the engine in this process, and records the reward and its components."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: SearchData,
    ) -> vf.ProgramResult:
        """Run one trajectory. An unknown reward is a failed rollout, never a 0."""
        task, engine, reward = _opened(data.settings)
        question = Question(data.id, data.question, tuple(data.golden_answers), data.dataset)
        policy = ServerLLM(endpoint, ctx.model, api_key=secret, patience_s=60)
        CurrentPolicy.current.set(policy)
        try:
            seed = derive_seed(task.config.seed, trace.id)
            (trajectory,) = await engine.run([Trajectory(question)], seeds=[seed])
            (score,) = await reward.score([trajectory], step=0)
        finally:
            await policy.aclose()
        if score.value is None:
            raise RuntimeError(f"the reward is unknown ({score.cause})")
        trace.record_reward("reward", score.value)
        trace.record_metrics({name: value for name, value in score.parts.items() if value is not None})
        return vf.ProgramResult(exit_code=0, stdout=trajectory.answer or "", stderr="")


@cache
def _opened(settings: str) -> tuple[Task, Engine, Reward]:
    """Open questions, search, format and reward once for each combination of settings."""
    preset, overrides = json.loads(settings)
    resolved = load_rl_settings(preset=preset, overrides=overrides)
    return open_environment(resolved, Path(mkdtemp(prefix="reasonrag-"), "journal.sqlite"), AsyncExitStack())
