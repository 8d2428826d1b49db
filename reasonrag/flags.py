"""Flags that name settings, in groups that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from reasonrag.core.config import PRESETS, Config, JudgeConfig, load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import Section, description, gather, parse_assignment, validate
from reasonrag.evaluation.judged import JUDGED, Judging
from reasonrag.evaluation.sweep import folder_name
from reasonrag.online_rl.settings import RLSettings, load_rl_settings
from reasonrag.retrieval.index.settings import IndexConfig
from reasonrag.storage.questions import KNOWN
from reasonrag.training.settings import DPOSettings, PairSettings, TrainSettings, load_settings

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=TrainSettings)


def setting(model: type[Section], flag: str, key: str, help: str = "", **kwargs: Any) -> Callable[[F], F]:
    """A flag that overrides one setting of a model. Its help is the setting's description, unless one is given."""
    help = help or _sentence(description(model, key) + (" (repeatable)" if kwargs.get("multiple") else ""))
    return click.option(flag, key.replace(".", "__"), help=f"{help}  [{key}]", default=None, **kwargs)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".removesuffix(".") + "."


def settings(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options in the order in which `--help` shall show them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


DATA = settings(
    setting(Config, "--dataset", "questions.dataset"),
    setting(Config, "--split", "questions.split"),
    setting(Config, "--limit", "questions.limit", type=int),
    setting(Config, "--world-seed", "questions.world_seed", type=int),
    setting(Config, "--corpus", "retrieval.corpus"),
    setting(Config, "--index", "retrieval.index"),
    setting(Config, "--retriever-url", "retrieval.url", multiple=True),
)
MODELS = settings(
    setting(Config, "--top-k", "retrieval.top_k", type=int),
    setting(Config, "--policy", "policy.spec", envvar="REASONRAG_POLICY", show_envvar=True),
    setting(Config, "--model", "policy.model", envvar="REASONRAG_MODEL", show_envvar=True),
    setting(Config, "--temperature", "policy.temperature", type=float),
    setting(Config, "--max-tokens", "policy.max_tokens", type=int),
    setting(
        Config, "--judge", "judge.spec", "As --policy, or demo-judge[:WORLD_SEED[:ERROR]]; the policy if not given."
    ),
    setting(Config, "--judge-model", "judge.model", "The judge's name at its server."),
    setting(Config, "--prompts", "format.prompts"),
)
SEARCH = settings(
    setting(Config, "--seed", "seed", type=int),
    setting(Config, "--iterations", "search.iterations", type=int),
    setting(Config, "--max-calls", "search.max_calls", type=int),
    setting(Config, "--max-children", "search.max_children", type=int),
    setting(Config, "--selection", "search.selection", type=click.Choice(["puct", "ucb1"])),
    setting(Config, "--value", "value.kind", type=click.Choice(["rollout", "judge"])),
    setting(Config, "--rollouts", "value.rollouts", type=int),
    setting(Config, "--alpha", "value.alpha", type=float),
    setting(Config, "--max-steps", "format.max_steps", type=int),
)
PAIRS = settings(
    setting(Config, "--min-margin", "pairs.min_margin", type=float),
    setting(Config, "--reward", "pairs.reward", type=click.Choice(["spre", "judge"])),
    setting(Config, "--test-share", "pairs.test_share", type=float),
)
EXECUTION = settings(
    setting(Config, "--concurrency", "run.concurrency", type=int),
    setting(Config, "--max-failed", "run.max_failed", type=float),
    setting(Config, "--input-price", "policy.input_price", type=float),
    setting(Config, "--output-price", "policy.output_price", type=float),
)
CONFIG = settings(
    click.option("--preset", type=click.Choice(sorted(PRESETS)), help="A published or shipped set of settings."),
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML; flags override it."),
    click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any other setting (repeatable)."),
)

INDEX = settings(
    setting(IndexConfig, "--corpus", "corpus"),
    setting(IndexConfig, "--kind", "kind", multiple=True, type=click.Choice(["bm25", "dense"])),
    setting(IndexConfig, "--max-memory", "max_memory"),
    setting(IndexConfig, "--encoder", "encoder.name"),
    setting(IndexConfig, "--device", "encoder.device"),
    setting(IndexConfig, "--dtype", "encoder.dtype"),
    setting(IndexConfig, "--encode-batch", "encoder.batch_size", type=int),
    setting(IndexConfig, "--vectors", "vectors.kind", type=click.Choice(["auto", "flat", "ivf-sq8", "ivf-pq", "hnsw"])),
    setting(IndexConfig, "--recall", "vectors.recall", type=float),
    setting(IndexConfig, "--adopt", "vectors.adopt"),
    setting(IndexConfig, "--stemmer", "bm25.stemmer"),
    setting(IndexConfig, "--stopwords", "bm25.stopwords"),
    setting(IndexConfig, "--title-weight", "bm25.title_weight", type=int),
    setting(IndexConfig, "--k1", "bm25.k1", type=float),
    setting(IndexConfig, "--b", "bm25.b", type=float),
    setting(IndexConfig, "--max-words", "passages.max_words", type=int),
    setting(IndexConfig, "--chunk-words", "passages.chunk_words", type=int),
    setting(IndexConfig, "--strict/--no-strict", "passages.strict"),
)
OPEN_INDEX = settings(
    click.option("--kind", type=click.Choice(["bm25", "dense", "hybrid"]), help="The best that is there if not given."),
    click.option("--encoder", help="Where the model that built a dense index lies now, if it was moved."),
    click.option("--reranker", help="A cross-encoder that reorders what was found: a Hub id or a folder."),
    click.option("--rerank-depth", type=click.IntRange(1), help="Passages that it reads a query.  [default: 20]"),
    click.option("--device", help="Of encoder and reranker."),
    click.option("--gpu", is_flag=True, default=None, help="Search vectors on all GPUs."),
    click.option("--trust-remote-code", is_flag=True, default=None, help="Run code that comes with a model."),
)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """One or several numbers with commas between them: `0,1`."""

    name = "numbers"

    def __init__(self, number: type[int] | type[float]) -> None:
        self.number = number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`(0.0, 1.0)` of `"0,1"`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self.number(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is not one {self.number.__name__} or several with commas between them", param, ctx)


class Names(click.ParamType):  # type: ignore[type-arg]
    """One or several names with commas between them, out of some: `osr,usr`."""

    name = "names"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`("osr", "usr")` of `"osr,usr"`."""
        if isinstance(value, tuple):
            return value
        asked = tuple(dict.fromkeys(part.strip().lower() for part in str(value).split(",")))
        if not set(asked) <= set(self.known):
            self.fail(
                f"{value!r} is not one of {', '.join(self.known)} or several with commas between them", param, ctx
            )
        return asked


EVALUATION = settings(
    click.option(
        "--policy",
        "policies",
        multiple=True,
        required=True,
        metavar="[NAME=]SPEC[#MODEL]",
        help="As of build-tree (repeatable); the others are compared with the first. MODEL: its name at a server.",
    ),
    click.option(
        "--format",
        "formats",
        multiple=True,
        metavar="[NAME=]FORMAT",
        help="reasonrag, search_r1, hiprag, ...: of all policies, or of the one called NAME (repeatable). A policy's "
        "folder says its own.",
    ),
    setting(Config, "--prompts", "format.prompts"),
    setting(Config, "--max-tokens", "policy.max_tokens", type=int),
    setting(Config, "--seed", "seed", "Of sampling, questions and intervals.", type=int),
    click.option(
        "--judge", help="Also judge every attempt: LasJ, OSR, USR. As --policy, or demo-judge[:WORLD_SEED[:ERROR]]."
    ),
    click.option("--judge-model", help="The judge's name at its server."),
    click.option("--judged", type=Names(JUDGED), help="Some of lasj,osr,usr; all of them if not given."),
    click.option("--temperature", "temperatures", type=Numbers(float), help="One or several: 0,1. Greedy if none."),
    click.option("--max-steps", type=Numbers(int), help="One or several: 2,4,6,8 gives the paper's Figure 6."),
    click.option("--top-k", "top_ks", type=Numbers(int), help="One or several: 1,3,5 gives the paper's Figure 7."),
    click.option(
        "--rules",
        type=click.Choice(["house", "flashrag"]),
        default="house",
        show_default=True,
        help="flashrag: to the letter, for comparison with published numbers.",
    ),
)

TRAINING = settings(
    setting(PairSettings, "--data", "data"),
    setting(PairSettings, "--model", "model"),
    setting(PairSettings, "--method", "method", type=click.Choice(["lora", "full"])),
    setting(PairSettings, "--lora-r", "lora.r", type=int),
    setting(PairSettings, "--lora-alpha", "lora.alpha", type=int),
    setting(PairSettings, "--learning-rate", "learning_rate", type=float),
    setting(PairSettings, "--epochs", "num_train_epochs", type=float),
    setting(PairSettings, "--batch-size", "per_device_train_batch_size", type=int),
    setting(PairSettings, "--accumulation", "gradient_accumulation_steps", type=int),
    setting(PairSettings, "--max-length", "max_length", type=int),
    setting(PairSettings, "--max-dropped", "max_dropped", type=float),
    setting(PairSettings, "--limit", "limit", type=int),
    setting(PairSettings, "--seed", "seed", type=int),
    setting(PairSettings, "--save-steps", "save_steps", type=int),
    setting(PairSettings, "--report-to", "report_to", multiple=True),
    setting(PairSettings, "--merge/--no-merge", "merge"),
)
DPO = settings(
    setting(DPOSettings, "--beta", "beta", type=float),
    setting(DPOSettings, "--loss-type", "loss_type"),
    setting(
        DPOSettings, "--reference", "reference", type=click.Choice(["auto", "adapter_off", "frozen", "precomputed"])
    ),
    setting(DPOSettings, "--weight", "weight", type=click.Choice(["none", "margin"])),
    setting(DPOSettings, "--reward-margin", "reward_margin", type=float),
    setting(DPOSettings, "--sft-weight", "sft_weight", type=float),
)

RL = settings(
    setting(RLSettings, "--data", "data"),
    setting(RLSettings, "--split", "split"),
    setting(RLSettings, "--limit", "limit", type=int),
    setting(RLSettings, "--world-seed", "world_seed", type=int),
    setting(RLSettings, "--corpus", "retrieval.corpus"),
    setting(RLSettings, "--index", "retrieval.index"),
    setting(RLSettings, "--retriever-url", "retrieval.url", multiple=True),
    setting(RLSettings, "--top-k", "retrieval.top_k", type=int),
    setting(RLSettings, "--policy", "model"),
    setting(RLSettings, "--format", "format.name"),
    setting(RLSettings, "--prompts", "format.prompts"),
    setting(RLSettings, "--turns", "format.max_steps", type=int),
    setting(RLSettings, "--reward", "reward.name"),
    setting(RLSettings, "--judge", "judge.spec"),
    setting(RLSettings, "--judge-model", "judge.model", "The judge's name at its server."),
    setting(RLSettings, "--plans", "plans"),
    setting(RLSettings, "--method", "method", type=click.Choice(["lora", "full"])),
    setting(RLSettings, "--loss-type", "loss_type"),
    setting(RLSettings, "--beta", "beta", type=float),
    setting(RLSettings, "--learning-rate", "learning_rate", type=float),
    setting(RLSettings, "--max-steps", "max_steps", type=int),
    setting(RLSettings, "--questions", "rollout.questions_per_step", type=int),
    setting(RLSettings, "--group-size", "rollout.group_size", type=int),
    setting(RLSettings, "--batch-size", "per_device_train_batch_size", type=int),
    setting(RLSettings, "--dynamic-sampling/--no-dynamic-sampling", "sampling.dynamic"),
    setting(RLSettings, "--rollout-url", "rollout.url"),
    setting(RLSettings, "--seed", "seed", type=int),
    setting(RLSettings, "--save-steps", "save_steps", type=int),
    setting(RLSettings, "--report-to", "report_to", multiple=True),
    setting(RLSettings, "--merge/--no-merge", "merge"),
)


def training_config(presets: Mapping[str, Any]) -> Callable[[F], F]:
    """`--preset`, `--config` and `--set` of a kind of training."""
    return settings(
        click.option("--preset", type=click.Choice(sorted(presets)), help="A published or shipped set of settings."),
        click.option("--config", "file", type=click.Path(path_type=Path), help="YAML; flags override it."),
        click.option("--set", "assignments", multiple=True, metavar="A=C", help="Any other setting (repeatable)."),
        click.option("--out", type=click.Path(path_type=Path), required=True, help="The policy's folder."),
    )


def resolve(preset: str | None, file: Path | None, assignments: tuple[str, ...], flags: dict[str, Any]) -> Config:
    """Defaults, then the preset, then the file, then `--set`, then flags."""
    return load_config(preset=preset, file=file, overrides=_assigned(assignments, flags))


def overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, as dotted names of settings."""
    return {name.replace("__", "."): value for name, value in flags.items() if value not in (None, ())}


def training(model: type[T], presets: Mapping[str, Any], given: dict[str, Any]) -> T:
    """The settings of a training from its flags."""
    return load_settings(model, presets, **_asked(given))


def online(presets: Mapping[str, Any], given: dict[str, Any]) -> RLSettings:
    """The settings of an online training from its flags."""
    if given.get("rollout__url"):
        given["rollout__engine"] = "vllm-server"
    return load_rl_settings(presets, **_asked(given))


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    preset, file, assignments = given.pop("preset"), given.pop("file"), given.pop("assignments")
    return {"preset": preset, "file": file, "overrides": _assigned(assignments, given)}


_NAMED = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<spec>[^#]+)(?:#(?P<model>.+))?")


def policy_configs(
    policies: tuple[str, ...],
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    given: dict[str, Any],
    formats: tuple[str, ...] = (),
) -> dict[str, Config]:
    """The configuration of each policy of an evaluation, by its name. Without a split, held-out questions are taken.

    Raises:
        ConfigError: two policies of one name, or something that names none.
    """
    configs: dict[str, Config] = {}
    of_all, of_some = _formats(formats)
    for text in policies:
        match = _NAMED.fullmatch(text)
        if match is None:
            raise ConfigError(f"--policy {text!r} is not of the form SPEC, NAME=SPEC or NAME=SPEC#MODEL")
        name = match["name"] or folder_name(match["model"] or match["spec"])
        if name in configs:
            raise ConfigError(f"two policies are called {name!r}; name them: --policy base=SPEC --policy dpo=SPEC")
        named = given | {"policy__spec": match["spec"], "policy__model": match["model"]}
        if format := of_some.pop(name, of_all):
            named["format__name"] = format
        config = resolve(preset, file, assignments, named)
        if _split_asked_for(file, assignments, given) is None:
            config = resolve(preset, file, assignments, named | {"questions__split": held_out_split(config)})
        configs[name] = config
    if of_some:
        raise ConfigError(f"--format is given for {', '.join(of_some)}, but the policies are {', '.join(configs)}")
    return configs


def _formats(formats: tuple[str, ...]) -> tuple[str | None, dict[str, str]]:
    """`--format`: that of all policies, and those of policies by name; the last one counts."""
    named = [text.rpartition("=")[::2] for text in formats]
    of_all = [format for name, format in named if not name]
    return of_all[-1] if of_all else None, {name: format for name, format in named if name}


def judging(
    spec: str | None, model: str | None, judged: tuple[str, ...] | None, configs: Mapping[str, Config]
) -> Judging | None:
    """The judge of an evaluation; None without `--judge`. How it is sampled and what it costs is that of `judge.*`.

    Raises:
        ConfigError: something is asked of a judge, and there is none.
    """
    if spec is None:
        if model or judged:
            raise ConfigError("--judge-model and --judged are about a judge, and none is named; add --judge")
        return None
    settings = {**next(iter(configs.values())).judge.model_dump(exclude_unset=True), "spec": spec}
    return Judging(validate(JudgeConfig, settings | ({"model": model} if model else {})), judged or JUDGED)


def _split_asked_for(file: Path | None, assignments: tuple[str, ...], given: dict[str, Any]) -> str | None:
    """By a flag or `--set`; a file's too, unless it is that of training: files of `build-tree` name it."""
    if (asked := _assigned(assignments, given).get("questions.split")) is not None:
        return str(asked)
    of_file = gather({}, file=file).get("questions")
    split = of_file.get("split") if isinstance(of_file, dict) else None
    return None if split == "train" else split


def temperatures_asked_for(
    several: tuple[float, ...] | None, configs: dict[str, Config], assignments: tuple[str, ...]
) -> tuple[float, ...]:
    """Of an evaluation: by its own flag, else by `--set policy.temperature`, else greedy."""
    if several is None and "policy.temperature" in dict(map(parse_assignment, assignments)):
        return (next(iter(configs.values())).policy.temperature,)
    return several or (0.0,)


def held_out_split(config: Config) -> str | None:
    """The split that a policy has not been trained on, by the name of the data set; None of a file."""
    name = config.questions.dataset or ""
    return "test" if name == "demo" else KNOWN[name][-1] if name in KNOWN else None


def _assigned(assignments: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """`--set`, then the flags: dotted names of settings to values."""
    return dict(map(parse_assignment, assignments)) | overrides(given)
