"""Flags that name settings, in groups that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from reasonrag.config import PRESETS, Config, JudgeConfig, load_config
from reasonrag.errors import ConfigError
from reasonrag.evaluation.judged import JUDGED, Judging
from reasonrag.evaluation.sweep import folder_name
from reasonrag.online_rl.settings import RLSettings, load_rl_settings
from reasonrag.questions import KNOWN
from reasonrag.settings import gather, parse_assignment, validate
from reasonrag.training.settings import TrainSettings, load_settings

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=TrainSettings)


def setting(flag: str, key: str, help: str, **kwargs: Any) -> Callable[[F], F]:
    """A flag that overrides one configuration key."""
    return click.option(flag, key.replace(".", "__"), help=f"{help}  [{key}]", default=None, **kwargs)


def settings(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options in the order in which `--help` shall show them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


DATA = settings(
    setting("--dataset", "questions.dataset", "hotpotqa, 2wikimultihopqa, musique, popqa, ...; demo; or a file."),
    setting("--split", "questions.split", "Split of a named data set."),
    setting("--limit", "questions.limit", "A seeded sample of this many questions.", type=int),
    setting("--world-seed", "questions.world_seed", "Which demo world.", type=int),
    setting("--corpus", "retrieval.corpus", "A file with id and contents: JSONL(.gz, .zst) or Parquet."),
    setting("--index", "retrieval.index", "A folder that `index build` made."),
    setting("--retriever-url", "retrieval.url", "A server that speaks POST /retrieve (repeatable).", multiple=True),
)
MODELS = settings(
    setting("--top-k", "retrieval.top_k", "Passages per search.", type=int),
    setting(
        "--policy",
        "policy.spec",
        "http://HOST:PORT/v1, hf:NAME_OR_PATH, vllm:NAME, demo, extractive.",
        envvar="REASONRAG_POLICY",
        show_envvar=True,
    ),
    setting("--model", "policy.model", "The model's name at the server.", envvar="REASONRAG_MODEL", show_envvar=True),
    setting("--temperature", "policy.temperature", "Of the policy.", type=float),
    setting("--max-tokens", "policy.max_tokens", "Of one step.", type=int),
    setting("--judge", "judge.spec", "The judge, also demo-judge[:WORLD_SEED[:ERROR]]; the policy if not given."),
    setting("--judge-model", "judge.model", "The judge's name at its server."),
    setting("--prompts", "format.prompts", "default, brief, or a folder."),
)
SEARCH = settings(
    setting("--seed", "seed", "Same seed, same rows.", type=int),
    setting("--iterations", "search.iterations", "Visits to the root of a tree.", type=int),
    setting("--max-calls", "search.max_calls", "Policy and judge calls of a tree, beside iterations.", type=int),
    setting("--max-children", "search.max_children", "Per node.", type=int),
    setting("--selection", "search.selection", "Eq. 5 or UCB1.", type=click.Choice(["puct", "ucb1"])),
    setting("--value", "value.kind", "Eq. 1 or Eq. 6.", type=click.Choice(["rollout", "judge"])),
    setting("--rollouts", "value.rollouts", "Completions per new node, k of Eq. 1.", type=int),
    setting("--alpha", "value.alpha", "Decay per action.", type=float),
    setting("--max-steps", "format.max_steps", "Actions of a trajectory; the last one has to answer.", type=int),
)
PAIRS = settings(
    setting("--min-margin", "pairs.min_margin", "Smallest difference of rewards.", type=float),
    setting("--reward", "pairs.reward", "What pairs compare.", type=click.Choice(["spre", "judge"])),
    setting("--test-share", "pairs.test_share", "Share of questions held out.", type=float),
)
EXECUTION = settings(
    setting("--concurrency", "run.concurrency", "Questions in work at a time.", type=int),
    setting("--max-failed", "run.max_failed", "Share of failed questions above which the run fails.", type=float),
    setting("--input-price", "policy.input_price", "Of the policy, per million tokens.", type=float),
    setting("--output-price", "policy.output_price", "Of the policy, per million tokens.", type=float),
)
CONFIG = settings(
    click.option("--preset", type=click.Choice(sorted(PRESETS)), help="A published or shipped set of settings."),
    click.option("--config", "file", type=click.Path(path_type=Path), help="YAML; flags override it."),
    click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any other setting (repeatable)."),
)

INDEX = settings(
    setting("--corpus", "corpus", "wiki18, hotpotqa, ...; a file or folder of JSONL, Parquet or text; hub:OWNER/NAME."),
    setting("--kind", "kind", "bm25, dense (repeatable).", multiple=True, type=click.Choice(["bm25", "dense"])),
    setting("--max-memory", "max_memory", "For example 8G; half of this machine's if not given."),
    setting("--encoder", "encoder.name", "A sentence-transformers model: a Hub id or a folder."),
    setting("--device", "encoder.device", "cpu, cuda, or several: cuda:0,cuda:1."),
    setting("--dtype", "encoder.dtype", "Of the encoder: float32, bfloat16, float16."),
    setting("--encode-batch", "encoder.batch_size", "Passages that the encoder reads at once.", type=int),
    setting(
        "--vectors",
        "vectors.kind",
        "How vectors are searched; auto looks at their number and the memory.",
        type=click.Choice(["auto", "flat", "ivf-sq8", "ivf-pq", "hnsw"]),
    ),
    setting("--recall", "vectors.recall", "recall@10 against exact search that it is tuned for.", type=float),
    setting("--adopt", "vectors.adopt", "An existing FAISS index over these passages, in their order."),
    setting("--stemmer", "bm25.stemmer", "A Snowball language, or none."),
    setting("--stopwords", "bm25.stopwords", "A list that bm25s knows, or none."),
    setting("--title-weight", "bm25.title_weight", "How often a word of the title counts.", type=int),
    setting("--k1", "bm25.k1", "How slowly repeated words saturate.", type=float),
    setting("--b", "bm25.b", "How much long passages are held back, 0 to 1.", type=float),
    setting("--max-words", "passages.max_words", "Longer passages are split.", type=int),
    setting("--chunk-words", "passages.chunk_words", "Split all texts into passages of so many words.", type=int),
    setting("--strict/--no-strict", "passages.strict", "Refuse a corpus with rows that would be set aside."),
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
    setting("--prompts", "format.prompts", "default, brief, or a folder."),
    setting("--max-tokens", "policy.max_tokens", "Of one step.", type=int),
    setting("--seed", "seed", "Of sampling, questions and intervals.", type=int),
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
    setting("--data", "data", "A run's folder, Parquet or JSONL files, or OWNER/NAME[@REVISION][:CONFIG] on the Hub."),
    setting("--model", "model", "The policy to train: a folder or a Hub id; demo."),
    setting("--method", "method", "Adapters, or all weights.", type=click.Choice(["lora", "full"])),
    setting("--lora-r", "lora.r", "Rank of the adapters.", type=int),
    setting("--lora-alpha", "lora.alpha", "Scale of the adapters.", type=int),
    setting("--learning-rate", "learning_rate", "Peak.", type=float),
    setting("--epochs", "num_train_epochs", "Over the data.", type=float),
    setting("--batch-size", "per_device_train_batch_size", "Examples a device.", type=int),
    setting("--accumulation", "gradient_accumulation_steps", "Batches an optimizer step.", type=int),
    setting("--max-length", "max_length", "Tokens of prompt and step; longer ones are left out, never cut.", type=int),
    setting("--max-dropped", "max_dropped", "Share that may be left out.", type=float),
    setting("--limit", "limit", "A seeded sample of this many questions.", type=int),
    setting("--seed", "seed", "Of order and adapters.", type=int),
    setting("--save-steps", "save_steps", "Optimizer steps between checkpoints.", type=int),
    setting("--report-to", "report_to", "wandb, tensorboard, ... (repeatable).", multiple=True),
    setting("--merge/--no-merge", "merge", "Also write the adapters merged into the model, as OUT/merged."),
)
DPO = settings(
    setting("--beta", "beta", "Weight of the reference.", type=float),
    setting("--loss-type", "loss_type", "One of TRL's: sigmoid, ipo, hinge, ..."),
    setting(
        "--reference",
        "reference",
        "Adapter off, a frozen copy, or log-probabilities computed before.",
        type=click.Choice(["auto", "adapter_off", "frozen", "precomputed"]),
    ),
    setting("--weight", "weight", "Weigh pairs by their margin.", type=click.Choice(["none", "margin"])),
    setting("--reward-margin", "reward_margin", "Times the pair's margin: what rewards shall differ by.", type=float),
    setting("--sft-weight", "sft_weight", "Of the chosen step's negative log-likelihood.", type=float),
)

RL = settings(
    setting("--data", "data", "Questions: hotpotqa, ..., demo, or a file."),
    setting("--split", "split", "Split of a named data set."),
    setting("--limit", "limit", "A seeded sample of this many questions.", type=int),
    setting("--world-seed", "world_seed", "Which demo world.", type=int),
    setting("--corpus", "retrieval.corpus", "A file with id and contents: JSONL(.gz, .zst) or Parquet."),
    setting("--index", "retrieval.index", "A folder that `index build` made."),
    setting("--retriever-url", "retrieval.url", "A server that speaks POST /retrieve (repeatable).", multiple=True),
    setting("--top-k", "retrieval.top_k", "Passages per search.", type=int),
    setting("--policy", "model", "The policy to train: a folder or a Hub id; demo:FORMAT."),
    setting("--format", "format.name", "How trajectories are written: search_r1, hiprag, ..."),
    setting("--prompts", "format.prompts", "default, brief, or a folder."),
    setting("--turns", "format.max_steps", "Actions of a trajectory; the last one has to answer.", type=int),
    setting("--reward", "reward.name", "outcome, hiprag, search-p1, when-to-search, or PACKAGE.MODULE:CLASS."),
    setting("--judge", "judge.spec", "As --policy of build-tree; also demo-judge[:WORLD_SEED[:ERROR]]."),
    setting("--judge-model", "judge.model", "The judge's name at its server."),
    setting("--plans", "plans", "Reference plans for search-p1, made by `rl plan`."),
    setting("--method", "method", "Adapters, or all weights.", type=click.Choice(["lora", "full"])),
    setting("--loss-type", "loss_type", "dapo, grpo, dr_grpo, bnpo."),
    setting("--beta", "beta", "Weight of the KL penalty; 0 has none.", type=float),
    setting("--learning-rate", "learning_rate", "Peak.", type=float),
    setting("--max-steps", "max_steps", "Optimizer steps.", type=int),
    setting("--questions", "rollout.questions_per_step", "Of one batch of rollouts.", type=int),
    setting("--group-size", "rollout.group_size", "Attempts at each question.", type=int),
    setting("--batch-size", "per_device_train_batch_size", "Trajectories of one forward pass.", type=int),
    setting("--dynamic-sampling/--no-dynamic-sampling", "sampling.dynamic", "Refill groups that teach nothing."),
    setting("--rollout-url", "rollout.url", "A vLLM server that is sent the weights after each step."),
    setting("--seed", "seed", "Of questions, rollouts and adapters.", type=int),
    setting("--save-steps", "save_steps", "Optimizer steps between checkpoints.", type=int),
    setting("--report-to", "report_to", "wandb, tensorboard, ... (repeatable).", multiple=True),
    setting("--merge/--no-merge", "merge", "Also write the adapters merged into the model, as OUT/merged."),
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
