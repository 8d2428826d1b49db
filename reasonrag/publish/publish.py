"""Prepare what `reasonrag publish` uploads: a folder with its card, searched for secrets before anything is sent."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.publish import dataset, hub_dataset_card, hub_policy_card, policy
from reasonrag.publish.evaluation_results import read_measured
from reasonrag.publish.hub import CARD, Upload, check_target
from reasonrag.publish.hub_card import Yaml, merge_card
from reasonrag.publish.licences import UNKNOWN, check_licence
from reasonrag.publish.scan import EMAIL, PATH, Finding, places_of, scan
from reasonrag.publish.staged_files import files_of
from reasonrag.storage.files import lock, write_text
from reasonrag.training.folder import SUMMARY

ALLOWED = (EMAIL, PATH)  # kinds of findings that a person may allow; secrets are not among them


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How to publish a run or a policy.

    Attributes:
        repo_id: OWNER/NAME.
        public: make a new repository public, or write to a public one.
        tag: vX.Y.Z; None: the next version.
        licence: of the whole repository; None: the licences of the sources.
        report: folder of an evaluation, for a policy's card.
        name: the policy's name in that evaluation; None: found by its weights.
        merged: publish the adapter merged into its model.
        trees: publish a run's trees beside its pairs.
        allow: kinds of findings to publish: PATH, EMAIL.
    """

    repo_id: str
    public: bool = False
    tag: str | None = None
    licence: str | None = None
    report: Path | None = None
    name: str | None = None
    merged: bool = False
    trees: bool = True
    allow: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Staged:
    """A folder that is ready to be uploaded.

    Attributes:
        upload: for `hub.push`.
        licence: as the card names it.
        findings: what the search through all files found.
    """

    upload: Upload
    licence: str
    findings: list[Finding]

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
    if is_policy and not options.trees:
        raise ConfigError(f"{path} is a trained policy; --without-trees is for a run")
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
    content = (_policy if (path / SUMMARY).is_file() else _dataset)(path, folder, options)
    licence = content.data["license"]
    if options.public and licence == UNKNOWN:
        raise ConfigError(
            "the licence is not known, of the data or of the model it came from, so it cannot be made public; "
            "find it out and give it as --license, or leave --public away"
        )
    overrides = ("license",) if options.licence else ()

    def card(old: str | None) -> str:
        return merge_card(old, content.data, content.body, overrides=overrides, is_gone=content.is_gone)

    write_text(folder / CARD, card(None))
    return Staged(
        Upload(
            repo_id=options.repo_id,
            repo_type="model" if content.is_model else "dataset",
            folder=folder,
            card=card,
            owned=content.owned,
            message=content.message,
            tag=options.tag,
            public=options.public,
        ),
        licence if isinstance(licence, str) else ", ".join(licence),
        scan(folder, files_of(folder), places_of(path)),
    )


@dataclass(frozen=True, slots=True)
class _Content:
    """The card of a run or a policy, and the patterns of its files on the Hub."""

    is_model: bool
    data: Yaml
    body: str
    owned: tuple[str, ...]
    message: str
    is_gone: Callable[[str], bool] = lambda pattern: False


def _dataset(path: Path, folder: Path, options: PublishOptions) -> _Content:
    staged = dataset.stage_run(path, folder, trees=options.trees)
    licence = check_licence(options.licence)
    files = files_of(folder)
    return _Content(
        is_model=False,
        data=hub_dataset_card.card_data(staged, licence=licence),
        body=hub_dataset_card.card_body(staged, repo_id=options.repo_id, licence=licence),
        owned=dataset.OWNED,
        message=f"{staged.pair_count:,} pairs",
        is_gone=lambda pattern: dataset.is_gone(pattern, files),
    )


def _policy(path: Path, folder: Path, options: PublishOptions) -> _Content:
    staged = policy.stage_policy(path, folder, merged=options.merged)
    licence = check_licence(options.licence)
    measured = read_measured(options.report, path, staged.checksums, options.name) if options.report else None
    return _Content(
        is_model=True,
        data=hub_policy_card.card_data(staged, repo_id=options.repo_id, licence=licence, measured=measured),
        body=hub_policy_card.card_body(staged, repo_id=options.repo_id, licence=licence, measured=measured),
        owned=policy.OWNED,
        message=f"{staged.kind} weights",
    )


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Create an empty folder beside `path`, on the same disk, so that large files can be linked; delete it at the end.

    `path` is locked meanwhile, so a folder that is there already was left by a killed process and is deleted.

    Raises:
        RunError: another process writes to `path` or publishes it.
    """
    path = path.resolve()
    folder = path.with_name(f".{path.name}.publish")
    with lock(path / ".lock"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
