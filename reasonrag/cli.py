"""The `reasonrag` command: the list of commands, each imported when it is needed, exit codes, and redacted output.

Exit codes: 0; 2 for bad input; 1 if more than `--max-failed` of the questions failed; 130 after Ctrl-C, 143 after
SIGTERM, both with all finished work kept.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TextIO, cast

import click

from reasonrag import __version__
from reasonrag.core.errors import InputError, ReasonRAGError
from reasonrag.core.secrets import redact

# The module of `reasonrag.commands` and the line of `reasonrag --help` of each command.
COMMANDS = {
    "build-tree": ("trees", "Search trees over agentic-RAG steps and write preference pairs."),
    "pairs": ("trees", "Derive the pairs of a finished run again, without model calls."),
    "dpo": ("train", "Train a policy on preference pairs (DPO, with TRL)."),
    "sft": ("train", "Fine-tune a policy on the chosen steps of pairs (SFT, with TRL)."),
    "prm": ("train", "Train a process reward model on the steps of trees."),
    "rl": ("rl", "Train a policy online on rollouts (GRPO, with TRL)."),
    "eval": ("evaluate", "Evaluate policies on held-out questions, with 95 % intervals."),
    "report": ("inspect", "Write HTML pages about a run, a training run or an evaluation."),
    "show": ("inspect", "Print the tree of one question."),
    "stats": ("inspect", "Print the numbers of a run: nodes, pairs, calls, cost, failures."),
    "graph": ("inspect", "Write trees as GraphML or node-link JSON."),
    "export": ("inspect", "Write the data of a run in the format of another tool."),
    "import": ("inspect", "Import preference pairs from another tool."),
    "publish": ("publish", "Publish a data set or a policy on the Hugging Face Hub."),
    "index": ("index", "Build, serve and check search indexes."),
    "env": ("agents", "Serve the rollout engine as an environment that other trainers train on."),
    "record": ("agents", "Record the model calls of an agent, through a proxy."),
    "parse": ("parse", "Parse trajectories from any source with one of the formats."),
    "demo": ("demo", "Write the questions and the corpus of the demo world."),
    "reproduce": ("reproduce", "Repeat the papers' comparisons at laptop scale."),
    "doctor": ("doctor", "Print what is installed and which backends work on this machine."),
}
# Errors that the user can fix: a full disk, a read-only folder, a wrong path.
_FIXABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


class LazyGroup(click.Group):
    """A group that imports the module of a command only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"reasonrag.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Process rewards for agentic RAG: from questions and a corpus to preference data and trained policies.

    \b
    Try everything without a GPU or a network:
      reasonrag build-tree --preset demo --limit 20
    """


class Redacted:
    """A stream that replaces secrets by `***`, whoever writes: this package, a log, a library, a traceback."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text redacted. A secret is found only if one call holds all of it."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write bytes to it if the encoding is ASCII
            raise AttributeError("no bytes: they would not be redacted")
        return getattr(self._stream, name)


def main() -> None:
    """Run a command. What the user can fix is reported in one line, without a traceback."""
    # Until a run handles signals itself there is nothing to keep. A library's bare `except` could swallow a
    # KeyboardInterrupt while it is being imported, so the process ends here.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Never restored: the interpreter prints an uncaught exception after this function has returned.
    sys.stdout, sys.stderr = cast(TextIO, Redacted(sys.stdout)), cast(TextIO, Redacted(sys.stderr))
    try:
        cli(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except click.Abort:
        sys.exit(130)
    except InputError as error:
        _fail(str(error), add=error.add)
    except ReasonRAGError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _FIXABLE:
            raise
        _fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); fix that and run the command again")


def _fail(message: str, *, add: str = "") -> NoReturn:
    from reasonrag.core.text import printable

    click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    if add:
        from reasonrag.commands.console import this_command

        click.echo(f"try: {this_command()} {add}", err=True)
    sys.exit(2)
