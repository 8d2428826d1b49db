"""`report`, `show`, `verify`, `export`: look at a finished folder, export its data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reasonrag.commands.options import JSON, PATH, command, out, settings
from reasonrag.core.errors import ConfigError
from reasonrag.core.text import one_line, printable

RUN = click.argument("run", type=PATH)
_FORMS = ("trl", "llamafactory", "verl", "search-r1", "jsonl", "graphml", "flashrag")


@command()
@click.argument("folder", type=PATH)
@out("A folder (default: FOLDER/report).", required=False)
@click.option("--open", "in_browser", is_flag=True, help="Open the first page in a browser.")
def report(folder: Path, out: Path | None, in_browser: bool) -> None:
    """Write HTML pages about a run, a training run or an evaluation. They open from disk.

    \b
    A run: its settings and numbers, and every question with its tree (500 of a larger run):
      reasonrag report runs/hotpot --open
    A training run: its curves and, of `rl train`, every rollout with its reward and the reason for it:
      reasonrag report policies/rl
    An evaluation: the policies compared, and the questions on which they differ:
      reasonrag report reports/hotpot
    """
    import webbrowser

    from reasonrag.report import write_report

    page = write_report(folder, out)
    print(printable(f"report: {page}"))
    if in_browser:
        webbrowser.open(page.resolve().as_uri())


@command()
@RUN
@click.argument("question", required=False)
@click.option("--depth", type=click.IntRange(min=1), help="Steps from the question that are shown (default: all).")
@click.option("--best", is_flag=True, help="Show the best path and its siblings only.")
@out("An SVG picture of the tree; nothing is printed then.", required=False)
@JSON
def show(run: Path, question: str | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Print the numbers of a run, or the tree of the question with the id QUESTION.

    Numbers: nodes, pairs by type and depth, margins, lengths, calls, cost. Tree: visits,
    values, SPRE, the best path, and which step is preferred to which.
    With --depth, --best or --out and no QUESTION it is the first tree.

    \b
      reasonrag show runs/hotpot
      reasonrag show runs/hotpot --best
      reasonrag show runs/hotpot 5a8b57f25542995d1e6f1371 --best
      reasonrag show runs/hotpot 5a8b57f25542995d1e6f1371 --best --out tree.svg
    """
    from reasonrag.commands.console import table_console
    from reasonrag.report import terminal
    from reasonrag.report.trees import tree_of
    from reasonrag.storage.files import write_text
    from reasonrag.storage.folder import read_run

    question = question and os.fsencode(question).decode(errors="replace")  # an ASCII locale leaves it as bytes
    of_tree = question is not None or out is not None or any(given.values())
    if as_json and not of_tree:
        print(json.dumps(read_run(run)[1], indent=2, allow_nan=False))
    elif not of_tree:
        table_console().print(terminal.tables(read_run(run)[1]))
    elif as_json:
        if out is not None or any(given.values()):
            raise ConfigError("--json prints the whole tree; leave --out, --depth and --best out")
        tree = tree_of(run, question)
        print(json.dumps({"nodes": tree.nodes, "pairs": tree.pairs}, indent=2, allow_nan=False))
    elif out and out.suffix.lower() not in ("", ".svg"):
        raise ConfigError(f"the picture is SVG, and {out} is named otherwise; choose a name in .svg for --out")
    elif out is None:
        table_console().print(terminal.drawing(tree_of(run, question), **given))
    elif out.exists() and (not out.is_file() or not out.read_bytes().startswith(b"<svg")):
        raise ConfigError(f"{out} exists and is no picture; choose another name for --out")
    else:
        write_text(out, terminal.picture(tree_of(run, question), **given) + "\n")


@command()
@RUN
@click.option("--to", "form", type=click.Choice(_FORMS), required=True, help="Tool to write for.")
@click.option(
    "--tokenizer", metavar="MODEL", help="Model with the chat template that renders texts (default: the run's policy)."
)
@settings("Config", "format.prompts", show_keys=False)
@out("A folder.")
def export(run: Path, form: str, out: Path, **given: str | None) -> None:
    """Write the data of a run in the format of another tool.

    TRL reads RUN/pairs without an export if the format is reasonrag. In other formats a prompt may end
    with an open turn, which TRL would close: train on what --to trl writes.

    \b
    Preference files and dataset_info.json for LLaMA-Factory:
      reasonrag export runs/hotpot --to llamafactory --out data
    Questions for RL, in Search-R1's format:
      reasonrag export runs/hotpot --to verl --out data
    Trees as graphs, for Gephi, yEd, Cytoscape and networkx.read_graphml:
      reasonrag export runs/hotpot --to graphml --out graphs
    The demo world's questions and corpus as FlashRAG's files:
      reasonrag export demo --to flashrag --out world
    """
    import inspect

    from reasonrag.commands.console import log_plainly
    from reasonrag.demo.world import write_world
    from reasonrag.publish.exporters import EXPORTERS

    log_plainly()
    if str(run) == "demo" and form != "flashrag":
        raise ConfigError(f"the demo world has no run to export with --to {form}; use --to flashrag")
    tool: Callable[..., Mapping[str, int]] = {**EXPORTERS, "flashrag": write_world}[form]
    # Tools need different options. One that is given and not
    # taken is refused, or it would be ignored in silence.
    chosen = {name: value for name, value in given.items() if value is not None}
    if unused := chosen.keys() - inspect.signature(tool).parameters.keys():
        raise ConfigError(f"--{min(unused)} has no meaning for --to {form}; leave it out")
    rows = ", ".join(f"{name} {count:,}" for name, count in tool(run, out, **chosen).items())
    print(printable(f"rows: {rows}\ndata: {out}"))


@command()
@click.argument("paths", type=PATH, nargs=-1)
@JSON
def verify(paths: tuple[Path, ...], as_json: bool) -> None:
    """Check files on disk: checksums, tables, trees, pairs, splits, numbers, weights. Without PATHS, this machine.

    A run, Parquet files or a folder of them, an index, a model or a training run. Prints a line for each
    kind of thing that was checked, or one for each problem. Exits with 1 if there is any problem, and
    with 2 if a path holds nothing that can be checked. Without PATHS it prints the installed versions and
    which models work on this machine.

    \b
      reasonrag verify runs/hotpot policies/dpo indexes/mine
      reasonrag verify pairs.parquet --json
      reasonrag verify
    """
    if not paths:
        _print_installation()
        return
    from reasonrag.publish.verify import verify as verify_path

    checks, problems = {}, 0
    for path in paths:
        checks[str(path)] = of_path = verify_path(path).checks
        for what, check in of_path.items():
            problems += len(check.problems)
            state = "ok" if check.count else "not checked"
            lines = [f"problem: {path}: {problem}" for problem in check.problems]
            for line in [] if as_json else lines or [f"{state}: {path}: {what}: {check.count:,}"]:
                print(printable(one_line(line)))
    if as_json:
        plain = {path: {what: asdict(check) for what, check in of.items()} for path, of in checks.items()}
        print(json.dumps(plain, indent=2, allow_nan=False))
    sys.exit(int(problems > 0))


_PACKAGES = (
    *("pyarrow", "pydantic", "datasets", "bm25s", "faiss-cpu", "sentence-transformers", "uvicorn"),
    *("torch", "transformers", "trl", "peft", "accelerate", "vllm"),
)


def _print_installation() -> None:
    """Print the installed versions, and whether models can use a GPU."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from reasonrag import __version__
    from reasonrag.pipeline.parts import has_gpu

    print(f"reasonrag {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in _PACKAGES:
        try:
            print(f"  {name} {version(name)}")
        except PackageNotFoundError:
            print(f"  {name} missing")
    try:
        print(f"  GPU: {'yes' if has_gpu() else 'none that torch can use'}")
    except Exception:  # a broken installation of torch may raise anything on import, and a diagnosis has to survive it
        print("  GPU: torch cannot be imported")
