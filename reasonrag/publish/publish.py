"""Prepare what `reasonrag publish` uploads: a folder with its card, searched for secrets before anything is sent."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.publish import dataset, policy
from reasonrag.publish.card import UNKNOWN, check_licence, merge_card
from reasonrag.publish.hub import CARD, Upload, check_target, files_of
from reasonrag.publish.scan import EMAIL, PATH, Finding, places_of, scan
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
    trees: bool = True  # publish a run's trees with its pairs
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
        """Raise DataError if the search found more than `allow` permits."""
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
        ConfigError: the name of the repository or tag is not valid, or an option does not fit the content of `path`.
        RunError: `path` is neither a finished run nor a trained policy.
    """
    check_target(options.repo_id, options.tag)
    check_licence(options.licence)
    is_policy, is_run = (path / SUMMARY).is_file(), (path / "run.json").is_file()
    if not is_policy and not is_run:
        why = "is neither a run (run.json) nor a trained policy (training.json); give the folder of one"
        if (path / "pairs.json").is_file():
            why = "holds pairs alone; publish needs the run that they are of: derive them in it, without --out"
        elif (path / "journal.sqlite").is_file():
            why = "is a run that has not finished; the same build-tree command finishes it"
        elif (path / "checkpoints").is_dir():
            why = "is a training run that has not finished; the same command finishes it"
        raise RunError(f"{path} {why}")
    if is_run and not is_policy and (options.merged or options.report or options.name):
        raise ConfigError(f"{path} is a run; --merged, --eval and --eval-policy are for a trained policy")
    if is_policy and not options.trees:
        raise ConfigError(f"{path} is a trained policy; --without-trees is for a run")
    if options.name is not None and options.report is None:
        raise ConfigError("--eval-policy names a policy of an evaluation; give the evaluation's folder as --eval")


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
        measured = policy.read_measured(options.report, path, options.name) if options.report else None
        data, body = policy.policy_card(trained, repo_id=repo_id, licence=licence, measured=measured)
        message = f"{trained.kind} weights"
    else:
        run = dataset.stage_run(path, folder, trees=options.trees)
        data, body = dataset.dataset_card(run, repo_id=repo_id, licence=licence)
        message = f"{run.pairs.total():,} pairs"
        if warning := str(run.contradictions):
            warning += f"; `reasonrag pairs {path}` derives pairs without any"
    if options.public and data["license"] == UNKNOWN:
        raise ConfigError(
            "the licence is not known, of the data or of the model it came from, so it cannot be made public; "
            "find it out and give it as --license, or leave --public away"
        )

    def card(old: str | None) -> str:
        return merge_card(old, data, body)

    write_text(folder / CARD, card(None))
    upload = Upload(
        repo_id=repo_id,
        repo_type="model" if is_policy else "dataset",
        folder=folder,
        card=card,
        owned=policy.OWNED if is_policy else dataset.OWNED,
        message=message,
        tag=options.tag,
        public=options.public,
    )
    licences = data["license"] if isinstance(data["license"], str) else ", ".join(data["license"])
    return Staged(upload, licences, scan(folder, files_of(folder), places_of(path)), warning)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Create an empty folder in the same folder as `path`, so that large files can be linked; delete it at the end.

    Files that a killed process left in it are deleted. `path` need not exist.

    Raises:
        RunError: another process stages there.
    """
    path = path.resolve()
    staging = path.with_name(f".{path.name}.publish")
    staging.mkdir(parents=True, exist_ok=True)
    with lock(staging / ".lock"):
        for left in staging.glob("*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = staging / "files"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(staging, ignore_errors=True)
