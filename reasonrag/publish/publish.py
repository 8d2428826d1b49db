"""`reasonrag publish`: stage, search, and only then upload."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.publish import dataset, dataset_card, policy, policy_card
from reasonrag.publish.cards import Yaml, merge_card
from reasonrag.publish.hub import CARD, Published, Upload, check_target, push
from reasonrag.publish.licences import UNKNOWN, check_licence
from reasonrag.publish.measured import read_measured
from reasonrag.publish.scan import EMAIL, PATH, Finding, places_of, scan
from reasonrag.publish.staging import files_of
from reasonrag.storage.files import lock, write_text
from reasonrag.training.folder import SUMMARY

ALLOWED = (EMAIL, PATH)  # secrets never are


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How something is to be published.

    Attributes:
        repo_id: OWNER/NAME.
        public: whether everybody may see it.
        tag: vX.Y.Z; None: the next one.
        licence: of all of it; None: what the sources say.
        report: an evaluation, for a policy's card.
        name: of the policy in that report; None: found by its weights.
        merged: the adapter merged into its model.
        trees: of a run, beside its pairs.
        allow: kinds of findings that were looked at: PATH, EMAIL.
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
    """A folder that holds what goes up.

    Attributes:
        upload: to be pushed.
        licence: as the card has it.
        findings: of the search through all of it.
    """

    upload: Upload
    licence: str
    findings: list[Finding]

    @property
    def files(self) -> dict[str, int]:
        """Bytes by path, the card too."""
        return {name: (self.upload.folder / name).stat().st_size for name in files_of(self.upload.folder)}

    def check(self, allow: frozenset[str]) -> None:
        """See that nothing was found but what was looked at.

        Raises:
            DataError: something was.
        """
        kinds = Counter(finding.kind for finding in self.findings if finding.kind not in allow)
        if not kinds:
            return
        counted = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
        looked = [f"--allow {kind}" for kind in ALLOWED if kind in kinds]
        advice = f"; {' '.join(looked)} publishes them after you have looked" if looked else ""
        secret = "; secrets are never published" if set(kinds) - set(ALLOWED) else ""
        raise DataError(f"found what should not be public ({counted}), so nothing was sent{secret}{advice}")


def stage(path: Path, folder: Path, wanted: Wanted) -> Staged:
    """Put what goes up into an empty folder, with the card as it is for a new repository, and search all of it.

    Args:
        path: a run's folder, or that of a trained policy.
        folder: to fill.
        wanted: how.

    Raises:
        ConfigError, DataError, RunError: it cannot be published; one line says why.
    """
    check(path, wanted)
    content = (_policy if (path / SUMMARY).is_file() else _dataset)(path, folder, wanted)
    licence = content.data["license"]
    if wanted.public and licence == UNKNOWN:
        raise ConfigError(
            "the licence is not known, of the data or of the model it came from, so it cannot be made public; "
            "find it out and give it as --license, or leave --public away"
        )

    asked = ("license",) if wanted.licence else ()

    def card(old: str | None) -> str:
        return merge_card(old, content.data, content.body, asked=asked, is_gone=content.is_gone)

    write_text(folder / CARD, card(None))
    kind, owned, message = content.kind, content.owned, content.message
    return Staged(
        Upload(wanted.repo_id, kind, folder, card, owned, message, wanted.tag, wanted.public),
        licence if isinstance(licence, str) else ", ".join(licence),
        scan(folder, files_of(folder), places_of(path)),
    )


def check(path: Path, wanted: Wanted) -> None:
    """What can be refused before anything is read.

    Raises:
        ConfigError: no name of a repository or tag, or a setting of the other kind of thing.
        RunError: neither a run nor a trained policy.
    """
    check_target(wanted.repo_id, wanted.tag)
    check_licence(wanted.licence)
    is_policy, is_run = (path / SUMMARY).is_file(), (path / "run.json").is_file()
    if not is_policy and not is_run:
        raise RunError(f"{path} {_what_it_is(path)}")
    if is_run and not is_policy and (wanted.merged or wanted.report or wanted.name):
        raise ConfigError(f"{path} is a run; --merged, --eval and --policy are for a trained policy")
    if is_policy and not wanted.trees:
        raise ConfigError(f"{path} is a trained policy; --without-trees is for a run")
    if wanted.name is not None and wanted.report is None:
        raise ConfigError("--policy names a policy of a report; give the report as --eval")


def _what_it_is(path: Path) -> str:
    if (path / "pairs.json").is_file():
        return "holds pairs alone; publish needs the run that they are of: derive them in it, without --out"
    if (path / "journal.sqlite").is_file():
        return "is a run that has not finished; the same build-tree command finishes it"
    if (path / "checkpoints").is_dir():
        return "is a training that has not finished; the same command finishes it"
    return "is neither a run (run.json) nor a trained policy (training.json); give the folder of one"


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """An empty folder on the same disk, where large files need no copy; it is gone in the end.

    Nobody else writes to `path` or publishes it meanwhile, so what a process that was killed left there goes, too.

    Raises:
        RunError: another process does.
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


def upload(staged: Staged, wanted: Wanted, *, say: Callable[[str], None]) -> Published:
    """Bring it to the Hub.

    Raises:
        DataError: something was found in it.
        ConfigError, HubError: see `hub.push`.
    """
    staged.check(wanted.allow)
    return push(staged.upload, say=say)


@dataclass(frozen=True, slots=True)
class _Content:
    """What a run or a policy has to say: its card, and which files on the Hub are its own."""

    kind: Literal["dataset", "model"]
    data: Yaml
    body: str
    owned: tuple[str, ...]
    message: str
    is_gone: Callable[[str], bool] = lambda pattern: False


def _dataset(path: Path, folder: Path, wanted: Wanted) -> _Content:
    staged = dataset.stage_run(path, folder, trees=wanted.trees)
    licence = check_licence(wanted.licence)
    files = files_of(folder)
    return _Content(
        "dataset",
        dataset_card.card_data(staged, licence=licence),
        dataset_card.card_body(staged, repo_id=wanted.repo_id, licence=licence),
        dataset.OWNED,
        f"{sum(part.rows for part in staged.pairs):,} pairs",
        lambda pattern: dataset.is_gone(pattern, files),
    )


def _policy(path: Path, folder: Path, wanted: Wanted) -> _Content:
    staged = policy.stage_policy(path, folder, merged=wanted.merged)
    licence = check_licence(wanted.licence)
    measured = read_measured(wanted.report, path, staged.checksums, wanted.name) if wanted.report else None
    return _Content(
        "model",
        policy_card.card_data(staged, repo_id=wanted.repo_id, licence=licence, measured=measured),
        policy_card.card_body(staged, repo_id=wanted.repo_id, licence=licence, measured=measured),
        policy.OWNED,
        f"{staged.kind} weights",
    )
