"""`eval`: how good policies are on questions that they have not seen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import F, Several, command, configuration, flag_help, out, rare, settings, sources
from reasonrag.core.errors import ConfigError
from reasonrag.core.text import printable, redact

if TYPE_CHECKING:
    from reasonrag.core.config import Config

# NAME=SPEC#MODEL. A name has no ":" and no "/", so the "=" in the query of a URL does not end one.
_POLICY = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<spec>(?:hf|vllm|demo):.+|[^#]+)(?:#(?P<model>.+))?")


_NAMES = Several(lambda name: name.strip().lower(), "name")
# The arguments of `Evaluation` that have an option of the same name.
_COMPARED = ("temperatures", "max_steps", "max_searches", "top_ks", "choose", "rules", "judged", "differently")
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
@settings("Config", "outcome.name", "judge.spec", "judge.model", "seed", "policy.concurrency")
@rare(
    _by_name("policy.chat_template"),
    _by_name("policy.card"),
    click.option(
        "--allow-prompt-mismatch", "differently", is_flag=True, help="Compare policies that are prompted differently."
    ),
    settings("Config", "questions.exclude", "questions.world_seed", "retrieval.kind"),
    settings("Config", "format.prompts", "format.open_tags", "policy.max_tokens"),
    click.option(
        "--judged",
        type=_NAMES,
        metavar="NAMES",
        help="Metrics for the judge: lasj,osr,usr (default: all, or the outcome).",
    ),
    settings("Config", "outcome.votes"),
    _swept("--max-turns", "max_steps", int, "format.max_steps", "3,5,7"),
    _swept("--max-searches", "max_searches", int, "format.max_searches", _FIGURE_6),
    settings("Config", "choice.prm", "choice.candidates", "choice.best_of"),
    click.option(
        "--choose",
        type=_NAMES,
        metavar="RULES",
        help=flag_help("Config", "choice.rule") + " Several, first,majority,prm, choose among the same attempts, and "
        "are compared with the first rule.",
    ),
    click.option(
        "--rules",
        type=click.Choice(["house", "flashrag"]),
        default="house",
        help="How answers are normalised and compared; flashrag: as FlashRAG does (default: house).",
    ),
    settings("Config", "run", "policy.input_price", "policy.output_price"),
)
@configuration("Config")
@out("The folder of the report; the same command resumes it.")
def evaluate(policies: tuple[str, ...], out: Path, **given: Any) -> None:
    """Evaluate policies on held-out questions: metrics with 95 % intervals, and paired differences.

    \b
    Two policies on HotpotQA's dev questions:
      reasonrag eval --dataset hotpotqa --limit 1000 --policy base=hf:Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=hf:policies/dpo/merged --out reports/hotpot
    A base model and an adapter on one vLLM server, both asked as the adapter was trained:
      reasonrag eval --dataset hotpotqa --policy base=http://127.0.0.1:8000/v1#Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=http://127.0.0.1:8000/v1#dpo --card policies/dpo --out reports/hotpot
    With a judge: also how often searches are needless or missing (OSR, USR):
      reasonrag eval --preset demo --policy base=demo:hiprag --policy rl=hf:runs/demo-hiprag/best \\
          --judge demo-judge --out reports/hiprag
    In the demo world, greedy and sampled:
      reasonrag eval --preset demo --policy base=demo --policy dpo=hf:runs/demo-dpo --temperature 0,1 \\
          --out reports/demo

    If the evaluation is killed or stopped, the same command resumes it.
    """
    from reasonrag.commands.console import Stop, error_console, log_plainly, open_tracker
    from reasonrag.storage.files import require_json
    from reasonrag.storage.folder import finished, mark_finished

    by_name = {key: given.pop(key.replace(".", "__")) for key in _BY_NAME}
    compared = {name: given.pop(name) for name in _COMPARED}
    choices = sources(given)
    if compared["choose"]:
        choices["overrides"]["choice.rule"] = compared["choose"][0]
    configs = policy_configs(policies, choices, by_name)
    first = next(iter(configs.values()))
    if compared["temperatures"] is None:  # greedy, unless --set gives a temperature
        compared["temperatures"] = (first.policy.temperature if "policy.temperature" in choices["overrides"] else 0.0,)
    compared["judged"] = judged_metrics(compared["judged"], choices["overrides"], first)
    log_plainly()
    command = ["eval", compared, *configs, *configs.values()]
    if finished(out, *command):
        sys.exit(print_results(require_json(out / "metrics.json"), out))
    from reasonrag.evaluation.run import Evaluation

    track = open_tracker(first.run.report_to)
    stop = Stop(error_console())
    with stop.resumable():
        results = Evaluation(configs, out, **compared).run(lambda work: stop.show(work.progress, work.drain))
    track(out, results["policies"])
    exit_code = print_results(results, out)
    # The same command tries failed questions and verdicts again.
    if not exit_code and '"failed": {\n' not in (out / "metrics.json").read_text("utf-8"):
        mark_finished(out, *command)
    sys.exit(exit_code)


def print_results(results: Mapping[str, Any], out: Path) -> int:
    """Print the content of `metrics.json`; return the exit code."""
    from reasonrag.commands.console import error_console, table_console, what_to_do
    from reasonrag.evaluation.tables import summary_table

    console = error_console()
    table_console().print(summary_table(results).terminal())
    print(f"report: {out / 'report.md'}")
    for line in results["asked_differently"] + results["lost_to_form"]:
        console.print(printable(line))
    for row in results["incomplete"]:
        where = f"{row['policy']} at {row['setting']}"
        console.print(f"{row['missing']} questions are missing of {where}{what_to_do(row['causes'])}")
    for row in results["unjudged"]:
        where = f"{row['metric']} of {row['policy']} at {row['setting']}"
        console.print(f"{row['failed']} of {row['asked']} verdicts failed for {where}{what_to_do({})}")
    return int(bool(results["incomplete"] or results["unjudged"]))


def policy_configs(
    policies: tuple[str, ...], choices: Mapping[str, Any], by_name: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Config]:
    """Return the configuration of each policy of an evaluation, by its name. The default split is a held-out one.

    `policies` are the values of `--policy`, `by_name` those of the flags in `_BY_NAME`, by setting;
    `choices` is what `sources` returns.

    Raises:
        ConfigError: two policies have one name, or another flag names a policy that is not there.
    """
    from reasonrag.core.config import load_config
    from reasonrag.evaluation.run import folder_name

    # A policy is described by its own settings on top of those of all policies.
    common = choices["overrides"] | _held_out(choices)
    of_policy: dict[str, dict[str, Any]] = {}
    for text in policies:
        if (match := _POLICY.fullmatch(text)) is None:
            raise ConfigError(f"--policy {text!r} is not of the form SPEC, NAME=SPEC or NAME=SPEC#MODEL")
        name = match["name"] or folder_name(match["model"] or match["spec"])
        if redact(name) != name:
            raise ConfigError("the name of a --policy looks like a secret, and stands in files; give it another one")
        if name in of_policy:
            raise ConfigError(f"two policies are called {name!r}; name them: --policy base=SPEC --policy dpo=SPEC")
        of_policy[name] = {"policy.spec": match["spec"]}
        if match["model"]:
            of_policy[name]["policy.model"] = match["model"]
    for key, texts in (by_name or {}).items():
        for text in texts:
            name, _, value = text.rpartition("=")
            if name and name not in of_policy:
                raise ConfigError(f"{_BY_NAME[key]} is given for {name}, but the policies are {', '.join(of_policy)}")
            (of_policy[name] if name else common)[key] = value
    return {name: load_config(**{**choices, "overrides": common | own}, judged=True) for name, own in of_policy.items()}


def _held_out(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of held-out questions: each data set of `--dataset` with a split that no policy learned from.

    Nothing if a flag, `--set` or the file names a split. A
    file's `train` does not count: it is that of build-tree.
    """
    from reasonrag.core.config import PRESETS
    from reasonrag.core.settings import gather
    from reasonrag.storage.questions import KNOWN, named_sets

    questions = gather(PRESETS, **choices).get("questions")
    in_file = gather({}, file=choices["file"]).get("questions")
    dataset = questions.get("dataset") if isinstance(questions, dict) else None
    split = in_file.get("split") if isinstance(in_file, dict) else None
    is_split_named = choices["overrides"].get("questions.split") is not None or split not in (None, "train")
    if is_split_named or not isinstance(dataset, str):
        return {}
    # The last split of a known data set is the one that papers report: test, else dev.
    held_out = {"demo": "test"} | {name: splits[-1] for name, splits in KNOWN.items()}
    sets = []
    for name, split in named_sets(dataset):
        split = split or held_out.get(name)
        sets.append(f"{name}:{split}" if split else name)
    return {"questions.dataset": ",".join(sets), "questions.split": None}


def judged_metrics(judged: tuple[str, ...] | None, overrides: Mapping[str, Any], config: Config) -> tuple[str, ...]:
    """Return the metrics that the judge is asked for: those of `--judged`, else all if `--judge` names it for them."""
    from reasonrag.evaluation.metrics import JUDGED

    if config.judge.spec is None and (judged or "judge.model" in overrides or config.outcome.verdicts):
        raise ConfigError("--judge-model, --judged and --outcome judge are about a judge; name one with --judge")
    # A file of build-tree may name the judge of its trees.
    return judged or (JUDGED if "judge.spec" in overrides and not config.outcome.verdicts else ())
