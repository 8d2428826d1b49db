"""All settings as frozen models: defaults, then a preset, then a YAML file, then flags and `--set a.b=c`.

A field marked `EXECUTION` cannot change a result (where things lie, how fast they go, what they cost): a run may be
resumed with another value. Every other field is part of the run's identity.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from reasonrag.errors import ConfigError


@dataclass(frozen=True)
class Execution:
    """Marks a field that cannot change a result."""


EXECUTION = Execution()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class QuestionsConfig(_Section):
    """Which questions. Their content, not their place, is part of a run's identity."""

    dataset: Annotated[str | None, Field(description="a known name, `demo`, or a file"), EXECUTION] = None
    split: Annotated[str | None, EXECUTION] = None
    limit: Annotated[int | None, Field(ge=1, description="a seeded sample of this size"), EXECUTION] = None
    world_seed: Annotated[int, Field(description="which demo world"), EXECUTION] = 0


class RetrievalConfig(_Section):
    """Where searches go."""

    kind: Annotated[str | None, Field(description="bm25, remote, or python:PACKAGE.MODULE:NAME"), EXECUTION] = None
    corpus: Annotated[str | None, Field(description="JSONL(.gz) or Parquet: id, contents"), EXECUTION] = None
    url: Annotated[tuple[str, ...], Field(description="servers that speak POST /retrieve"), EXECUTION] = ()
    identity: Annotated[str, Field(description="what the servers hold, for example corpus and index by name")] = (
        "remote"
    )
    top_k: Annotated[int, Field(ge=1, le=100)] = 3
    passage_order: Literal["best_first", "best_last"] = "best_first"
    max_passage_chars: Annotated[int, Field(ge=100)] = 4000
    cache: Annotated[str, Field(description="where indexes are kept"), EXECUTION] = "~/.cache/reasonrag"
    timeout_s: Annotated[float, Field(gt=0), EXECUTION] = 60.0

    @field_validator("url", mode="before")
    @classmethod
    def _one_url(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            _refuse_password(url)
        return value


class ModelConfig(_Section):
    """A policy or a judge. The model's own name, not its address, is part of a run's identity."""

    spec: Annotated[
        str | None, Field(description="http(s)://..., hf:NAME_OR_PATH, vllm:NAME_OR_PATH, demo, extractive"), EXECUTION
    ] = None
    model: Annotated[str | None, Field(description="the model's name at a server"), EXECUTION] = None
    api: Literal["chat", "completions"] = "chat"
    tokenizer: Annotated[str | None, Field(description="for api=completions; the model's own if not given")] = None
    vllm: Annotated[bool, Field(description="the server is vLLM: ask it for token ids and stop strings")] = False
    api_key_env: Annotated[str, Field(description="the variable, never the key"), EXECUTION] = "OPENAI_API_KEY"
    revision: str | None = None
    trust_remote_code: bool = False
    temperature: Annotated[float, Field(ge=0, le=5)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    logprobs: Annotated[bool, Field(description="ask a server for token log-probabilities"), EXECUTION] = False
    timeout_s: Annotated[float, Field(gt=0), EXECUTION] = 300.0
    max_retries: Annotated[int, Field(ge=0), EXECUTION] = 6
    concurrency: Annotated[int, Field(ge=1, description="requests in flight"), EXECUTION] = 64
    batch_size: Annotated[int, Field(ge=1, description="of a model in this process"), EXECUTION] = 32
    device: Annotated[str | None, EXECUTION] = None
    dtype: str | None = None
    input_price: Annotated[float | None, Field(ge=0, description="per million tokens"), EXECUTION] = None
    output_price: Annotated[float | None, Field(ge=0, description="per million tokens"), EXECUTION] = None

    @field_validator("spec")
    @classmethod
    def _no_secret(cls, value: str | None) -> str | None:
        _refuse_password(value or "")
        return value

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """In the currency of the prices, per million tokens; None where a price is unknown."""
        if self.input_price is None or self.output_price is None:
            return None
        return (prompt_tokens * self.input_price + completion_tokens * self.output_price) / 1e6


class FormatConfig(_Section):
    """How steps are written. The prompt texts, not the set's name, are part of a run's identity."""

    name: str = "reasonrag"
    prompts: Annotated[str, Field(description="default, brief, or a folder"), EXECUTION] = "default"
    max_steps: Annotated[int, Field(ge=1, description="actions of a trajectory; the last one has to answer")] = 8


class SearchConfig(_Section):
    """Budget and shape of a tree (arXiv:2505.14069, App. A)."""

    iterations: Annotated[int, Field(ge=1)] = 64
    max_children: Annotated[int, Field(ge=1)] = 3
    selection: Literal["puct", "ucb1"] = "puct"
    c_uct: Annotated[float, Field(ge=0)] = 1.414
    rejudge_terminal: bool = False


class ValueConfig(_Section):
    """How nodes are valued: Eq. 1 by rollouts, or Eq. 6 by a judge; and SPRE."""

    kind: Literal["rollout", "judge"] = "rollout"
    rollouts: Annotated[int, Field(ge=1)] = 2
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.9
    weighting: Literal["trajectories", "visits"] = "trajectories"


class PairsConfig(_Section):
    """Which siblings become pairs (arXiv:2505.14069, sec. 2.2.3). Pairs are derived anew without any call."""

    min_margin: Annotated[float, Field(ge=0), EXECUTION] = 0.01
    reward: Annotated[Literal["spre", "judge"], EXECUTION] = "spre"
    test_share: Annotated[float, Field(ge=0, lt=1), EXECUTION] = 0.1


class RunConfig(_Section):
    """How the run goes; nothing here changes a result."""

    concurrency: Annotated[int, Field(ge=1, description="questions in work at a time"), EXECUTION] = 64
    max_failed: Annotated[float, Field(ge=0, le=1, description="share of failed questions"), EXECUTION] = 0.05


class Config(_Section):
    """Everything a run depends on."""

    seed: int = 0
    questions: QuestionsConfig = QuestionsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    policy: ModelConfig = ModelConfig()
    judge: ModelConfig = ModelConfig(temperature=0.0)
    format: FormatConfig = FormatConfig()
    search: SearchConfig = SearchConfig()
    value: ValueConfig = ValueConfig()
    pairs: PairsConfig = PairsConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Config:
        if self.value.kind != "judge" and (self.judge.spec or self.judge.model):
            raise ValueError("a judge is named, but nodes are valued by rollouts; add --value judge, or leave it out")
        if self.value.kind != "judge" and self.pairs.reward == "judge":
            raise ValueError("pairs.reward is judge, but no judge values the nodes; add --value judge, or take spre")
        if self.retrieval.url and self.retrieval.corpus:
            raise ValueError("both a corpus and a retrieval server are given; the server has its own, leave one out")
        return self

    @property
    def prices(self) -> dict[str, ModelConfig]:
        """Whose prices each kind of call has: the policy's own where the policy is the judge."""
        own = self.judge.spec or self.judge.model or self.judge.input_price is not None
        return {"policy": self.policy, "judge": self.judge if own else self.policy}


# The tiny policy was trained on brief prompts with one passage a query; it is of no use with others.
_DEMO_POLICY: dict[str, Any] = {
    "policy": {"max_tokens": 48},
    "format": {"prompts": "brief"},
    "retrieval": {"top_k": 1},
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        # Appendix A: Eq. 5 selects, one judge call (Eq. 6) values a node; App. E.1: the top 3 passages.
        "search": {"selection": "puct"},
        "value": {"kind": "judge"},
        "retrieval": {"top_k": 3},
    },
    "official": {
        # The published builder: 64 iterations, 2 children, 7 free steps and then a forced answer, UCB1, judge values,
        # terminal nodes judged at every visit, inner rewards weighted by visits, best passage last.
        "search": {"iterations": 64, "max_children": 2, "selection": "ucb1", "c_uct": 1.414, "rejudge_terminal": True},
        "value": {"kind": "judge", "alpha": 0.9, "weighting": "visits"},
        "format": {"max_steps": 8},
        "retrieval": {"top_k": 3, "passage_order": "best_last"},
    },
    "demo": {
        **_DEMO_POLICY,
        "policy": {"spec": "demo", **_DEMO_POLICY["policy"]},
        "questions": {"dataset": "demo", "split": "train"},
        "search": {"iterations": 8},
    },
}


def load_config(
    *, preset: str | None = None, file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """The resolved configuration. The policy `demo` brings the prompts that it knows, unless others are asked for.

    Args:
        preset: a key of `PRESETS`.
        file: YAML; the same tree as `Config`.
        overrides: dotted names to values, `{"search.iterations": 32}`; strings are read as YAML scalars.

    Raises:
        ConfigError: an unknown key (with the nearest name), a value out of range, a file that is not YAML.
    """
    tree: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"preset {preset!r} is unknown{_nearest(preset, PRESETS)}")
        _merge(tree, PRESETS[preset])
    if file is not None:
        _merge(tree, _read_yaml(file))
    for name, value in (overrides or {}).items():
        *path, leaf = name.split(".")
        _merge(tree, _nest(path, {leaf: value}))
    policy = tree.get("policy")
    if isinstance(policy, dict) and policy.get("spec") == "demo":
        given, tree = tree, copy.deepcopy(_DEMO_POLICY)
        _merge(tree, given)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` of `--set`, its value read as YAML.

    >>> parse_assignment("search.iterations=32")
    ('search.iterations', 32)
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {text!r} is not of the form section.name=value")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: {value!r} is not a YAML value") from error


def identity(config: Config) -> dict[str, Any]:
    """The part of a configuration that can change a result, flat: `{"search.iterations": 64, ...}`."""
    return dict(_semantic(config, ""))


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _refuse_password(url: str) -> None:
    """A URL is written to `config.yaml`; a user name or password in it would be kept there."""
    if re.match(r"https?://[^/]*@", url, re.IGNORECASE):
        raise ValueError(
            "the URL carries a user name or password; put a key into the variable named by api_key_env, "
            "and a password into a proxy of yours"
        )


def _semantic(section: BaseModel, prefix: str) -> Iterable[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _semantic(value, f"{prefix}{name}.")
        elif EXECUTION not in field.metadata:
            yield f"{prefix}{name}", value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"configuration {file} cannot be read: {reason}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"configuration {file} holds a {type(tree).__name__}, not a mapping of sections")
    return tree or {}


def _merge(tree: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _nest(path: list[str], leaf: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        leaf = {name: leaf}
    return leaf


def _explain(error: ValidationError) -> str:
    """The first few problems, one line: the key, what was found, what is allowed."""
    lines = []
    for problem in error.errors()[:3]:
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            parent = _section(problem["loc"][:-1])
            lines.append(f"unknown key {where!r}{_nearest(str(problem['loc'][-1]), parent.model_fields)}")
        elif problem["type"] == "value_error":  # our own validators: what was found may be a secret
            lines.append(": ".join(filter(None, (where, problem["msg"].removeprefix("Value error, ")))))
        else:
            lines.append(f"{where}: {problem['msg']} (found {problem['input']!r})")
    return "configuration: " + "; ".join(lines)


def _section(path: Iterable[Any]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for name in path:
        inner = section.model_fields[name].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
    return section


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
