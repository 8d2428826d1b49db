"""Prepare what `reasonrag publish` uploads: a folder with its card, searched for secrets before anything is sent."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.publish import dataset, hub_dataset_card, hub_policy_card, policy
from reasonrag.publish.hub import CARD, Upload, check_target
from reasonrag.publish.hub_card import merge_card
from reasonrag.publish.hub_policy_card import read_measured
from reasonrag.publish.licences import UNKNOWN, check_licence
from reasonrag.publish.scan import EMAIL, PATH, Finding, places_of, scan
from reasonrag.publish.staged_files import files_of
from reasonrag.storage.files import lock, write_text
from reasonrag.training.folder import SUMMARY

ALLOWED = (EMAIL, PATH)  # kinds of findings that a person may allow; secrets are not among them


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How to publish a run or a policy."""

    repo_id: str  # OWNER/NAME
    public: bool = False  # make a new repository public, or write to a public one
    tag: str | None = None  # vX.Y.Z; None: the next version
    licence: str | None = None  # of the whole repository; None: the licences of the sources
    report: Path | None = None  # folder of an evaluation, for a policy's card
    name: str | None = None  # the policy's name in that evaluation; None: found by its weights
    merged: bool = False  # publish the adapter merged into its model
    trees: bool = True  # publish a run's trees beside its pairs
    sources: tuple[str, ...] = ()  # NAME=KNOWN: the known data sets that files of questions are
    allow: frozenset[str] = frozenset()  # kinds of findings to publish: PATH, EMAIL


@dataclass(frozen=True, slots=True)
class Staged:
    """A folder that is ready to be uploaded, and the secrets, paths and addresses that were found in its files."""

    upload: Upload
    licence: str  # as the card names it
    findings: list[Finding]
    warning: str = ""  # of pairs that contradict each other

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by its path in the folder; the card is included."""
        return {name: (self.upload.folder / name).stat().st_size for name in files_of(self.upload.folder)}

    def check(self, allow: frozenset[str]) -> None:
        """Check that the search found nothing but what is allowed.

        Raises:
            DataError: it did.
        """
        kinds = Counter(finding.kind for finding in self.findings if finding.kind not in allow)
        if not kinds:
            return
        counted = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
        flags = " ".join(f"--allow {kind}" for kind in ALLOWED if kind in kinds)
        advice = f"; {flags} publishes them after you have looked" if flags else ""
        secret = "; secrets are never published" if set(kinds) - set(ALLOWED) else ""
        raise DataError(f"found what should not be public ({counted}), so nothing was sent{secret}{advice}")


def check(path: Path, options: PublishOptions) -> None:
    """Refuse what cannot work before anything is read.

    Raises:
        ConfigError: the name of the repository or tag is not valid, or an option does not fit what is in `path`.
        RunError: `path` is neither a finished run nor a trained policy.
    """
    check_target(options.repo_id, options.tag)
    check_licence(options.licence)
    is_policy, is_run = (path / SUMMARY).is_file(), (path / "run.json").is_file()
    if not is_policy and not is_run:
        raise RunError(f"{path} {_why_not(path)}")
    if is_run and not is_policy and (options.merged or options.report or options.name):
        raise ConfigError(f"{path} is a run; --merged, --eval and --eval-policy are for a trained policy")
    if is_policy and (options.sources or not options.trees):
        raise ConfigError(f"{path} is a trained policy; --without-trees and --source are for a run")
    if options.name is not None and options.report is None:
        raise ConfigError("--eval-policy names a policy of an evaluation; give the evaluation's folder as --eval")


def _why_not(path: Path) -> str:
    if (path / "pairs.json").is_file():
        return "holds pairs alone; publish needs the run that they are of: derive them in it, without --out"
    if (path / "journal.sqlite").is_file():
        return "is a run that has not finished; the same build-tree command finishes it"
    if (path / "checkpoints").is_dir():
        return "is a training run that has not finished; the same command finishes it"
    return "is neither a run (run.json) nor a trained policy (training.json); give the folder of one"


def stage(path: Path, folder: Path, options: PublishOptions) -> Staged:
    """Copy what will be uploaded into an empty folder, write the card of a new repository, and search all of it.

    Args:
        path: folder of a run or of a trained policy.
        folder: to fill.
        options: how to publish it.

    Raises:
        ConfigError, DataError, RunError: it cannot be published; the message is one line.
    """
    check(path, options)
    is_policy = (path / SUMMARY).is_file()
    repo_id, licence = options.repo_id, check_licence(options.licence)
    warning = ""
    if is_policy:
        trained = policy.stage_policy(path, folder, merged=options.merged)
        measured = read_measured(options.report, path, trained.checksums, options.name) if options.report else None
        data, body = hub_policy_card.card(trained, repo_id=repo_id, licence=licence, measured=measured)
        message = f"{trained.kind} weights"
    else:
        run = dataset.stage_run(path, folder, trees=options.trees)
        data, body = hub_dataset_card.card(run, repo_id=repo_id, licence=licence, given=options.sources)
        message = f"{run.pair_count:,} pairs"
        if warning := str(run.contradictions):
            warning += f"; `reasonrag pairs {path}` derives pairs without any"
    if options.public and data["license"] == UNKNOWN:
        raise ConfigError(
            "the licence is not known, of the data or of the model it came from, so it cannot be made public; "
            "find it out and give it as --license, or leave --public away"
        )
    overrides = ("license",) if options.licence else ()
    files = files_of(folder)

    def card(old: str | None) -> str:
        # A policy's card has no configurations, so none of its patterns is looked at.
        return merge_card(old, data, body, overrides=overrides, is_gone=partial(dataset.is_gone, files=files))

    write_text(folder / CARD, card(None))
    return Staged(
        Upload(
            repo_id=repo_id,
            repo_type="model" if is_policy else "dataset",
            folder=folder,
            card=card,
            owned=policy.OWNED if is_policy else dataset.OWNED,
            message=message,
            tag=options.tag,
            public=options.public,
        ),
        data["license"] if isinstance(data["license"], str) else ", ".join(data["license"]),
        scan(folder, files_of(folder), places_of(path)),
        warning,
    )


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Create an empty folder beside `path`, on the same disk, so that large files can be linked; delete it at the end.

    What is in it already was left by a killed process, and is deleted. `path` need not exist.

    Raises:
        RunError: another process stages beside `path`.
    """
    path = path.resolve()
    beside = path.with_name(f".{path.name}.publish")
    beside.mkdir(parents=True, exist_ok=True)
    with lock(beside / ".lock"):
        for left in beside.glob("*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = beside / "files"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(beside, ignore_errors=True)
