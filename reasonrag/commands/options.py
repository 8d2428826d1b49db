"""Command-line options, most of them read from `options.json`: there each setting with a flag has its type and help.

`python -m docs.reference` writes that file from the settings models, so `--help` imports none of them.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import click

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import WHOLE, Shard

F = TypeVar("F", bound=Callable[..., Any])
TABLE = Path(__file__).with_name("options.json")
TYPES = {"text": click.STRING, "integer": click.INT, "number": click.FLOAT, "boolean": click.BOOL}


class _Path(click.Path):
    """A path, with the `~` written out that a shell leaves in `--out=~/x`; of an unknown user it is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from reasonrag.core.settings import named_path

        return named_path(os.fsdecode(super().convert(value, param, ctx)))


PATH = _Path()


@cache
def table() -> dict[str, Any]:
    """Return `options.json`: flags by model and setting, presets by model."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


class Command(click.Command):
    """A command whose `--help` shows the usual options, one sentence each; `--help-all` shows all of them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with `--help-all`."""
        parameters = super().get_params(ctx)  # the last one is --help
        return [*parameters[:-1], _HELP_ALL, parameters[-1]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that are asked for."""
        show_all, rows = ctx.meta.get("help_all", False), []
        for option in map(copy.copy, self.get_params(ctx)):  # the command is shared by all calls in this process
            if isinstance(option, click.Option):
                option.hidden &= not show_all
                if row := option.get_help_record(ctx):
                    rows.append(row if show_all else (row[0], first_sentence(row[1])))
        with formatter.section("Options"):
            formatter.write_dl(rows)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


command = partial(click.command, cls=Command)


def _show_all(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options, with their whole descriptions.",
)


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text and the default of its setting.

    >>> first_sentence("Passages per search. A request may ask for more.  [retrieval.top_k; default: 3]")
    'Passages per search.  [default: 3]'
    """
    sentence = re.split(r"(?<=\.) (?=[A-Z`])|  \[", text)[0]
    default = re.search(r"  \[.*(default: .+\])$", text)
    return f"{sentence}  [{default[1]}" if default else sentence


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Add several options, which `--help` shows in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):  # the decorator next to a function is applied first
            function = option(function)
        return function

    return decorate


def rare(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Add several options that only `--help-all` shows."""

    def decorate(function: F) -> F:
        before = len(getattr(function, "__click_params__", ()))
        function = together(*options)(function)
        for option in function.__click_params__[before:]:  # type: ignore[attr-defined]
            option.hidden = True
        return function

    return decorate


def settings(model: str, *keys: str, show_keys: bool = True) -> Callable[[F], F]:
    """Add the options that set some settings of a model, in this order.

    Args:
        model: name of the model in `options.json`.
        keys: dotted names of settings; a section stands for all of its settings that have a flag.
        show_keys: end each help text with the name of the setting. Without it, an option's parameter has
            the last part of that name, for commands that do not read the model itself.
    """
    # A table in JSON, because the models need pydantic, which takes longer to import than `--help` may.
    flags = table()["flags"][model]
    options: list[Callable[[Any], Any]] = []
    for key in keys:
        names = [name for name in flags if name == key or name.startswith(f"{key}.")]
        options += [_option(name, flags[name], show_keys) for name in names]
    return together(*options)


def flag_help(model: str, key: str) -> str:
    """Return the help text of a setting's flag, for an option that takes the same value in another way."""
    return str(table()["flags"][model][key]["help"])


def out(help: str, *, required: bool = True) -> Callable[[F], F]:
    """Add `--out`; `help` describes what is written there."""
    return click.option("--out", type=PATH, required=required, help=f"Where to write. {help}")


def _option(key: str, flag: Mapping[str, Any], show_key: bool) -> Callable[[F], F]:
    kind = flag["type"]
    # click passes options as arguments, whose names have
    # no dots: "search__iterations" for search.iterations.
    parameter = key.replace(".", "__") if show_key else key.rpartition(".")[2]
    several = flag.get("several", False)
    is_alone = key.rpartition(".")[2] in ("dataset", "corpus", "data")
    return click.option(
        flag["flag"],
        parameter,
        type=TYPES[kind] if isinstance(kind, str) else click.Choice(kind),
        is_flag=kind == "boolean",
        help=flag["help"] + (f"  [{key}{flag['default']}]" if show_key else ""),
        **_ONCE if is_alone and not several else {"multiple": several},
        default=None,  # not that of the setting: a flag that is not given must not win over a file or a preset
    )


def _only_one(ctx: click.Context, option: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Refuse a second data set or corpus: of other flags the last one counts, and here people mean both."""
    if values[1:]:
        problem = f"{option.opts[0]} is given {len(values)} times, and only the last one would count"
        raise click.UsageError(f"{problem}; give it once (several data sets with commas between them)", ctx)
    return values[0] if values else None


_ONCE: dict[str, Any] = {"multiple": True, "callback": _only_one}


def configuration(model: str) -> Callable[[F], F]:
    """Add `--preset` if the model has presets, `--config` and `--set`."""
    presets = table()["presets"].get(model)
    preset = click.option("--preset", type=click.Choice(presets or ()), help="A named set of settings to start from.")
    return together(
        *([preset] if presets else []),
        click.option("--config", "file", type=PATH, help="A YAML file of settings; flags override it.", **_ONCE),
        click.option(
            "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other setting (repeatable)."
        ),
    )


def given_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the flags that were given, by their dotted names; refuse an empty text."""
    settings = {name.replace("__", "."): value for name, value in given.items() if value not in (None, ())}
    for name, value in settings.items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise ConfigError(
                f"{name} is given as an empty text, as an unset variable of a shell is; leave the flag out"
            )
    return settings


def sources(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `settings` and `configuration` as the arguments `preset`, `file` and `overrides`."""
    from reasonrag.core.settings import parse_assignment

    preset, file, assignments = given.pop("preset", None), given.pop("file"), given.pop("assignments")
    overrides = dict(map(parse_assignment, assignments)) | given_settings(given)  # flags win over --set
    return {"file": file, "overrides": overrides} | ({"preset": preset} if preset else {})


class Several(click.ParamType):  # type: ignore[type-arg]
    """One or several values with commas between them: `0,1` or `osr,usr`.

    Args:
        convert: makes a value of one part; a ValueError refuses it.
        name: the kind of part, for help and errors.
    """

    def __init__(self, convert: Callable[[str], Any], name: str) -> None:
        self._convert, self.name = convert, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a tuple without repetitions: `(0.0, 1.0)` for `"0,1"`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._convert(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is not one {self.name} or several with commas between them", param, ctx)


# --- Options of several commands that set no setting ---

DRY_RUN = click.option(
    "--dry-run", is_flag=True, help="Only print what the command would do; call no model, send nothing."
)
SHARD = click.option(
    "--shard",
    metavar="I/S",
    callback=lambda context, option, text: Shard.parse(text) if text else WHOLE,
    help="Do only part I, counted from 0, of S parts of the work, together with other machines that see --out. The "
    "last part to finish puts them together.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
