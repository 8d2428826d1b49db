"""`publish`: the data of a run or a trained policy to the Hugging Face Hub."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reasonrag.commands.options import DRY_RUN, PATH, command
from reasonrag.core.text import printable

if TYPE_CHECKING:
    from reasonrag.publish.publish import PublishOptions, Staged

_MOST_FINDINGS = 20


@command()
@click.argument("path", type=PATH)
@click.option("--repo-id", required=True, help="Repository on the Hub, OWNER/NAME; created as private if it is new.")
@click.option("--public", is_flag=True, help="Make a new repository public, or publish to one that is public.")
@click.option("--tag", metavar="vX.Y.Z", help="Tag of this version (default: the next version).")
@DRY_RUN
@click.option(
    "--license", "licence", metavar="ID", help="Licence as the Hub abbreviates it (default: that of the sources)."
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["email", "path"]),
    help="Publish although e-mail addresses or machine paths were found; look at them first (repeatable).",
)
@click.option("--eval", "report", type=PATH, help="Folder of an evaluation; its metrics go on the card of a policy.")
def publish(path: Path, dry_run: bool, allow: tuple[str, ...], **given: Any) -> None:
    """Publish the data of a run, or a trained policy, on the Hugging Face Hub.

    All files are searched for secrets first. The repository
    is private unless --public is given, and gets a card.

    \b
    See first what would be uploaded:
      reasonrag publish runs/hotpot --repo-id me/hotpot-steps --dry-run
    Pairs and trees, as a private data set:
      reasonrag publish runs/hotpot --repo-id me/hotpot-steps
    A policy with its metrics, public:
      reasonrag publish policies/dpo --repo-id me/dpo --eval reports/hotpot --license apache-2.0 --public

    The token is that of `hf auth login`, or HF_TOKEN. What others wrote into the card is kept.
    """
    from reasonrag.commands.console import error_console, this_command
    from reasonrag.publish.publish import PublishOptions, check, stage, staging_folder
    from reasonrag.storage.files import lock, reading

    options = PublishOptions(allow=frozenset(allow), **given)
    check(path, options)
    for number in (signal.SIGINT, signal.SIGTERM):  # after staged files are deleted; a second one ends it at once
        signal.signal(number, _stop)
    console = error_console()
    if dry_run:
        with reading(path), tempfile.TemporaryDirectory() as folder:
            _print_staged(stage(path, Path(folder), options), options)
        return
    from reasonrag.publish.hub import push

    try:
        with lock(path / ".lock"), staging_folder(path) as folder:
            staged = stage(path, folder, options)
            _print_findings(staged)
            staged.check(options.allow)
            done = push(staged.upload, log=lambda line: console.print(printable(line)))
    except SystemExit:
        console.print(f"stopped; what the Hub has is not sent again. Resume with:\n  {this_command()}")
        raise
    visibility = "private" if done.private else "public"
    print(printable(f"{done.url}, {done.tag}, {visibility}" + ("" if done.changed else "; it was there already")))


def _print_staged(staged: Staged, options: PublishOptions) -> None:
    """Print what would be uploaded; send nothing."""
    for name, size in staged.files.items():
        print(printable(f"{size:>14,}  {name}"))
    others = "a private repository stays private" if options.public else "a public one is refused without --public"
    print(f"visibility: {options.repo_id} would be {'public' if options.public else 'private'} if it is new; {others}")
    print(printable(f"licence: {staged.licence}"))
    _print_findings(staged)
    if not staged.findings:
        print("search: no secrets, machine paths or e-mail addresses")
    staged.check(options.allow)


def _stop(number: int, frame: object) -> None:
    # Without this, a second signal would wait for the file that is being uploaded.
    signal.signal(number, lambda number, frame: os._exit(128 + number))
    sys.exit(128 + number)


def _print_findings(staged: Staged) -> None:
    if staged.warning:
        print(printable(f"warning: {staged.warning}"))
    for finding in staged.findings[:_MOST_FINDINGS]:
        print(printable(f"found: {finding}"))
    if len(staged.findings) > _MOST_FINDINGS:
        print(f"found: {len(staged.findings) - _MOST_FINDINGS:,} more")
