"""`eval`: how good policies are on questions that they have not seen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import (
    RULES,
    SHARD,
    F,
    Several,
    command,
    configuration,
    flag_help,
    out,
    rare,
    settings,
    sources,
)
from reasonrag.core.errors import ConfigError, Interrupted
from reasonrag.core.text import Rules, printable
from reasonrag.core.types import WHOLE, Shard

if TYPE_CHECKING:
    from reasonrag.core.config import Config
    from reasonrag.evaluation.judged import Judging
    from reasonrag.evaluation.run import Evaluation

_POLICY = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<spec>[^#]+)(?:#(?P<model>.+))?")

_BY_NAME = {"format.name": "--format", "policy.chat_template": "--chat-template", "policy.card": "--card"}

# In the reasonrag format a search takes two actions: itself, and its evidence.
_FIGURE_6 = "1,2,3,4,5 with --max-turns 11 as in the paper's Figure 6"


def _swept(flag: str, parameter: str, convert: type[float], key: str, example: str) -> Callable[[F], F]:
    """Add the option of a setting that may have several values."""
    kind = Several(convert, "integer" if convert is int else "float")
    text = f"{flag_help('Config', key)} Several evaluate each: {example}."
    return click.option(flag, parameter, type=kind, metavar="NUMBERS", help=text)


def _by_name(key: str) -> Callable[[F], F]:
    """Add the option of a setting that may be given to all policies or to one."""
    flag, value = _BY_NAME[key], key.rpartition(".")[2].upper()
    text = f"{flag_help('Config', key)} NAME=... sets that of one policy (repeatable)."
    return click.option(flag, key.replace(".", "__"), multiple=True, metavar=f"[NAME=]{value}", help=text)


@command("eval")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    required=True,
    metavar="[NAME=]SPEC[#MODEL]",
    help=flag_help("Config", "policy.spec")
    + " NAME is its name in the report, MODEL its name at a server (repeatable; the first policy is the baseline).",
)
@settings("Config", "questions.dataset", "questions.split", "questions.limit")
@settings("Config", "retrieval.corpus", "retrieval.index", "retrieval.url")
@_by_name("format.name")
@_swept("--temperature", "temperatures", float, "policy.temperature", "0,1 (default: 0)")
@_swept("--top-k", "top_ks", int, "retrieval.top_k", "1,3,5,7,9 as in the paper's Figure 7")
@settings("Config", "judge.spec", "judge.model", "seed", "policy.concurrency")
@rare(
    _by_name("policy.chat_template"),
    _by_name("policy.card"),
    click.option("--allow-prompt-mismatch", is_flag=True, help="Compare policies that are prompted differently."),
    settings("Config", "questions.exclude", "questions.world_seed", "retrieval.kind"),
    settings("Config", "format.prompts", "policy.max_tokens"),
    click.option(
        "--judged",
        type=Several(lambda name: name.strip().lower(), "name"),
        metavar="NAMES",
        help="Metrics for the judge: some of lasj,osr,usr (default: all).",
    ),
    _swept("--max-turns", "max_turns", int, "format.max_steps", "3,5,7"),
    _swept("--max-searches", "max_searches", int, "format.max_searches", _FIGURE_6),
    settings("Config", "choice.prm", "choice.candidates", "choice.best_of"),
    click.option(
        "--choose",
        type=Several(lambda name: name.strip().lower(), "name"),
        metavar="RULES",
        help=flag_help("Config", "choice.rule") + " Several, first,majority,prm, choose among the same attempts, and "
        "are compared with the first rule.",
    ),
    RULES,
    settings("Config", "run", "policy.input_price", "policy.output_price"),
    SHARD,
)
@configuration("Config")
@out("The folder of the report; the same command resumes it.")
def evaluate(
    policies: tuple[str, ...],
    temperatures: tuple[float, ...] | None,
    max_turns: tuple[int, ...] | None,
    max_searches: tuple[int, ...] | None,
    top_ks: tuple[int, ...] | None,
    choose: tuple[str, ...] | None,
    rules: Rules,
    allow_prompt_mismatch: bool,
    judge__spec: str | None,
    judge__model: str | None,
    judged: tuple[str, ...] | None,
    out: Path,
    shard: Shard,
    **given: Any,
) -> None:
    """Evaluate policies on held-out questions: metrics with 95 % intervals, and paired differences.

    \b
    Two policies on HotpotQA's dev questions:
      reasonrag eval --dataset hotpotqa --limit 1000 --policy base=hf:Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=hf:policies/dpo/merged --out reports/hotpot
    A base model and an adapter on one vLLM server, both asked as the adapter was trained:
      reasonrag eval --dataset hotpotqa --policy base=http://127.0.0.1:8000/v1#Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=http://127.0.0.1:8000/v1#dpo --card policies/dpo --out reports/hotpot
    With a judge: also how often searches are needless or missing (OSR, USR):
      reasonrag eval --preset demo --policy base=demo:hiprag --policy rl=hf:runs/demo/hiprag/best \\
          --judge demo-judge --out reports/hiprag
    In the demo world, greedy and sampled:
      reasonrag eval --preset demo --policy base=demo --policy dpo=hf:runs/demo/dpo --temperature 0,1 --out reports/demo

    If the evaluation is killed or stopped, the same command resumes it.
    """
    from reasonrag.commands.console import log_plainly
    from reasonrag.evaluation.run import Evaluation

    by_name = {key: given.pop(key.replace(".", "__")) for key in _BY_NAME}
    asked = sources(given)
    if choose:
        asked["overrides"]["choice.rule"] = choose[0]
    configs = policy_configs(policies, asked, by_name)
    evaluation_of = partial(
        Evaluation,
        configs,
        out,
        temperatures=chosen_temperatures(temperatures, configs, asked),
        max_steps=max_turns,
        max_searches=max_searches,
        top_ks=top_ks,
        choose=choose,
        rules=rules,
        judging=judging(judge__spec, judge__model, judged, configs),
        differently=allow_prompt_mismatch,
    )
    log_plainly()
    sys.exit(_run(evaluation_of, shard))


def _run(evaluation_of: Callable[..., Evaluation], shard: Shard) -> int:
    """Run the evaluation of a shard, and that of all questions if it was the last one; return the exit code."""
    from reasonrag.commands.console import Stop, error_console, table_console, what_to_do
    from reasonrag.evaluation.report import summary_table

    stop = Stop(error_console())

    try:
        if shard != WHOLE:
            part = evaluation_of(shard=shard)
            part.run_policies(lambda work: stop.show(work.progress, work.drain))
            if not part.was_last:
                print(f"shard {shard} is evaluated; the report is written when all are")
                return 0
        evaluation = evaluation_of()
        results = evaluation.run(lambda work: stop.show(work.progress, work.drain))
    except Interrupted:
        return stop.print_resume_hint()
    table_console().print(summary_table(results).terminal())
    print(f"report: {evaluation.out / 'report.md'}")
    for difference in results["asked_differently"]:
        stop.console.print(printable(difference))
    for missing in results["incomplete"]:
        stop.console.print(
            f"{missing['missing']} questions are missing of {missing['policy']} at {missing['setting']}"
            f"{what_to_do(missing['causes'])}"
        )
    for failed in results["unjudged"]:
        stop.console.print(
            f"{failed['failed']} of {failed['asked']} verdicts failed for {failed['metric']} of {failed['policy']} at "
            f"{failed['setting']}; the same command tries again those that the judge did not answer"
        )
    return int(bool(results["incomplete"] or results["unjudged"]))


def policy_configs(
    policies: tuple[str, ...],
    asked: Mapping[str, Any],
    by_name: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Config]:
    """Return the configuration of each policy of an evaluation, by its name. The default split is a held-out one.

    `policies` are the values of `--policy`, `by_name` those of the flags in `_BY_NAME`, by setting; `asked` is what
    `sources` returns.

    Raises:
        ConfigError: two policies have one name, or another flag names a policy that is not there.
    """
    from reasonrag.core.config import load_config
    from reasonrag.evaluation.sweep import folder_name

    configs: dict[str, Config] = {}
    named: dict[str, dict[str, str]] = {key: {} for key in _BY_NAME}  # by setting, then by policy
    for key, texts in (by_name or {}).items():
        for text in texts:
            name, _, value = text.rpartition("=")
            named[key][name] = value
    common = {key: values.pop("", None) for key, values in named.items()}
    is_split_asked = _is_split_asked(asked)
    for text in policies:
        match = _POLICY.fullmatch(text)
        if match is None:
            raise ConfigError(f"--policy {text!r} is not of the form SPEC, NAME=SPEC or NAME=SPEC#MODEL")
        name = match["name"] or folder_name(match["model"] or match["spec"])
        if name in configs:
            raise ConfigError(f"two policies are called {name!r}; name them: --policy base=SPEC --policy dpo=SPEC")
        overrides = asked["overrides"] | {"policy.spec": match["spec"]}
        if match["model"]:
            overrides["policy.model"] = match["model"]
        for key, values in named.items():
            if chosen := values.pop(name, common[key]):
                overrides[key] = chosen
        config = load_config(**{**asked, "overrides": overrides})
        if not is_split_asked:
            overrides |= {"questions.dataset": held_out_sets(config.questions.dataset), "questions.split": None}
            config = load_config(**{**asked, "overrides": overrides})
        configs[name] = config
    for key, values in named.items():
        if values:
            raise ConfigError(
                f"{_BY_NAME[key]} is given for {', '.join(values)}, but the policies are {', '.join(configs)}"
            )
    return configs


def _is_split_asked(asked: Mapping[str, Any]) -> bool:
    """Return whether a flag, `--set` or the file names a split. A file's `train` does not count: it is build-tree's."""
    from reasonrag.core.settings import gather

    questions = gather({}, file=asked["file"]).get("questions")
    in_file = questions.get("split") if isinstance(questions, dict) else None
    return asked["overrides"].get("questions.split") is not None or in_file not in (None, "train")


def held_out_sets(dataset: str | None) -> str | None:
    """Return the data sets of `--dataset` with the split of each that no policy was trained on; a file has none.

    >>> held_out_sets("demo,hotpotqa,nq:dev,mine.jsonl")
    'demo:test,hotpotqa:dev,nq:dev,mine.jsonl'
    """
    from reasonrag.storage.questions import KNOWN, named_sets

    if dataset is None:
        return None
    held_out = {"demo": "test"} | {name: splits[-1] for name, splits in KNOWN.items()}
    sets = []
    for name, split in named_sets(dataset):
        split = split or held_out.get(name)
        sets.append(f"{name}:{split}" if split else name)
    return ",".join(sets)


def judging(
    spec: str | None, model: str | None, judged: tuple[str, ...] | None, configs: Mapping[str, Config]
) -> Judging | None:
    """Return the judge of an evaluation; None without `--judge`. Its sampling and prices are the settings `judge.*`.

    Raises:
        ConfigError: a flag configures a judge, but --judge is missing.
    """
    from reasonrag.core.config import JudgeConfig
    from reasonrag.core.settings import validate
    from reasonrag.evaluation.judged import JUDGED, Judging

    if spec is None:
        if model or judged:
            raise ConfigError("--judge-model and --judged are about a judge, and none is named; add --judge")
        return None
    asked = {**next(iter(configs.values())).judge.model_dump(exclude_unset=True), "spec": spec}
    return Judging(validate(JudgeConfig, asked | ({"model": model} if model else {})), judged or JUDGED)


def chosen_temperatures(
    temperatures: tuple[float, ...] | None, configs: Mapping[str, Config], asked: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return the temperatures of an evaluation: of its flag, else of `--set policy.temperature`, else greedy."""
    if temperatures is None and "policy.temperature" in asked["overrides"]:
        return (next(iter(configs.values())).policy.temperature,)
    return temperatures or (0.0,)
