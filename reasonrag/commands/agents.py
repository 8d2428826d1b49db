"""`env`: the rollout engine for other trainers."""

from __future__ import annotations

import sys
from typing import Any

import click

from reasonrag.commands.options import (
    Group,
    configuration,
    given_settings,
    rare,
    settings,
    sources,
    together,
)

_TASK = together(
    settings("RLSettings", "data", "split", "limit", "retrieval.corpus", "retrieval.index", "retrieval.url", "model"),
    settings("RLSettings", "format.name", "reward.name", "judge.spec", "judge.model"),
    rare(
        settings("RLSettings", "exclude", "world_seed", "retrieval.top_k", "format.prompts", "format.max_steps"),
        settings("RLSettings", "format.max_searches", "reward.prm.model", "plans"),
    ),
)
_LISTENING = ("port", "max_sessions", "idle_s")


@click.group(cls=Group)
def env() -> None:
    """The rollout engine as an environment for other trainers.

    \b
      reasonrag env serve --preset demo-outcome
    """


@env.command()
@_TASK
@settings("EnvironmentSettings", *_LISTENING, show_keys=False)
@configuration("RLSettings")
def serve(**given: Any) -> None:
    """Serve questions, searches and rewards to OpenEnv's clients. They get prompts and keep the policy.

    It serves the task that `rl train` with the same options trains on. If --model is a policy trained here, its
    prompts are the ones of its training.

    \b
    Search-R1's reward on your own questions:
      reasonrag env serve --preset search-r1 --dataset questions.jsonl --corpus corpus.jsonl --port 8010
    In the demo world:
      reasonrag env serve --preset demo-outcome --port 8010

    SIGTERM and Ctrl-C end the server.
    """
    from reasonrag.agents.environment import EnvironmentSettings, serve_environment
    from reasonrag.commands.console import log_plainly
    from reasonrag.core.settings import validate
    from reasonrag.online_rl.settings import load_rl_settings

    log_plainly()
    listening = validate(EnvironmentSettings, given_settings({name: given.pop(name) for name in _LISTENING}))
    sys.exit(serve_environment(load_rl_settings(**sources(given)), listening))
