"""`publish`: a run's data or a trained policy to the HF Hub."""

from __future__ import annotations

from pathlib import Path

import click

from reasonrag.cli.root import cli


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--repo-id", required=True, help="OWNER/NAME on the Hub; created, private, if it is not there.")
@click.option("--public", is_flag=True, help="Let everybody see it; needed, too, if the repository is public.")
@click.option("--tag", metavar="vX.Y.Z", help="Of this version; the next one if not given.")
@click.option("--dry-run", is_flag=True, help="Write what would go up into --out; send nothing.")
@click.option("--out", type=click.Path(path_type=Path), help="A new folder, for --dry-run.")
@click.option("--license", "licence", metavar="ID", help="As the Hub abbreviates it; that of the sources if not given.")
@click.option("--allow", multiple=True, type=click.Choice(["email", "path"]), help="Publish these, looked at before.")
@click.option("--without-trees", is_flag=True, help="Of a run: its pairs alone.")
@click.option("--merged", is_flag=True, help="Of an adapter: merged into its model.")
@click.option("--eval", "report", type=click.Path(path_type=Path), help="Of a policy: a report, for its card.")
@click.option("--policy", "name", help="Its name in that report; found by its weights if not given.")
def publish(
    path: Path,
    repo_id: str,
    public: bool,
    tag: str | None,
    dry_run: bool,
    out: Path | None,
    licence: str | None,
    allow: tuple[str, ...],
    without_trees: bool,
    merged: bool,
    report: Path | None,
    name: str | None,
) -> None:
    """Publish a run's data set, or a trained policy, on the HF Hub: searched for secrets, private, with a card.

    \b
    See first what would go up:
      reasonrag publish runs/hotpot --repo-id me/hotpot-steps --dry-run --out staged
    Pairs and trees, as a private data set:
      reasonrag publish runs/hotpot --repo-id me/hotpot-steps
    A policy with its figures, for everybody:
      reasonrag publish policies/dpo --repo-id me/dpo --eval reports/hotpot --license apache-2.0 --public

    The token is that of `hf auth login`, or HF_TOKEN. What others wrote into the card stays.
    """
    from reasonrag.commands import publish as command
    from reasonrag.core.errors import ConfigError
    from reasonrag.publish.publish import PublishOptions

    options = PublishOptions(
        repo_id=repo_id,
        public=public,
        tag=tag,
        licence=licence,
        report=report,
        name=name,
        merged=merged,
        trees=not without_trees,
        allow=frozenset(allow),
    )
    if dry_run:
        command.dry_run(path, options, out)
    elif out is not None:
        raise ConfigError("--out is for --dry-run; publishing itself leaves no folder behind")
    else:
        command.publish(path, options)
