"""Prepare what `reasonrag publish` uploads: a folder with its card, searched for secrets before anything is sent.

Of a run: pairs, trees, settings and counts, and how the policy was prompted;
never its journal. Of a trained policy: weights, tokenizer, settings, curves and
how it was trained; never checkpoints, optimizer states, pickles (`*.bin`) or
rollouts. Paths and addresses of this machine are left out of every settings file.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from reasonrag.core.config import POLICY_CARD, Config, PolicyCard
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.models import BACKENDS
from reasonrag.core.settings import refuse_links, to_yaml
from reasonrag.core.text import excerpt, quoted
from reasonrag.evaluation.tables import differences_table, results_table
from reasonrag.formats import open_format
from reasonrag.llm.model_folder import model_checksum
from reasonrag.pipeline.tables import PAIR_TABLES
from reasonrag.publish.card import UNKNOWN, Yaml, fenced_yaml, merge_card, render
from reasonrag.publish.hub import CARD, Upload, check_target, files_of
from reasonrag.publish.scan import EMAIL, PATH, Finding, places_of, scan
from reasonrag.publish.verify import mapping, verify
from reasonrag.storage.files import lock, naming, place, require_json, write_json, write_text
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import read_batches, shard_paths
from reasonrag.storage.questions import splits_of_names
from reasonrag.storage.tables import tree_schema
from reasonrag.training.run import MERGED, SUMMARY, check_trained, finished, without_places, written_files

ALLOWED = (EMAIL, PATH)  # kinds of findings that a person may allow; secrets are not among them

# Licences of questions, then of paragraphs (`data/README.md`). Wikipedia changed its licence from CC
# BY-SA 3.0 to 4.0 in June 2023; these paragraphs are older.
_LICENCES = {
    "demo": ["apache-2.0"],
    "hotpotqa": ["cc-by-sa-4.0"],
    "2wikimultihopqa": ["apache-2.0", "cc-by-sa-3.0"],
    "musique": ["cc-by-4.0", "cc-by-sa-3.0"],
    "popqa": ["mit"],
    "bamboogle": ["mit"],
    "nq": ["cc-by-sa-3.0"],
    "triviaqa": ["apache-2.0"],
}
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,63}")
_DATA_TAGS = ["dpo", "trl", "preference", "process-reward", "agentic-rag", "mcts", "synthetic", "reasonrag"]
_DATA_FILES = ("pairs/*", "trees/*", "prompts/*", "run.json", "config.yaml", POLICY_CARD)

_ADAPTER = "adapter_config.json"
_CURVES = "curves.svg"
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model-*.safetensors")
_POLICY_FILES = (
    *(*_WEIGHTS, "model.safetensors.index.json", _ADAPTER, "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("prm.json", POLICY_CARD, "prompts/*/*.txt", _CURVES),
)
# Keys under which transformers and peft store the source of a model.
_SOURCE_KEYS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
_FOLDER_CHECKSUM = re.compile(r"[^/]+@[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How to publish a run or a policy."""

    repo_id: str  # OWNER/NAME
    public: bool = False  # make a new repository public, or write to a public one
    tag: str | None = None  # vX.Y.Z; None: the next version
    licence: str | None = None  # of the whole repository; None: the licences of the sources
    report: Path | None = None  # folder of an evaluation, for a policy's card
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
        if not (kinds := Counter(finding.kind for finding in self.findings if finding.kind not in allow)):
            return
        counted = ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
        flags = " ".join(f"--allow {kind}" for kind in ALLOWED if kind in kinds)
        advice = f"; {flags} publishes them after you have looked" if flags else ""
        secret = "; secrets are never published" if set(kinds) - set(ALLOWED) else ""
        raise DataError(f"found what should not be public ({counted}), so nothing was sent{secret}{advice}")


class _Content(NamedTuple):
    """What the card of a staged folder says, and what describes its commit."""

    data: Yaml  # with the licence that is known
    values: dict[str, Any]  # of the card's template
    message: str
    warning: str = ""


def check(path: Path, options: PublishOptions) -> None:
    """Refuse what cannot work before anything is read.

    Raises:
        ConfigError: the name of the repository or tag is not
            valid, or an option does not fit the content of `path`.
        RunError: `path` is neither a finished run nor a trained policy.
    """
    check_target(options.repo_id, options.tag)
    if options.licence is not None and not _LICENCE.fullmatch(options.licence.lower()):
        raise ConfigError(
            f"--license {quoted(options.licence)} is not a licence's identifier; give one of the Hub's, such as "
            "cc-by-sa-4.0, apache-2.0 or mit"
        )
    is_policy = (path / SUMMARY).is_file()
    if not is_policy and not (path / "run.json").is_file():
        raise RunError(
            f"{path} is neither a finished run (run.json) nor a trained policy (training.json), and nothing else is "
            "published; if its command was stopped, the same command finishes it"
        )
    refuse_links(path)
    if options.report is not None and not is_policy:
        raise ConfigError(f"{path}: --eval is for a trained policy")


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
    content = _stage_policy(path, folder, options.report) if is_policy else _stage_run(path, folder)
    licence = options.licence and options.licence.lower()
    data = content.data | ({"license": licence} if licence else {})
    body = render(**content.values, repo_id=options.repo_id, name=options.repo_id.partition("/")[2], licence=licence)
    if options.public and data["license"] == UNKNOWN:
        raise ConfigError(
            "the licence is not known, of the data or of the model it came from, so it cannot be made public; "
            "find it out and give it as --license, or leave --public away"
        )

    # Called again with the card of the repository, once that is known.
    def card(old: str | None) -> str:
        return merge_card(old, data, body)

    write_text(folder / CARD, card(None))
    upload = Upload(
        repo_id=options.repo_id,
        repo_type="model" if is_policy else "dataset",
        folder=folder,
        card=card,
        owned=(*_POLICY_FILES, SUMMARY) if is_policy else _DATA_FILES,
        message=content.message,
        tag=options.tag,
        public=options.public,
    )
    licences = data["license"] if isinstance(data["license"], str) else ", ".join(data["license"])
    return Staged(upload, licences, scan(folder, files_of(folder), places_of(path)), content.warning)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """Create an empty folder in the same folder as `path`, so that large files can be linked; delete it at the end.

    Files that a killed process left in it are deleted. `path` need not exist.

    Raises:
        RunError: another process stages there.
    """
    path = path.resolve()
    staging = path.with_name(f".{path.name}.publish")
    if staging.is_symlink():  # of others: what it leads to would be emptied
        staging.unlink()
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


def _write_summary(summary: Mapping[str, Any], target: Path) -> None:
    try:
        write_json(target, without_places(summary))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{target.name} holds what JSON cannot express ({excerpt(str(error), 80)}); mend it") from error


# Runs


def _stage_run(run: Path, folder: Path) -> _Content:
    """Copy the published files of a finished run into a folder, and verify the copy."""
    config, summary = read_run(run)
    if (level := mapping(summary, "pairs").get("level")) not in PAIR_TABLES:
        raise RunError(
            f"{run}: run.json does not name the level of its pairs; write them again with `reasonrag pairs {run}`"
        )
    # Every file of a table has to be there: a set without
    # one of its shards would look complete on the Hub.
    files: dict[str, list[Path]] = {}
    for name, split in (("pairs", "train"), ("pairs", "test"), ("trees", "nodes")):
        if name == "trees" or any((run / name).glob(f"{split}-*")):
            files[split] = [place(path, folder / name / path.name) for path in shard_paths(run / name, split)]
    counts: Counter[tuple[str, str]] = Counter()  # by data set and split
    for split in files.keys() - {"nodes"}:
        for path in files[split]:
            for batch in read_batches(path, PAIR_TABLES[level](), columns=["dataset"]):
                counts.update((dataset or "unnamed", split) for dataset in batch.column("dataset").to_pylist())
    if not counts:
        raise DataError(
            f"{run}: no pairs to publish; build trees of more questions, or lower --min-margin or "
            "--min-confidence with `reasonrag pairs`"
        )
    _write_summary(summary, folder / "run.json")
    write_text(folder / "config.yaml", to_yaml(without_places(config.model_dump(mode="json"))))
    policy_card = _policy_card(config, mapping(summary, "content").get("prompts"))
    if policy_card is not None:
        with naming(folder / POLICY_CARD):
            policy_card.write(folder)
    # Verify the copies that will be sent, not their sources.
    verified = verify(folder)
    verified.refuse_grave()
    data, values = _data_card(config, summary, counts)
    values |= {"has_policy_card": policy_card is not None, "contradictions": verified.pairs}
    # By these `load_dataset` finds the files of each split.
    pairs = [{"split": split, "path": f"pairs/{split}-*"} for split in files if split != "nodes"]
    data["configs"] = [
        {"config_name": "pairs", "data_files": pairs, "default": True},
        {"config_name": "trees", "data_files": [{"split": "nodes", "path": "trees/nodes-*"}]},
    ]
    warning = str(verified.pairs)
    advice = f"; `reasonrag pairs {run}` derives pairs without any" if warning else ""
    return _Content(data, values, f"{counts.total():,} pairs", warning + advice)


def _data_card(config: Config, summary: Mapping[str, Any], counts: Counter[tuple[str, str]]) -> tuple[Yaml, Yaml]:
    """Return the YAML values of the card of a run's data, and the values of its template."""
    level = summary["pairs"]["level"]
    names = sorted({name for name, _ in counts})
    splits = splits_of_names(config.questions.dataset or "", config.questions.split)
    # The known licences of each data set: only one that was read by its name is known, as a file may have any name.
    sources = {name: _LICENCES.get(name, []) if name in splits else [] for name in names}
    retrieval = config.retrieval
    if retrieval.corpus or retrieval.index or retrieval.is_remote or (retrieval.kind or "").startswith("python:"):
        sources["the corpus that was searched"] = []  # its passages are in the data, too
    licences = sorted(set(chain(*sources.values())))
    data: Yaml = {"license": UNKNOWN, "task_categories": ["question-answering", "text-generation"]}
    data["tags"] = _DATA_TAGS
    if all(sources.values()):  # the licence of the whole is known only if that of each source is
        data["language"] = ["en"]
        data["license"] = licences if len(licences) > 1 else licences[0]
    return data, {
        "kind": "dataset",
        "compared": "steps" if level == "step" else "whole trajectories",
        "names": names,
        "total": counts.total(),
        "counts": [(name, counts[name, "train"], counts[name, "test"]) for name in names],
        "config": config,
        "summary": summary,
        "columns": PAIR_TABLES[level].columns,
        "tree_columns": tree_schema.columns,
        "settings": fenced_yaml(config.model_dump(mode="json", include={"search", "value", "pairs", "format"})),
        "policy_kind": (config.policy.address.backend or BACKENDS["hf"]).description,
        "sources": [(name, splits.get(name), ", ".join(known) or UNKNOWN) for name, known in sources.items()],
    }


def _policy_card(config: Config, fingerprint: Any) -> PolicyCard | None:
    """Return how the policy was prompted; None if its own prompts were changed or deleted since."""
    card = PolicyCard.of(config.model_dump(mode="json"), fingerprint)
    if card.prompts is None:
        return card
    if config.format.name.startswith("python:"):  # publishing runs no code of others just to look at its prompts
        return None
    try:
        return card if open_format(config).fingerprint == fingerprint else None
    except ConfigError:
        return None


# Policies


def _stage_policy(path: Path, folder: Path, report: Path | None) -> _Content:
    """Copy the published files of a finished training run into a folder, and verify the copy."""
    if (training := finished(path)) is None:
        raise RunError(
            f"{path} holds no finished training run ({SUMMARY} cannot be read); the same command finishes it"
        )
    check_trained(path)
    if not any(any(path.glob(name)) for name in _WEIGHTS):
        raise DataError(f"{path} holds no weights in safetensors (pickles are not published); save them so")
    # By name: whatever else is in the folder (checkpoints, optimizer states, pickles) stays here.
    for pattern in _POLICY_FILES:
        for source in path.glob(pattern):
            if source.is_file():
                _place_model_file(source, folder / source.relative_to(path))
    _write_summary(training | {"files": written_files(folder)}, folder / SUMMARY)
    verify(folder).refuse_grave()
    return _model_card(path, training, report)


def _model_card(path: Path, training: Mapping[str, Any], report: Path | None) -> _Content:
    """Return the card of a policy; `training` is the content of `training.json`."""
    measured = _measured(report, path) if report else None
    kind = "adapter" if (path / _ADAPTER).is_file() else "full"
    model = mapping(training, "model")
    base, checksum = str(model.get("name") or UNKNOWN), str(model.get("checksum") or "")
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base, re.ASCII) is not None
    # The checksum of a local folder starts with its name.
    base_on_hub = bool(checksum) and is_name and not _FOLDER_CHECKSUM.fullmatch(checksum)
    stage = str(training.get("stage"))
    data: Yaml = {"license": UNKNOWN}
    if base_on_hub:
        data |= {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    data["library_name"] = "peft" if kind == "adapter" else "transformers"
    data["pipeline_tag"] = "text-generation" if stage != "prm" else "text-classification"
    data["tags"] = ["agentic-rag", "process-reward", "trl", "reasonrag", stage]
    trained_on = {name: value for name, value in mapping(training, "data").items() if name != "lengths"}
    values = {
        "kind": "policy",
        "weights": kind,
        "base": base,
        "base_on_hub": base_on_hub,
        "stage": stage,
        "summary": training,
        "data": fenced_yaml(trained_on),
        "settings": fenced_yaml(mapping(training, "settings")),
        "has_curves": (path / _CURVES).is_file(),
        "measured": measured,
    }
    return _Content(data, values, f"{kind} weights")


def _place_model_file(source: Path, target: Path) -> None:
    """Link a file, unless it holds the path of another model on this machine: then write it with the last name only."""
    if source.name in (_ADAPTER, "config.json", "generation_config.json", "tokenizer_config.json"):
        settings = require_json(source, "train again, or mend it")
        names = {key: without_places(settings[key]) for key in _SOURCE_KEYS if key in settings}
        # Linked if nothing differs: the published bytes are the evaluated ones.
        if settings | names != settings:
            if source.name == _ADAPTER:
                base = names["base_model_name_or_path"]
                line = "the adapter's base is a folder of this machine, which readers lack; publish what --merge makes"
                structlog.get_logger().warning(line, base=base)
            write_json(target, settings | names)
            return
    place(source, target)


def _measured(report: Path, policy: Path) -> dict[str, Any]:
    """Return a policy's part of `REPORT/metrics.json` for its card, next to the baseline, the first policy there.

    Args:
        report: folder of an evaluation.
        policy: the policy's folder.

    Raises:
        ConfigError: it names no policy with these weights.
        DataError: it is not the `metrics.json` of an evaluation.
    """
    # An evaluation names the weights that it loaded, merged or not.
    checksums = [model_checksum(folder) for folder in (policy, policy / MERGED) if folder.is_dir()]
    file = report / "metrics.json"
    metrics = require_json(file)
    try:
        weights: dict[str, str] = {}
        for name, content in metrics["content"]["policies"].items():
            loaded = _FOLDER_CHECKSUM.fullmatch(content["policy"])
            weights[name] = content["policy"].rpartition("@")[2] if loaded else ""
        name = next((name for name in weights if weights[name] in checksums), None)
        if name is None:
            raise ConfigError(
                f"{file} has no policy with these weights ({' or '.join(checksums)}); it has "
                f"{', '.join(map(quoted, weights))}: evaluate this folder"
            )
        shown = next(iter(metrics["policies"])), name
        differences = differences_table(metrics, "card", (name,))
        return {
            "policy": name,
            "datasets": ", ".join(map(str, metrics["dataset"])),
            "split": metrics.get("split"),
            "results": "\n".join(results_table(metrics, "card", shown).markdown()),
            "differences": "\n".join(differences.markdown()) if differences.rows else "",
        }
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise DataError(
            f"{file} is not a metrics.json of `reasonrag eval` ({type(error).__name__}); give its folder as --eval"
        ) from error
