"""`env`, `record`: other people's trainers and agents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import (
    Group,
    command,
    configuration,
    given_settings,
    out,
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
_LISTENING = ("host", "port", "allow_remote", "token_env", "max_sessions", "idle_s")


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

    What is served is what `rl train` with the same options trains on. The prompts are those that --model, if it is a
    policy trained here, was trained with.

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
    from reasonrag.online_rl.presets import RL_PRESETS
    from reasonrag.online_rl.settings import load_rl_settings

    log_plainly()
    listening = validate(EnvironmentSettings, given_settings({name: given.pop(name) for name in _LISTENING}))
    sys.exit(serve_environment(load_rl_settings(RL_PRESETS, **sources(given)), listening))


@env.command()
@_TASK
@rare(settings("RLSettings", "rollout.group_size"))
@configuration("RLSettings")
@out("A folder.")
def export(out: Path, **given: Any) -> None:
    """Write questions, reward, rollouts and search for verl. It trains the policy.

    What is written is what `rl train` with the same options trains on.

    \b
    Search-R1's reward on your own questions:
      reasonrag env export --preset search-r1 --dataset questions.jsonl --corpus corpus.jsonl --out data/verl
      python -m verl.trainer.main_ppo $(cat data/verl/overrides.txt) trainer.total_training_steps=1005
    In the demo world:
      reasonrag env export --preset demo-outcome --out data/verl
    """
    from reasonrag.agents.verl import export_task
    from reasonrag.online_rl.presets import RL_PRESETS
    from reasonrag.online_rl.settings import load_rl_settings

    counts = export_task(load_rl_settings(RL_PRESETS, **sources(given)), out)
    print(f"rows: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    print(f"task: {out}, whose overrides.txt is for verl's command line")


@command()
@click.option("--upstream", required=True, metavar="URL", help="Base URL of the model's server, with the version.")
@out("A folder; the same command adds to it.")
@settings("RecordSettings", "port", show_keys=False)
def record(upstream: str, out: Path, port: int | None) -> None:
    """Record the model calls of an agent: a proxy on this machine, to any server with OpenAI's chat completions.

    \b
      reasonrag record --upstream https://api.openai.com/v1 --out recordings/agent --port 8020
    Then give the agent http://127.0.0.1:8020/v1 as its base URL, or http://127.0.0.1:8020/c/NAME/v1 to name the
    conversation. Its key is passed on and not kept. Secrets in messages are kept as ***.

    SIGTERM and Ctrl-C end the proxy once all replies were passed on.
    """
    from reasonrag.agents.recorder import RecordSettings
    from reasonrag.agents.recorder import record as record_calls
    from reasonrag.commands.console import log_plainly
    from reasonrag.core.settings import validate

    log_plainly()
    sys.exit(record_calls(upstream, out, validate(RecordSettings, given_settings({"port": port}))))
