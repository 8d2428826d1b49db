"""The commands of the documentation: found in its pages, made small by a table, and run or at least read.

A page is a story: its commands run from top to bottom in one folder. What cannot run here is named with its reason.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import structlog

from reasonrag.cli import cli, main
from reasonrag.core.config import Config, load_config
from reasonrag.core.settings import gather, validate
from reasonrag.online_rl.settings import load_rl_settings
from reasonrag.training.settings import DPO_PRESETS, DPOSettings
from tests import warmed
from tests.e2e import product

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

# Languages of fenced blocks; those of the second line are shown and not run.
RUN = ("bash", "python")
SHOWN = ("text", "json", "yaml", "nginx")

# Commands of others.
NOT_RUN = {
    "vllm serve": "needs a GPU",
    "llama-server": "needs weights in GGUF",
    "pip install": "what CI begins with",
    "make setup": "what CI begins with",
    "vf-eval": "verifiers' own; tests/peers/check_verifiers.py runs it",
    "python -m verl.trainer.main_ppo": "needs GPUs; tests/peers/check_verl.py gives verl's own classes what it reads",
    "python -m papers real": "dozens of commands; tests/papers/test_run_real.py runs it",
    "python -m contrib.verl": "hotpotqa is not here; tests/contrib/test_verl.py exports the demo",
    "python -m contrib.record": "does not end; tests/contrib/test_record.py records",
    "trl dpo": "TRL's own; tests/e2e/test_dataset.py gives it our pairs",
}
# Ours, of which every option, preset and configuration file is read, and nothing run.
READ_ONLY = {
    "accelerate launch": "needs several GPUs",
    "srun": "needs Slurm",
    "reasonrag improve --dataset hotpotqa": "starts vLLM; tests/rounds/test_rounds.py starts a server",
    "reasonrag index serve": "does not end; the fixture `places` serves an index to all pages",
    "reasonrag env serve": "does not end; tests/agents/test_environment.py serves one",
    "reasonrag build-tree --recording": "needs a recorded agent; tests/formats/test_recorded.py has one",
    "reasonrag eval --policy base=hf:Qwen/Qwen2.5-7B-Instruct": "needs GPUs and two indexes of Wikipedia",
    "reasonrag index build --corpus wiki18": "21 million passages from the Hub; retrieval.md runs it on a small corpus",
}

# (flag, what its value looks like, what it becomes; None drops both). The first line that fits counts.
SUBSTITUTES: tuple[tuple[str, str, str | None], ...] = (
    ("--dataset", r"(\w+\.jsonl,)?(nq|popqa|hotpotqa|2wikimultihopqa)(:\w+)?(,\w+)*", r"\1demo\3"),
    ("--index", r"indexes/wiki18", None),  # the demo world's own passages
    ("--encoder", r".+", "{encoder}"),
    ("--policy", r"(\w+=)?https?://[^#]+(#.+)?", r"\1{server}"),
    ("--policy-model", r".+", None),  # the only one
    ("--policy", r"(\w+=)?hf:Qwen/.+", r"\1demo"),
    ("--policy", r"hf:google/.+", "hf:base"),
    ("--policy", r"hf:policies/cold/merged", "extractive"),  # one step of training teaches nothing
    ("--model", r"Qwen/Qwen2.5-3B-Instruct", "{stream_policy}"),
    ("--judge", r"https?://.+", "demo-judge"),
    ("--judge-model", r".+", None),
    ("--retriever-url", r".+", "{retriever}"),
    ("--rollout-url", r".+", None),  # no server of vLLM is here
)
FEW = "--min-examples 1 --min-questions 1"
# What is laid over a command, to make it small: of every line that fits.
ADDED = {
    "reasonrag build-tree": "--limit 6 --iterations 6 --concurrency 8 --set retrieval.cache={cache}",
    "reasonrag build-tree --config configs/hotpotqa-vllm.yaml": (
        "--dataset demo --policy {server} --policy-model reader"
    ),
    "reasonrag build-tree --dataset hotpotqa --limit 100": "--max-tokens 8 --max-unreadable 1",
    "reasonrag build-tree --preset demo --limit 1 --seed 5": "--limit 1 --iterations 8",  # the very tree of the page
    "reasonrag build-tree --preset official": "--policy demo --limit 3 --iterations 24",  # or there is no pair
    "reasonrag eval": "--limit 2",
    "reasonrag improve": "--limit 6 --iterations 6 --rounds 1 --dev-limit 2 --set train.max_steps=1",
    "reasonrag eval --dataset hotpotqa,popqa": "--max-unreadable 1",  # the demo's policy learned other prompts
    "reasonrag eval --dataset demo": "--allow-prompt-mismatch",  # the server of the tests has no folder
    "reasonrag dpo train": f"--model demo --set max_steps=1 --set dtype=float32 {FEW}",
    "reasonrag sft train": f"--model demo --set max_steps=1 --set dtype=float32 {FEW}",
    "reasonrag sft train --examples trajectories": "--model base --min-reward 0",
    "reasonrag eval --dataset dev.jsonl --corpus corpus.jsonl.gz --policy base=hf:base": "--max-tokens 8",
    "reasonrag eval --dataset questions.jsonl --corpus corpus.jsonl.gz --policy base=hf:base": "--max-tokens 8",
    "reasonrag prm train": f"--model demo --set max_steps=1 --set dtype=float32 {FEW}",
    "reasonrag rl plan": "--limit 2 --policy demo:search_p1",  # the server speaks another format
    "reasonrag rl train": (
        "--max-steps 1 --questions-per-step 2 --group-size 2 --batch-size 4 --save-steps 1 --set rollout.minibatches=1 "
        "--set rollout.max_tokens=48 --set validation.limit=2 --set method=full --set device=cpu --set dtype=float32 "
        "--min-questions 1 --no-rollouts-ahead"
    ),
    "reasonrag publish": "--dry-run",
}
DROPPED = ("--open",)
STREAM_POLICIES = {"hiprag": "demo:hiprag", "search-r1": "demo:search_r1"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    behind: str  # the block directly above it, with nothing in between


@dataclass(frozen=True)
class Command:
    """One command of a block: `NAME=VALUE ... WORD ...`."""

    page: str
    line: int
    environment: Mapping[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)

    def begins(self, table: Mapping[str, str]) -> list[str]:
        """The values of the keys of a table that the command begins with."""
        return [value for key, value in table.items() if f"{self} ".startswith(f"{key} ")]

    @property
    def ours(self) -> tuple[str, ...]:
        """What is said to `reasonrag`, whoever launches it; empty if nobody does."""
        return self.words[self.words.index("reasonrag") + 1 :] if "reasonrag" in self.words else ()


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = PAGES[page].read_text(encoding="utf-8")
    ended, above = 0, ""
    for found in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        behind = "" if text[ended : found.start()].strip() else above
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2], behind)
        ended, above = found.end(), found[2]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block, lines joined at their backslashes, comments left out."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        if words := shlex.split(re.sub(r"(^|\s)#.*", "", line)):  # `URL#NAME` is no comment
            count = next((n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
            environment = dict(word.split("=", 1) for word in words[:count])
            yield Command(block.page, block.line, environment, tuple(words[count:]))


def small(command: Command, places: Mapping[str, str]) -> list[str]:
    """What is said to `reasonrag` instead; a dry run stays as it is."""
    words = [word for word in command.ours if word not in DROPPED]
    if "--dry-run" in words and words[0] != "publish":
        return words
    preset = words[words.index("--preset") + 1] if "--preset" in words else ""
    places = {**places, "stream_policy": STREAM_POLICIES.get(preset, "")}
    said: list[str] = []
    while words:
        word = words.pop(0)
        if word.startswith("--") and words and (rule := _rule(word, words[0])):
            value = words.pop(0)
            if rule[2] is not None:
                said += [word, re.sub(rule[1], rule[2], value).format_map(places)]
        else:
            said.append(word)
    return said + " ".join(command.begins(ADDED)).format_map(places).split()


def _rule(flag: str, value: str) -> tuple[str, str, str | None] | None:
    return next((rule for rule in SUBSTITUTES if rule[0] == flag and re.fullmatch(rule[1], value)), None)


def read(words: tuple[str, ...]) -> None:
    """Read a command as the command line does: every option, and the settings of a preset or a configuration file.

    Raises:
        click.ClickException, ConfigError: there is no such command, option, preset, setting or value.
    """
    command: click.Command = cli
    context = click.Context(cli, info_name="reasonrag", **cli.context_settings)
    rest = [re.sub(r"\$\w+", "0", word) for word in words if word != "--help"]  # a number, as a shell puts it in
    while rest and isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=found.name)
    if isinstance(command, click.Group):  # asked for its help
        return
    given = command.make_context(command.name, rest, parent=context.parent).params
    if "assignments" not in given:  # it has no settings
        return
    file, preset = given.get("file"), given.get("preset")
    if file or preset:
        path = ROOT / file if file else None
        if words[:2] in (("rl", "train"), ("env", "serve")):
            load_rl_settings(preset=preset, file=path)
        elif words[:2] == ("dpo", "train"):
            validate(DPOSettings, gather(DPO_PRESETS, preset=preset, file=path))
        else:
            assert isinstance(load_config(preset=preset, file=path), Config)


class Once:
    """Runs commands. One that is equal to an earlier one but for its paths is not run again: its result is copied."""

    def __init__(self) -> None:
        self._ran: dict[str, tuple[str, Path]] = {}  # what was printed, and the result, by command
        self._made: dict[Path, str] = {}  # the command that made a file or folder

    def __call__(self, words: list[str], folder: Path, **environment: str) -> str:
        """Run a command of a page in its folder, or copy its result; return what it printed."""
        if "--out" not in words:
            return reasonrag(folder, *words, **environment)
        place = words.index("--out")
        out = folder / words[place + 1]
        parts = [self._by_origin(word, folder) for word in words[:place] + words[place + 2 :]]
        key = str(sorted(" ".join(parts).split(" --")))
        if key in self._ran and not out.exists():
            self.copy(self._ran[key][1], out)
        else:
            self._ran[key] = (reasonrag(folder, *words, **environment), out)
        self._made[out.resolve()] = key
        return self._ran[key][0]

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file or folder, which stays known as the result of its command."""
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        if source.resolve() in self._made:
            self._made[target.resolve()] = self._made[source.resolve()]

    def _by_origin(self, word: str, folder: Path) -> str:
        """Return a word with the command that made the path in it, instead of the path."""
        name = re.split(r"=|hf:", word)[-1]
        path = (folder / name).resolve()
        for parent in (path, *path.parents):
            if parent in self._made:
                return word.replace(name, f"{self._made[parent]}/{path.relative_to(parent)}")
        return word


def reasonrag(folder: Path, *words: str, **environment: str) -> str:
    """Run a command in a folder, a training in a process of its own; what it printed."""
    variables = product.environment(**environment)
    if words[1:2] == ("train",):
        done = warmed.run(run_in, str(folder), *words, environment=variables)
        code, stdout, stderr = done.returncode, done.stdout, done.stderr
    else:
        code, stdout, stderr = run_here(folder, words, variables)
    assert code == 0, f"reasonrag {shlex.join(words)}\n{stdout}\n{stderr}"
    return stdout


def run_here(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """What the `reasonrag` script does in a folder, in this process: exit code, stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before, argv, interrupt = dict(os.environ), sys.argv, signal.getsignal(signal.SIGINT)
    try:
        sys.argv = ["reasonrag", *words]
        os.environ.update(environment)
        with contextlib.chdir(folder), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, interrupt)
        os.environ.clear()
        os.environ.update(before)
        structlog.reset_defaults()
    return code, stdout.getvalue(), stderr.getvalue()


def run_in(folder: str, *words: str) -> None:
    """The same in a process of its own."""
    os.chdir(folder)
    warmed.reasonrag(*words)


def python_in(folder: str, code: str) -> None:
    """Run a block of Python in a folder; in a process of its own."""
    os.chdir(folder)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
