"""The `reasonrag` command: the list of commands, each imported when it is needed, exit codes, and redacted output.

Exit codes: 0; 2 for bad input; 1 if more than `--max-failed` of the questions failed, or
`verify` found a problem; 75 (EX_TEMPFAIL) if nothing in a run got on for `run.stall_s`;
130 after Ctrl-C, 143 after SIGTERM; the last three with all finished work kept.
"""

from __future__ import annotations

import importlib
import io
import os
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TextIO, cast

import click

from reasonrag import __version__
from reasonrag.core.errors import EX_TEMPFAIL, ReasonRAGError, Stalled, check_limits
from reasonrag.core.event_loop import end_on_signals
from reasonrag.core.text import printable, redact

# The function in `reasonrag.commands` and the line of `reasonrag --help` of each command.
COMMANDS = {
    "build-tree": ("trees.build_tree", "Search trees over agentic-RAG steps and write preference pairs."),
    "pairs": ("trees.pairs", "Derive the pairs of a finished run again, without model calls."),
    "dpo": ("train.dpo", "Train a policy on preference pairs (DPO, with TRL)."),
    "sft": ("train.sft", "Fine-tune a policy on the chosen steps of pairs (SFT, with TRL)."),
    "prm": ("train.prm", "Train a process reward model on the steps of trees."),
    "improve": ("improve.improve", "Improve a policy in rounds of trees, training and evaluation."),
    "rl": ("train.rl", "Train a policy online on rollouts (GRPO, with TRL)."),
    "eval": ("evaluate.evaluate", "Evaluate policies on held-out questions, with 95 % intervals."),
    "report": ("inspect.report", "Write HTML pages about a run, a training run or an evaluation."),
    "show": ("inspect.show", "Print the numbers of a run, or the tree of one question."),
    "verify": ("inspect.verify", "Check a run, tables, an index, a model; or what works on this machine."),
    "export": ("inspect.export", "Write the data of a run in the format of another tool."),
    "publish": ("publish.publish", "Publish a data set or a policy on the Hugging Face Hub."),
    "index": ("index.index", "Build and serve search indexes, and measure their recall."),
    "env": ("train.env", "Serve the rollout engine as an environment that other trainers train on."),
}

_FILES, _FEWEST = 10_240, 32  # macOS allows no more


class LazyGroup(click.Group):
    """A group that imports the module of a command only to run it or to show its help."""

    verbose: ClassVar[bool] = False  # whether `_fail` prints tracebacks

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    # The table has the help lines, so that `reasonrag --help` imports no command at all.
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(".")
        command: click.Command = getattr(importlib.import_module(f"reasonrag.commands.{module}"), function)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take --quiet and --verbose behind the command, too."""
        words = ("--quiet", "--verbose")
        return super().parse_args(ctx, [*({*words} & {*args}), *(word for word in args if word not in words)])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    commands={name: click.Command(name) for name in COMMANDS},  # by which click suggests a name
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__)
@click.option("-q", "--quiet", is_flag=True, help="Print results, warnings and errors, but no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Print errors with their traceback.")
def cli(quiet: bool, verbose: bool) -> None:
    """Process rewards for agentic RAG: from questions and a corpus to preference data and trained policies.

    \b
    Try everything without a GPU or a network:
      reasonrag build-tree --preset demo --limit 20
    """
    LazyGroup.verbose = verbose


class Redacted:
    """A stream that replaces secrets by `***`, whoever writes: this package, a log, a library, a traceback.

    A reader that has gone (`| head`) ends no work: what follows goes nowhere, and `closed` is True.

    Args:
        stream: the real stream.
        lost: the errors of the stream after which it is given up; others are raised.
    """

    def __init__(self, stream: TextIO, lost: type[OSError] = BrokenPipeError) -> None:
        self._stream, self._lost, self._given_up = stream, lost, False

    @property
    def closed(self) -> bool:
        """Whether nothing that is written reaches anybody."""
        return self._given_up or self._stream.closed

    def write(self, text: str | bytes) -> int:
        """Write the text redacted. A secret is found only if one call holds all of it."""
        if isinstance(text, bytes):  # click's shell completion
            if not text:  # by which click asks
                raise TypeError("this is no binary stream")
            text = text.decode()
        with self._giving_up():
            self._stream.write(redact(text))
        return len(text)

    def flush(self) -> None:
        with self._giving_up():
            self._stream.flush()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except self._lost:
            self._given_up = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # buffered text still has a destination
            os.close(nowhere)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write bytes to it if the encoding is ASCII
            raise AttributeError("no bytes: they would not be redacted")
        return getattr(self._stream, name)


def main() -> None:
    """Run a command. What the user can fix is reported in one line, without a traceback."""
    # In this order: signals may come at any time, and an
    # error of the next lines is printed through the streams.
    end_on_signals()
    _prepare_streams()
    _allow_files()
    if sys.flags.optimize > 1:
        _fail("Python runs with -OO (PYTHONOPTIMIZE=2), without the docstrings that transformers reads; unset that")
    try:
        Path.cwd()
    except OSError:  # Intel's MKL would end the process, and blame a library
        _fail("the working folder was deleted: go to another one")
    Stalled.ends_process = True
    try:
        try:
            cli(standalone_mode=False)
        except Exception as error:
            reason: BaseException | None = error
            while isinstance(reason, Exception):  # an error while a loop is closed hides the cause
                check_limits(reason)
                reason = None if isinstance(error, ReasonRAGError) else reason.__context__
            raise
        finally:
            Stalled.ends_process = False  # who calls this in a process of its own goes on
            sys.stdout.flush()  # a full disk is an error of this command, and none of the interpreter's end
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:  # Ctrl-C at a prompt
        sys.exit(130)
    except ReasonRAGError as error:
        _fail(str(error), add=error.add, code=EX_TEMPFAIL if isinstance(error, Stalled) else 2)
    except OSError as error:
        if error.strerror is None:  # not the system's: a full disk, a read-only folder, a wrong path, a lost disk
            raise
        what = error.filename or "the working folder or a file"
        _fail(f"{what} cannot be used ({error.strerror}); fix that and run the command again")
    except RecursionError:
        _fail("something in the input is nested too deeply to be read; no question, passage or setting needs that")
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code called sys.exit, or raised CancelledError
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("reasonrag", "click", "asyncio"):
            raise
        kind, place = type(error).__name__, f"{frame.f_code.co_filename}:{line}"
        _fail(f"the command was ended by {place} ({kind}); let it raise an exception or return instead")


def _allow_files() -> None:
    """Let this process open as many files as its user may: each connection is one, and 256 or 1,024 are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if most < _FEWEST:  # uvloop would end the process
        _fail(f"too many open files: this process may have {most}, and needs {_FEWEST}; raise `ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _prepare_streams() -> None:
    """Let the standard streams take any text, without secrets. The interpreter prints uncaught errors to them, too."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed (`>&-`): the next file that is opened would be given its number
            setattr(sys, name, Path(os.devnull).open("w" if number else "r"))  # noqa: SIM115 -- for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whoever calls `main` may have put another stream there
            stream.reconfigure(errors="backslashreplace")  # ASCII has no accents
    sys.stdout = cast(TextIO, Redacted(sys.stdout))
    sys.stderr = cast(TextIO, Redacted(sys.stderr, lost=OSError))  # a full disk under a log ends no run


def _fail(message: str, *, add: str = "", code: int = 2) -> NoReturn:
    if LazyGroup.verbose and sys.exc_info()[0]:
        click.echo("\n".join(map(printable, traceback.format_exc().splitlines())), err=True)
    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    if add:
        from reasonrag.commands.console import this_command

        click.echo(f"try: {this_command()} {add}", err=True)
    sys.exit(code)
