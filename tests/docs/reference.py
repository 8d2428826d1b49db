"""The reference pages of `docs/`, written from the code: `python -m tests.docs.reference`.

Columns and their meanings are those of `reasonrag.tables`, commands those of `--help`, settings those of the models
that read them. The keys of the JSON files are described here; a test holds them against files that were written.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reasonrag import tables
from reasonrag.cli import cli
from reasonrag.config import PRESETS, Config
from reasonrag.online_rl.presets import RL_PRESETS
from reasonrag.online_rl.settings import RLSettings
from reasonrag.retrieval.index.settings import IndexConfig
from reasonrag.settings import EXECUTION
from reasonrag.training.settings import DPO_PRESETS, SFT_PRESETS, DPOSettings, SFTSettings

DOCS = Path(__file__).parents[2] / "docs"

_NOTE = "<!-- Written by `python -m tests.docs.reference` from the code; do not edit by hand. -->\n"
_WIDTH = 100

# Title, where it lies, the table.
TABLES: tuple[tuple[str, str, tables.Described], ...] = (
    ("Trees", "RUN/trees/nodes-*.parquet", tables.tree_schema),
    ("Pairs of steps", "RUN/pairs/{train,test}-*.parquet", tables.pair_schema),
    ("Pairs of trajectories", "of `reasonrag pairs --level trajectory`", tables.trajectory_pair_schema),
    ("Evaluated trajectories", "REPORT/NAME/trajectories/*.parquet", tables.trajectory_schema),
    ("Rollouts of online training", "OUT/rollouts/step-*.parquet", tables.rollout_schema),
    ("Reference plans", "the file that `reasonrag rl plan` writes", tables.plan_schema),
)
NESTED = {
    "message": tables.message,
    "passage": tables.passage,
    "step": tables.step,
    "step of a pair": tables.pair_step,
}

# Keys of the JSON files; `*` stands for names that the data gives.
RUN_JSON = {
    "questions.total": "questions asked for",
    "questions.finished": "questions with a tree",
    "questions.failed.*": "questions without one, by cause",
    "trees.nodes": "nodes, roots included",
    "trees.by_action.*": "nodes by what they did",
    "trees.by_stop_reason.*": "complete trajectories by how they ended",
    "trees.malformed.*": "steps that could not be read, by reason",
    "trees.iterations_without_value": "visits that had no value to back up",
    "trees.complete_trajectories": "trajectories that ended with an answer",
    "trees.mean_f1": "of their answers; null if there is none",
    "trees.mean_em": "of their answers; null if there is none",
    "pairs.total": "pairs of both splits",
    "pairs.train": "pairs for training",
    "pairs.test": "pairs of held-out questions",
    "pairs.questions_with_pairs": "questions with at least one",
    "pairs.by_type.*": "pairs by chosen > rejected",
    "pairs.by_depth.*": "pairs by steps before the decision",
    "pairs.median_margin": "of chosen_reward - rejected_reward",
    "pairs.min_margin": "the threshold",
    "pairs.reward": "what was compared: spre, judge, or f1 of whole trajectories",
    "pairs.alpha": "decay of the rewards; null for whole trajectories",
    "pairs.level": "step or trajectory",
    "calls.*.calls": "calls of policy, judge and search, over all processes that worked on the run",
    "calls.*.prompt_tokens": "sent",
    "calls.*.completion_tokens": "written",
    "calls.*.calls_without_token_counts": "calls of which the backend reported no tokens",
    "calls.*.cost": "by the prices given; null where one is unknown",
    "seconds": "on the clock, over all processes",
    "seed": "the run's",
    "config_hash": "of configuration and content",
    "content.*": "checksums of questions, corpus, prompts; names and checksums of models",
    "policy": "name, and a checksum where it is a folder",
    "judge": "likewise; null without one",
    "versions.*": "installed versions of what can change a result",
}
TRAINING_JSON = {
    "stage": "dpo, sft or rl",
    "name": "hash of the identity",
    "model.name": "the model that was trained",
    "model.checksum": "name, and a checksum where it is a folder",
    "data.source": "folder, file or name",
    "data.checksum": "of its rows",
    "data.train.*": "pairs and questions for training",
    "data.held_out.*": "pairs and questions held out",
    "data.lengths.tokens.*": "quantiles of prompt, chosen and rejected lengths",
    "data.lengths.pairs.*": "pairs by split",
    "data.lengths.left_out.*": "pairs too long, by split and depth",
    "data.lengths.share_left_out.*": "their share",
    "data.lengths.max_length": "tokens of the longest pair that was kept",
    "data.lengths.limited_by": "data, setting or context",
    "data.lengths.shifted": "pairs whose text and prompt have a token in common",
    "data.lengths.shared_prompts": "prompts that stand in both splits",
    "data.content.*": "online: checksums of questions, corpus, prompts and judge",
    "data.rows.*": "rows that the trainer was given",
    "steps": "optimizer steps",
    "epochs": "over the data",
    "seconds": "on the clock, over all processes",
    "tokens_seen": "by the trainer",
    "final.*": "the last figures, as TRL names them",
    "best_held_out.*": "figures of the best look at held-out pairs; null if there was none",
    "reward": "online: which",
    "unscored.*": "online: trajectories without a reward, by cause",
    "best.*": "online: step and value of the policy in `best/`",
    "device": "cpu or the GPU's name",
    "processes": "of the trainer",
    "settings.*": "the resolved settings",
    "identity.*": "the part of them, and of the data, that can change a result",
    "versions.*": "installed versions of what can change a result",
    "history": "figures by step",
}
METRICS_JSON = {
    "policy": "the first policy, whose figures follow",
    "setting": "its first setting: temperature, step limit, passages",
    "em|f1|acc|retrievals|steps|forced|format_rate|prompt_tokens|completion_tokens.*": (
        "mean, interval (low, high) and n; null where unknown; see [the metrics](evaluation.md)"
    ),
    "lasj|osr|usr.*": "likewise, with a judge",
    "by_kind.*": "the same by kind of question",
    "questions.*": "total, scored, not_tried",
    "failed.*": "questions that a backend let down, by cause",
    "ends.*": "attempts by how they ended",
    "out_of_form.*": "attempts that are not well-formed, by reason",
    "judged.*": "verdicts that are known and unknown, and failures by cause",
    "policies.*": "the same of every policy and setting",
    "settings.*": "the settings of every policy",
    "differences": "paired differences from the first policy, with intervals",
    "incomplete": "settings at which more than `--max-failed` of the questions are missing",
    "unjudged": "settings at which more than `--max-failed` of the verdicts are missing",
    "judge.*": "who judged what; null without a judge",
    "dataset": "of the questions",
    "split": "of the questions",
    "seed": "of sampling, questions and intervals",
    "rules": "house or flashrag",
    "content.*": "checksums of questions and corpus, and how each policy was asked",
    "asked_differently": "settings in which the policies differ",
    "calls.*": "calls, tokens and cost of each policy",
    "versions.*": "installed versions of what can change a result",
}
JSON_FILES = {
    "run.json": ("what `build-tree` writes", RUN_JSON),
    "training.json": ("what `dpo train`, `sft train` and `rl train` write", TRAINING_JSON),
    "metrics.json": ("what `eval` writes", METRICS_JSON),
}

SETTINGS: tuple[tuple[str, type[BaseModel], dict[str, Any]], ...] = (
    ("build-tree, pairs, eval, rl plan", Config, PRESETS),
    ("dpo train", DPOSettings, DPO_PRESETS),
    ("sft train", SFTSettings, SFT_PRESETS),
    ("rl train", RLSettings, RL_PRESETS),
    ("index build", IndexConfig, {}),
)

# Meanings of settings that neither the code nor a flag describes; the longest name that ends a setting's counts.
MEANINGS = {
    "api": "`chat` sends messages, `completions` text or token ids",
    "c_uct": "weight of exploration in Eq. 5 and UCB1",
    "device": "`cpu`, `cuda`, `cuda:1`, ...; the first GPU if there is one",
    "dropout": "of the adapters' inputs",
    "dtype": "float32, bfloat16 or float16; the backend's choice if not given",
    "encoder.family": "how queries and passages are put to it; `auto` looks at its name",
    "encoder.max_tokens": "longer passages are cut there",
    "encoder.passage_prefix": "in front of every passage",
    "encoder.pooling": "how a text's tokens become one vector",
    "encoder.query_prefix": "in front of every query",
    "epsilon": "how far a ratio of probabilities may leave 1",
    "format.name": "how steps are written, see [formats](formats.md)",
    "gradient_accumulation_steps": "follows from the batch; not to be set",
    "label_smoothing": "share of pairs that may be the wrong way round",
    "logging_steps": "optimizer steps between two lines of figures",
    "lora.alpha": "scale of the adapters",
    "lora.r": "rank of the adapters",
    "lr_scheduler_type": "as transformers names it",
    "max_grad_norm": "longer gradients are shortened to it",
    "max_passage_chars": "longer passages are shown up to there",
    "max_retries": "of a request that failed for a while",
    "max_tokens": "of one reply",
    "passage_order": "in which passages are shown",
    "rejudge_terminal": "ask the judge again at every visit of an answer",
    "revision": "of the model on the Hub: a commit, a tag or a branch",
    "save_total_limit": "checkpoints that are kept",
    "scale_rewards": "what advantages are divided by",
    "target_modules": "layers that get adapters",
    "temperature": "of sampling; 0 is greedy",
    "timeout_s": "seconds that one request may take, retries included",
    "top_p": "nucleus of sampling",
    "trust_remote_code": "run code that comes with a model",
    "validation.limit": "questions of it",
    "validation.split": "of a named data set",
    "warmup_ratio": "share of the steps in which the learning rate rises",
    "weight_decay": "of AdamW",
    "weighting": "what a node's SPRE is averaged over",
}


def schema_page() -> str:
    """Every table and every JSON file."""
    lines = [
        "# Schema reference",
        "",
        _NOTE,
        "```bash",
        "reasonrag stats runs/demo/trees",
        "```",
        "",
        "Schemas are written down, never inferred, so every shard has the same columns whatever its rows hold. Pages",
        "of the Parquet files carry checksums. A list of `message` is one of structs with the columns of `message`",
        "below.",
    ]
    for title, place, table in TABLES:
        place = place if "`" in place else f"`{place}`"
        lines += ["", f"## {title}", "", f"{place[0].upper()}{place[1:]}. {table.__doc__}", "", *_columns(table)]
    lines += ["", "## Nested columns", ""]
    for name, table in NESTED.items():
        lines += [f"### {name}", "", str(table.__doc__), "", *_columns(table), ""]
    lines += ["## JSON files", "", "`*` stands for names that the data gives.", ""]
    for file, (what, keys) in JSON_FILES.items():
        lines += [f"### {file}", "", f"{what[0].upper()}{what[1:]}.", "", "| key | meaning |", "|---|---|"]
        lines += [f"| {_code(key.replace('|', '`, `'))} | {meaning} |" for key, meaning in keys.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _columns(table: tables.Described) -> list[str]:
    rows = [f"| `{name}` | {arrow(type)} | {_cell(meaning)} |" for name, type, meaning in table.columns]
    return ["| column | type | meaning |", "|---|---|---|", *rows]


def arrow(type: pa.DataType) -> str:
    """A type as a reader would say it; structs by their names."""
    if pa.types.is_list(type):
        return f"list&lt;{arrow(type.value_type)}&gt;"
    if pa.types.is_map(type):
        return f"map&lt;{arrow(type.key_type)}, {arrow(type.item_type)}&gt;"
    known = {str(pa.struct(list(table()))): name for name, table in NESTED.items()}
    return known.get(str(type), {"float": "float32", "double": "float64"}.get(str(type), str(type)))


def cli_page() -> str:
    """`--help` of every command."""
    lines = [
        "# Command line reference",
        "",
        _NOTE,
        "```bash",
        "reasonrag --help",
        "```",
        "",
        "What stands in brackets behind an option is the [setting](settings.md) that it sets. Exit codes: 0; 2 for",
        "bad input; 1 when more than `--max-failed` of the questions failed; 130 after Ctrl-C and 143 after SIGTERM,",
        "both with everything paid for kept.",
    ]
    for path, command in commands(cli, ("reasonrag",)):
        lines += ["", f"## {' '.join(path)}", "", "```text", _help(path, command), "```"]
    return "\n".join(lines) + "\n"


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below one, with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from commands(command.commands[name], (*path, name))


def _help(path: tuple[str, ...], command: click.Command) -> str:
    settings = {**cli.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, info_name=" ".join(path), **settings)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def settings_page() -> str:
    """Every field of every model, with the flag that sets it."""
    lines = [
        "# Settings reference",
        "",
        _NOTE,
        "```bash",
        "reasonrag build-tree --preset demo --set search.c_uct=1.0 --dry-run",
        "```",
        "",
        "Defaults, then `--preset`, then `--config FILE.yaml`, then `--set NAME=VALUE`, then flags: the later one",
        "counts. An unknown name is refused. Settings marked * may differ when work is resumed: they say where things",
        "lie, how fast they go and what they cost. What lies there (questions, corpus, weights) is compared by its",
        "checksum.",
    ]
    known_flags = flags()
    for title, model, presets in SETTINGS:
        lines += ["", f"## {title}", ""]
        if presets:
            lines += [f"Presets: {', '.join(_code(name) for name in presets)}.", ""]
        lines += ["| setting | flag | type | default | meaning |", "|---|---|---|---|---|"]
        for name, field in fields(model):
            flag, help = known_flags.get((title, name), ("", ""))
            mark = " *" if EXECUTION in field.metadata else ""
            what = field.description or help or meaning(name)
            row = [f"`{name}`{mark}", _code(flag), _type(field), _default(field), _cell(what)]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every leaf."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            default = field.get_default(call_default_factory=True)
            for deeper, leaf in fields(inner, f"{prefix}{name}."):
                yield deeper, _with_default(leaf, default, deeper.removeprefix(f"{prefix}{name}."))
        else:
            yield f"{prefix}{name}", field


def _with_default(field: FieldInfo, section: Any, path: str) -> FieldInfo:
    """A field with the default that the section it stands in gives it."""
    value = section
    for name in path.split("."):
        value = getattr(value, name)
    return FieldInfo.merge_field_infos(field, default=value, default_factory=None)


def meaning(name: str) -> str:
    ends = (known for known in MEANINGS if name == known or name.endswith(f".{known}"))
    return MEANINGS.get(max(ends, key=len, default=""), "")


def flags() -> dict[tuple[str, str], tuple[str, str]]:
    """Flag and help of a setting, by the title of its section and its name."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for path, command in commands(cli, ()):
        for title, *_ in SETTINGS:
            if " ".join(path) in title.split(", "):
                for option in command.params:
                    key = re.search(r"  \[([\w.]+)\]$", getattr(option, "help", None) or "")
                    if key:
                        help = str(option.help).partition("  [")[0].rstrip(".")
                        first = help[0].lower() if help[1:2].islower() else help[0]
                        found.setdefault((title, key[1]), (option.opts[0], first + help[1:]))
    return found


def _type(field: FieldInfo) -> str:
    limits = [_limit(item) for item in field.metadata]
    return ", ".join([_named(field.annotation), *filter(None, limits)])


def _named(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in inner)
    if origin is Annotated:
        return _named(inner[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_named(one) for one in inner if one is not type(None))
    if origin is tuple:
        return f"several {_named(inner[0])}"
    if origin is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _limit(item: Any) -> str:
    signs = {"ge": "&ge;", "gt": "&gt;", "le": "&le;", "lt": "&lt;"}
    return ", ".join(f"{sign} {getattr(item, name):g}" for name, sign in signs.items() if hasattr(item, name))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return ""
    return _code(str(value).lower() if isinstance(value, bool) else str(value))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGES: dict[str, Callable[[], str]] = {"schema.md": schema_page, "cli.md": cli_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
