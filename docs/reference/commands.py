"""`cli.md`: the `--help` of every command."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import click

from docs.reference.markdown import NOTE
from reasonrag.cli import cli

_WIDTH = 100


def cli_page() -> str:
    """`--help` of every command."""
    lines = [
        "# Command line reference",
        "",
        NOTE,
        "```bash",
        "reasonrag --help",
        "```",
        "",
        "`--help` shows the options that people use, and `--help-all` every option with the [setting](settings.md)",
        "that it sets. `--set NAME=VALUE` and the file of `--config` set all others. Exit codes: 0; 2 for bad input; 1",
        "if more than `--max-failed` of the questions failed, or `verify` found a problem; 75 if nothing",
        "in a run got on for `run.stall_s`; 130 after Ctrl-C and 143 after SIGTERM; the last three with all finished",
        "work kept.",
    ]
    for path, command in commands(cli, ("reasonrag",)):
        lines += ["", f"## {' '.join(path)}", "", "```text", _help(path, command), "```"]
    return "\n".join(lines) + "\n"


def flags(command: click.Command) -> list[click.Option]:
    """Return the options of a command, without `--version`."""
    return [item for item in command.params if isinstance(item, click.Option) and item.name != "version"]


def meaning(option: click.Option) -> str:
    """Return the first sentence of an option's help, without the default, "(repeatable)" and the name of the setting.

    >>> meaning(click.Option(["--top-k"], help="Passages per search (default: 3). A request may ask more.  [k]"))
    'Passages per search.'
    """
    text = re.sub(r"  \[[^]]+\]$", "", option.help or "")
    text = re.sub(r" \((?:repeatable|default)[^)]*\)", "", text)
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0]


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below one, with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


def _help(path: tuple[str, ...], command: click.Command) -> str:
    # click keeps the help option of the first context of a command, whose names may be others than those of `cli`.
    command = copy.copy(command)
    command._help_option = None
    settings = {**cli.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, info_name=" ".join(path), **settings)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
