"""Flags to configuration to one function per command.

Exit codes: 0; 2 for bad input; 1 when more than `--max-failed` of the questions failed; 130 after Ctrl-C, 143 after
SIGTERM, both with everything paid for kept.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from reasonrag import __version__, flags
from reasonrag.errors import ReasonRAGError
from reasonrag.formats import FORMATS
from reasonrag.online_rl.presets import RL_PRESETS
from reasonrag.reproduce.ablation import BASE, AblationScale, Paper
from reasonrag.reproduce.papers import PAPERS
from reasonrag.reproduce.reasonrag import Scale
from reasonrag.settings import dump
from reasonrag.text import Rules, printable
from reasonrag.training.settings import DPO_PRESETS, SFT_PRESETS, DPOSettings, SFTSettings


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Process rewards for agentic RAG: questions and a corpus in, preference data and policies out.

    \b
    Try it whole, without a GPU or a network:
      reasonrag build-tree --preset demo --limit 20 --out runs/demo
    """


@cli.command("build-tree")
@flags.DATA
@flags.MODELS
@flags.SEARCH
@flags.PAIRS
@flags.EXECUTION
@flags.CONFIG
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder; the same command resumes it.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and an estimate; call nothing.")
@click.option("--preview", is_flag=True, help="Build the first question's tree and print it.")
def build_tree(
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    out: Path | None,
    dry_run: bool,
    preview: bool,
    **given: Any,
) -> None:
    """Search trees over agentic-RAG steps, value them by SPRE, write preference pairs as Parquet.

    \b
    Your own files, no GPU:
      reasonrag build-tree --dataset questions.jsonl --corpus corpus.jsonl.gz --policy extractive --out runs/try
    A model on a vLLM server:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy http://127.0.0.1:8000/v1 \\
          --model Qwen/Qwen2.5-7B-Instruct --set policy.vllm=true --out runs/hotpot
    What it would cost:
      reasonrag build-tree --dataset hotpotqa --limit 1000 --policy ... --input-price 0.1 --output-price 0.4 --dry-run

    Killed or stopped, the same command goes on where it was.
    """
    from reasonrag.commands import search

    config = flags.resolve(preset, file, assignments, given)
    if dry_run:
        click.echo(printable(dump(config)))
        click.echo(printable(search.estimate(config)))
        return
    if preview:
        search.preview(config, out)
        return
    sys.exit(search.build_tree(config, out))


@cli.command()
@flags.PAIRS
@flags.setting(
    "--alpha", "pairs.alpha", "Decay of the rewards per action; 1 leaves the shortest-path term out.", type=float
)
@flags.setting(
    "--level", "pairs.level", "Steps, or whole trajectories by outcome.", type=click.Choice(["step", "trajectory"])
)
@click.option("--out", type=click.Path(path_type=Path), help="Write there and leave the run as it is.")
@click.argument("run", type=click.Path(path_type=Path))
def pairs(run: Path, out: Path | None, **given: Any) -> None:
    """Derive a finished run's pairs anew, with no model call.

    \b
      reasonrag pairs runs/hotpot --min-margin 0.05
    Without the shortest-path term, beside the run:
      reasonrag pairs runs/hotpot --alpha 1 --out runs/hotpot-alpha1
    """
    from reasonrag.commands import search

    search.derive(run, out, flags.overrides(given))


@cli.group()
def dpo() -> None:
    """Preference learning on steps, with TRL.

    \b
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    """


@dpo.command("train")
@flags.TRAINING
@flags.DPO
@flags.training_config(DPO_PRESETS)
def dpo_train(out: Path, **given: Any) -> None:
    """Train a policy on preference pairs; what is scored is exactly the step.

    \b
    On one GPU, adapters:
      reasonrag dpo train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo --merge
    The published configuration, on eight GPUs:
      accelerate launch --config_file configs/fsdp.yaml -m reasonrag dpo train --preset reasonrag \\
          --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/dpo
    Without a GPU, in the demo world:
      reasonrag dpo train --preset demo --data runs/demo/trees --out runs/demo/dpo

    Killed or stopped, the same command goes on from the last checkpoint.
    """
    from reasonrag.commands import train

    sys.exit(train.dpo(flags.training(DPOSettings, DPO_PRESETS, given), out))


@cli.group()
def sft() -> None:
    """Supervised fine-tuning on chosen steps, with TRL.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
    """


@sft.command("train")
@flags.TRAINING
@flags.training_config(SFT_PRESETS)
def sft_train(out: Path, **given: Any) -> None:
    """Train a policy on the chosen steps of preference pairs: the paper's rival of DPO.

    \b
      reasonrag sft train --data runs/hotpot --model Qwen/Qwen2.5-7B-Instruct --out policies/sft
      reasonrag sft train --preset demo --data runs/demo/trees --out runs/demo/sft
    """
    from reasonrag.commands import train

    sys.exit(train.sft(flags.training(SFTSettings, SFT_PRESETS, given), out))


@cli.group()
def rl() -> None:
    """Online training on rollouts, with TRL's GRPO.

    \b
      reasonrag rl train --preset hiprag --data hotpotqa --policy Qwen/Qwen2.5-3B-Instruct --out policies/hiprag
    """


@rl.command("train")
@flags.RL
@flags.training_config(RL_PRESETS)
def rl_train(out: Path, **given: Any) -> None:
    """Train a policy online: the engine that builds trees makes the rollouts, a reward scores each of them.

    \b
    HiPRAG on a corpus of yours, with a judge on a server:
      reasonrag rl train --preset hiprag --data questions.jsonl --corpus corpus.jsonl \\
          --policy Qwen/Qwen2.5-3B-Instruct --judge http://127.0.0.1:8001/v1 --judge-model org/judge \\
          --out policies/hiprag
    Rollouts by a vLLM server, which is sent the weights after each step:
      reasonrag rl train --preset search-r1 --data hotpotqa --policy Qwen/Qwen2.5-3B-Instruct \\
          --rollout-url http://127.0.0.1:8000/v1 --out policies/search-r1
    Without a GPU, in the demo world:
      reasonrag rl train --preset demo-outcome --out runs/demo/outcome

    Killed or stopped, the same command goes on from the last checkpoint.
    """
    from reasonrag.commands import train

    sys.exit(train.rl(flags.online(RL_PRESETS, given), out))


@rl.command("plan")
@flags.setting("--data", "questions.dataset", "hotpotqa, 2wikimultihopqa, ...; demo; or a file.")
@flags.setting("--split", "questions.split", "Split of a named data set.")
@flags.setting("--limit", "questions.limit", "A seeded sample of this many questions.", type=int)
@flags.setting("--judge", "judge.spec", "The model that plans, as --policy of build-tree; also demo-judge.")
@flags.setting("--judge-model", "judge.model", "Its name at its server.")
@flags.setting("--concurrency", "run.concurrency", "Questions in work at a time.", type=int)
@flags.setting("--input-price", "judge.input_price", "Per million tokens.", type=float)
@flags.setting("--output-price", "judge.output_price", "Per million tokens.", type=float)
@click.option("--k", type=click.IntRange(1), default=4, show_default=True, help="Candidates a question.")
@click.option(
    "--correct", type=click.Choice(["em", "cem"]), default="em", show_default=True, help="Which candidates are kept."
)
@click.option("--show-answer", is_flag=True, help="To the planner, as App. D.2 prints it; then all are correct.")
@flags.CONFIG
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A Parquet file; resumed if not finished.")
def rl_plan(
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    out: Path,
    k: int,
    correct: Literal["em", "cem"],
    show_answer: bool,
    **given: Any,
) -> None:
    """Make Search-P1's reference plans: candidates, the correct ones kept, a vote for the steps that are needed.

    \b
      reasonrag rl plan --data hotpotqa --split train --judge http://127.0.0.1:8001/v1 \\
          --judge-model org/judge --out plans.parquet
      reasonrag rl plan --preset demo --judge demo-judge --out plans.parquet

    Killed or stopped, the same command goes on where it was.
    """
    from reasonrag.commands.rl_plan import plan

    config = flags.resolve(preset, file, assignments, {**given, "value__kind": "judge"})
    sys.exit(plan(config, out, k=k, correct=correct, show_answer=show_answer))


@cli.command()
@click.option(
    "--format", "name", type=click.Choice(list(FORMATS)), required=True, help="How the trajectories are written."
)
@click.option(
    "--rules",
    type=click.Choice(["house", "flashrag"]),
    default="house",
    show_default=True,
    help="Of EM and F1, where there are golden answers.",
)
@click.argument("file")
def parse(name: str, rules: Rules, file: str) -> None:
    """Read anybody's trajectories: a row of JSON each, and counts by what is wrong.

    FILE is JSONL(.gz) with `text` and perhaps `golden_answers`; - reads standard input.

    \b
      reasonrag parse --format search_r1 trajectories.jsonl.gz > read.jsonl
    """
    from reasonrag.commands import parse as command

    sys.exit(command.parse(name, file, rules=rules))


@cli.command("eval")
@flags.EVALUATION
@flags.DATA
@flags.EXECUTION
@flags.CONFIG
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The report's folder; resumed if there.")
def eval_policies(
    preset: str | None,
    file: Path | None,
    assignments: tuple[str, ...],
    policies: tuple[str, ...],
    temperatures: tuple[float, ...] | None,
    max_steps: tuple[int, ...] | None,
    top_ks: tuple[int, ...] | None,
    rules: Rules,
    formats: tuple[str, ...],
    judge: str | None,
    judge_model: str | None,
    judged: tuple[str, ...] | None,
    out: Path,
    **given: Any,
) -> None:
    """Run policies on questions they have not seen; report metrics with 95 % intervals, and paired differences.

    \b
    Two policies on HotpotQA's dev questions:
      reasonrag eval --dataset hotpotqa --limit 1000 --policy base=hf:Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=hf:policies/dpo/merged --out reports/hotpot
    A base model and an adapter on one vLLM server:
      reasonrag eval --dataset hotpotqa --policy base=http://127.0.0.1:8000/v1#Qwen/Qwen2.5-7B-Instruct \\
          --policy dpo=http://127.0.0.1:8000/v1#dpo --set policy.vllm=true --out reports/hotpot
    Needless and missing searches too (OSR, USR), told by a judge:
      reasonrag eval --preset demo --policy base=demo:hiprag --policy rl=hf:runs/demo/hiprag/best \\
          --judge demo-judge --out reports/hiprag
    In the demo world, greedy and sampled:
      reasonrag eval --preset demo --policy base=demo --policy dpo=hf:runs/demo/dpo --temperature 0,1 --out reports/demo

    Killed or stopped, the same command goes on where it was.
    """
    from reasonrag.commands.evaluate import evaluate

    configs = flags.policy_configs(policies, preset, file, assignments, given, formats)
    judging = flags.judging(judge, judge_model, judged, configs)
    temperatures = flags.temperatures_asked_for(temperatures, configs, assignments)
    sys.exit(evaluate(configs, out, temperatures, max_steps, top_ks, rules, judging))


@cli.group()
def reproduce() -> None:
    """The papers' comparisons at laptop scale, in the demo world, with intervals.

    \b
      reasonrag reproduce reasonrag --out runs/reproduce
    """


_FULL = Scale()


@reproduce.command("reasonrag")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of every stage; resumed if there.")
@click.option("--results", type=click.Path(path_type=Path), help="Where the page goes; OUT/results if not given.")
@click.option("--seeds", type=click.IntRange(1), default=_FULL.seeds, show_default=True, help="Everything once a seed.")
@click.option("--questions", type=click.IntRange(1), default=_FULL.questions, show_default=True, help="Of training.")
@click.option("--iterations", type=click.IntRange(1), default=_FULL.iterations, show_default=True, help="Of a tree.")
@click.option("--test-questions", type=click.IntRange(1), default=_FULL.test_questions, show_default=True)
@click.option("--max-steps", type=click.IntRange(1), help="Of each training at most, to see it run.")
def reproduce_reasonrag(
    out: Path,
    results: Path | None,
    seeds: int,
    questions: int,
    iterations: int,
    test_questions: int,
    max_steps: int | None,
) -> None:
    """Table 3: base, SFT, outcome pairs, no shortest-path term, judge values, rollout values; equal calls.

    \b
    In an hour on two cores:
      reasonrag reproduce reasonrag --out runs/reproduce
    In a few minutes, to see it run:
      reasonrag reproduce reasonrag --out runs/quick --seeds 1 --questions 60 --test-questions 100 --max-steps 20

    Each stage is a command of its own and is shown; the same command goes on where it was stopped.
    """
    from reasonrag.commands import reproduce

    scale = Scale(seeds, questions, iterations, test_questions, max_steps)
    sys.exit(reproduce.reasonrag(out, results or out / "results", scale))


_ABLATIONS = AblationScale()


def _ablations(paper: Paper) -> click.Command:
    """The command of a paper: all of them take the same flags."""
    names = [variant.name for variant in paper.variants]
    text = f"""{paper.title}: {", ".join(names)}; each beside the paper's rows.

    \b
    All of it, two trainings at a time:
      reasonrag reproduce {paper.name} --out runs/{paper.name} --jobs 2
    Some variants, to see it run:
      reasonrag reproduce {paper.name} --out runs/quick --seeds 1 --only {names[0]} \\
          --questions 20 --test-questions 20 --max-steps 2

    Each stage is a command of its own and is shown; the same command goes on where it was stopped, and more seeds may
    be asked for later. The page says which variants are not there yet.
    """

    @reproduce.command(paper.name, help=text, short_help=paper.title)
    @click.option(
        "--out", type=click.Path(path_type=Path), required=True, help="Folder of every stage; resumed if there."
    )
    @click.option("--results", type=click.Path(path_type=Path), help="Where the page goes; OUT/results if not given.")
    @click.option(
        "--seeds",
        type=click.IntRange(1),
        default=_ABLATIONS.seeds,
        show_default=True,
        help="Each does everything once.",
    )
    @click.option("--questions", type=click.IntRange(1), help="Of training; all 600 if not given.")
    @click.option("--test-questions", type=click.IntRange(1), default=_ABLATIONS.test_questions, show_default=True)
    @click.option(
        "--max-steps", type=click.IntRange(1), help="Optimizer steps of each training; the preset's if not given."
    )
    @click.option("--only", multiple=True, type=click.Choice(names), help=f"Run this variant, and {BASE} (repeatable).")
    @click.option(
        "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Commands at a time, one thread each."
    )
    def command(
        out: Path,
        results: Path | None,
        seeds: int,
        questions: int | None,
        test_questions: int,
        max_steps: int | None,
        only: tuple[str, ...],
        jobs: int,
    ) -> None:
        from reasonrag.commands import reproduce as bodies

        scale = AblationScale(seeds, questions, test_questions, max_steps)
        sys.exit(bodies.ablations(paper, out, results or out / "results", scale, only=only, jobs=jobs))

    return command


for _paper in PAPERS.values():
    _ablations(_paper)


@cli.group()
def demo() -> None:
    """The demo world: an invented encyclopedia, its questions, and a tiny policy.

    \b
      reasonrag demo world --out world
    """


@demo.command("world")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for questions and corpus.")
@click.option("--world-seed", type=int, default=0, show_default=True)
def demo_world(out: Path, world_seed: int) -> None:
    """Write the world as FlashRAG files: train, dev and test questions, and the corpus.

    \b
      reasonrag demo world --out world
    """
    from reasonrag.commands import search

    search.write_world(out, world_seed)


@demo.command("policy")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for model and tokenizer.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--formats",
    type=click.Choice(["reasonrag", "stream"]),
    default="reasonrag",
    show_default=True,
    help="stream: one policy for the four formats of a growing turn, from the weights of the other.",
)
def demo_policy(out: Path, seed: int, formats: str) -> None:
    """Train a tiny policy (a quarter of an hour on one core).

    \b
      reasonrag demo policy --out policy --seed 0
      reasonrag build-tree --preset demo --policy hf:policy --out runs/own
    """
    from reasonrag.demo.train import train_policy, train_stream_policy

    (train_stream_policy if formats == "stream" else train_policy)(out, seed=seed, log=click.echo)


@cli.command()
def doctor() -> None:
    """What is installed, which backends would work here, and why the others would not.

    \b
      reasonrag doctor
    """
    from reasonrag.doctor import report

    click.echo(report())


_OF_THE_USER = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


def main() -> None:
    """Run a command: one line for what the user can mend, no traceback."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except ReasonRAGError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _OF_THE_USER:
            raise
        _fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); mend that and run the command again")


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    sys.exit(2)
