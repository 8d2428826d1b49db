"""`eval` and `reproduce`: how good policies are, and what the papers say of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reasonrag import flags
from reasonrag.cli.root import cli
from reasonrag.core.text import Rules
from reasonrag.reproduce.ablation import BASE, AblationScale, Paper
from reasonrag.reproduce.papers import PAPERS
from reasonrag.reproduce.reasonrag import VARIANTS, Scale


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
    from reasonrag.evaluation.run import Evaluation

    configs = flags.policy_configs(policies, preset, file, assignments, given, formats)
    judging = flags.judging(judge, judge_model, judged, configs)
    temperatures = flags.temperatures_asked_for(temperatures, configs, assignments)
    evaluation = Evaluation(
        configs, out, temperatures=temperatures, max_steps=max_steps, top_ks=top_ks, rules=rules, judging=judging
    )
    sys.exit(evaluate(evaluation))


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
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([name for name in VARIANTS if name != BASE]),
    help=f"Train this variant, and compare it with {BASE} (repeatable).",
)
def reproduce_reasonrag(
    out: Path,
    results: Path | None,
    seeds: int,
    questions: int,
    iterations: int,
    test_questions: int,
    max_steps: int | None,
    only: tuple[str, ...],
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

    scale = Scale(seeds, questions, iterations, test_questions, max_steps, only)
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
