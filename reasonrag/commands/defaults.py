"""What training commands take if nothing is named: the newest run in runs/, the policy that acted there, its questions.

Every choice is printed, and an error lists the alternatives.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from reasonrag.core.config import Config, load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import PAPER_POLICY, ModelAddress
from reasonrag.core.settings import Tree, read_yaml
from reasonrag.core.text import duration
from reasonrag.storage.files import RUNS, read_json
from reasonrag.storage.folder import read_run
from reasonrag.training.folder import SUMMARY
from reasonrag.training.model import acting_policy, uses_gpu
from reasonrag.training.settings import PairSettings, TrainSettings

S = TypeVar("S", bound=PairSettings)

_HUB_MODEL = re.compile(r"[\w.-]+/[\w.-]+")


def with_pairs_and_model(settings: S, log: Callable[[str], None]) -> S:
    """Return the settings of `dpo train` or `sft train` with the data and the model that are not named.

    Raises:
        ConfigError: a finished run is missing, or this machine cannot train the model.
    """
    data = settings.data
    if data is None:
        run = _newest("run.json")
        if run is None:
            raise ConfigError(
                f"no pairs to train on: --data is not given, and there is no finished run of build-tree in {RUNS}/ "
                "here. Make one with `reasonrag build-tree --dataset ...`, or name a run, a file or a data set on the "
                "Hub with --data"
            )
        pairs = (read_json(run / "run.json") or {}).get("pairs", {}).get("total", 0)
        log(f"data: {run}, the newest finished run in {RUNS}/ ({pairs:,} pairs, {_age(run / 'run.json')} old)")
        data = str(run)
    model = settings.model
    if model is None:
        is_run = (Path(data) / "run.json").is_file()
        acting, may_lack_gpu = acting_policy(read_run(Path(data))[0].policy) if is_run else (None, False)
        model = acting or PAPER_POLICY
        if not may_lack_gpu:
            require_gpu(settings.model_copy(update={"model": model}))
        why = "which wrote these pairs" if acting else "the paper's; --model chooses another"
        hint = ". --preset demo has the settings for it" if ModelAddress.of_model(model).scheme == "demo" else ""
        log(f"model: {model}, {why}{hint}")
    return settings.model_copy(update={"data": data, "model": model})


def online_defaults(asked: Tree, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the settings of `rl train` that `asked` leaves open: the policy of the last `dpo train`, its questions.

    Args:
        asked: the settings of preset, file and flags.
        log: receives a line for each choice.

    Raises:
        ConfigError: nothing is named, and no policy of `dpo train` is in runs/.
    """
    chosen: dict[str, Any] = {}
    if asked.get("model") is None and asked.get("data") is None:
        policy = _newest(SUMMARY, stage="dpo")
        if policy is None:
            raise ConfigError(
                f"nothing to train: neither --model nor --dataset is given, and there is no finished `dpo train` in "
                f"{RUNS}/ here to go on from. Choose --preset demo-outcome (no GPU, no network), or --preset "
                "search-r1, hiprag, search-p1 or when-to-search with --dataset (hotpotqa, ..., or a file)"
            )
        log(f"model: {policy}, the newest policy of dpo train in {RUNS}/ ({_age(policy / SUMMARY)} old)")
        asked, chosen["model"] = {**asked, "model": str(policy)}, str(policy)
    if asked.get("model") is None:
        log(f"model: {PAPER_POLICY}, the paper's; --model chooses another")
        chosen["model"] = PAPER_POLICY
    elif asked.get("data") is None and (run := _run_behind(Path(str(asked["model"])))) is not None:
        log(f"questions and search: from {run}, which made the pairs of that policy")
        chosen |= _questions_of(run, asked)
    return chosen


def require_gpu(settings: TrainSettings) -> None:
    """Raise if a default model of the Hub would be trained without a GPU, before anything is downloaded."""
    model = str(settings.model)
    if _HUB_MODEL.fullmatch(model) and not Path(model).exists() and not uses_gpu(settings):
        raise ConfigError(
            f"no --model is given, and there is no GPU for {model}; choose one of: a folder or a Hub id of a model "
            "that this machine can train, or demo[:FORMAT] (a tiny policy for the demo world)"
        )


def _newest(name: str, **expected: str) -> Path | None:
    """Return the folder of the newest JSON file of that name in runs/ that has the expected values."""
    files = sorted(RUNS.rglob(name), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        summary = read_json(file)
        if summary is not None and all(summary.get(key) == value for key, value in expected.items()):
            return file.parent
    return None


def _age(file: Path) -> str:
    return duration(max(time.time() - file.stat().st_mtime, 0))


def _run_behind(policy: Path) -> Path | None:
    """Return the run that made the pairs of a policy of `dpo train` or `sft train`, if it still exists."""
    file = policy / "config.yaml"
    data = Path(str(read_yaml(file).get("data"))) if file.is_file() else None
    return data if data is not None and (data / "run.json").is_file() else None


def _questions_of(run: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the questions of a run as settings of `rl train`, and its search unless `asked` has one."""
    config: Config = load_config(file=run / "config.yaml")
    questions = config.questions
    chosen: dict[str, Any] = {"data": questions.dataset}
    sample = {**questions.model_dump(include={"split", "limit", "world_seed"}), "seed": config.seed}
    chosen |= {name: value for name, value in sample.items() if name not in asked}
    retrieval = asked.get("retrieval") or {}
    if not any(retrieval.get(name) for name in ("kind", "corpus", "index", "url")):
        for name, value in config.retrieval.model_dump(exclude_unset=True).items():
            if name not in retrieval:
                chosen[f"retrieval.{name}"] = value
    return chosen
