"""Stage a run's folder for the Hub: pairs, trees, settings and counts; never its journal.

FOLDER/
├── README.md                       the card
├── run.json, config.yaml           the run's own, without paths and addresses of this machine
├── reasonrag.yaml, prompts/        how the policy was prompted; training on its steps reads it
├── pairs/{train,test}-*.parquet    the run's own files
└── trees/nodes-*.parquet
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonrag.core.config import POLICY_CARD, Config, PolicyCard
from reasonrag.core.errors import ConfigError, DataError, RunError
from reasonrag.core.models import BACKENDS
from reasonrag.core.settings import to_yaml
from reasonrag.core.text import one_line, printable
from reasonrag.dpo.preferences import Contradictions
from reasonrag.formats import open_format
from reasonrag.publish.card import UNKNOWN, Yaml, fenced, fenced_yaml, mapping, place_json, render
from reasonrag.publish.verify import verify
from reasonrag.storage.files import naming, place, write_text
from reasonrag.storage.folder import read_run
from reasonrag.storage.parquet import Row, read_batches, shard_paths
from reasonrag.storage.questions import HUB_REPOSITORY, splits_of_names
from reasonrag.storage.tables import pair_schema, trajectory_pair_schema, tree_schema
from reasonrag.training.folder import without_places

if TYPE_CHECKING:
    import pyarrow as pa

OWNED = ("pairs/*", "trees/*", "prompts/*", "run.json", "config.yaml", POLICY_CARD)
_TABLES = {"step": pair_schema, "trajectory": trajectory_pair_schema}
_TAGS = ["dpo", "trl", "preference", "process-reward", "agentic-rag", "mcts", "synthetic", "reasonrag"]
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
_MESSAGE_CHARS = 1_500
# Licences of questions, then of paragraphs (`data/README.md`). Wikipedia changed its licence from CC BY-SA 3.0 to 4.0
# in June 2023; these paragraphs are older.
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


@dataclass(frozen=True, slots=True)
class StagedRun:
    """A staged run and the counts of its rows."""

    config: Config
    summary: dict[str, Any]  # the content of its `run.json`
    pairs: Counter[tuple[str, str]]  # by data set and split
    files: dict[str, list[Path]]  # Parquet files by split: train, test, nodes
    example: Row  # the first pair, a training pair if there is one
    has_policy_card: bool
    contradictions: Contradictions  # among the pairs


def stage_run(run: Path, folder: Path, *, trees: bool) -> StagedRun:
    """Copy the published files of a finished run into a folder, and verify the copy.

    Raises:
        RunError: the run has not finished.
        DataError: the tables are damaged, hold no pairs, or do not match the counts in `run.json`.
    """
    config, summary = read_run(run)
    level = mapping(summary, "pairs").get("level")
    if level not in _TABLES:
        raise RunError(
            f"{run}: run.json does not name the level of its pairs; write them again with `reasonrag pairs {run}`"
        )
    files = {}
    for name, split in (("pairs", "train"), ("pairs", "test"), *([("trees", "nodes")] if trees else [])):
        if name == "trees" or any((run / name).glob(f"{split}-*")):
            paths = shard_paths(run / name, split)
            files[split] = [place(path, folder / name / path.name) for path in paths]
    pairs: Counter[tuple[str, str]] = Counter()
    for split in files.keys() - {"nodes"}:
        for path in files[split]:
            for batch in read_batches(path, _TABLES[level](), columns=["dataset"]):
                pairs.update((dataset or "unnamed", split) for dataset in batch.column("dataset").to_pylist())
    if not pairs:
        raise DataError(
            f"{run}: no pairs to publish; build trees of more questions, or lower pairs.min_margin with "
            "`reasonrag pairs`"
        )
    place_json(summary, folder / "run.json")
    write_text(folder / "config.yaml", to_yaml(without_places(config.model_dump(mode="json"))))
    policy_card = _policy_card(config, summary)
    if policy_card is not None:
        with naming(folder / POLICY_CARD):
            policy_card.write(folder)
    verified = verify(folder)
    verified.refuse_grave()
    first = (files.get("train") or files["test"])[0]
    (example,) = next(read_batches(first, _TABLES[level]())).slice(0, 1).to_pylist()
    return StagedRun(config, summary, pairs, files, example, policy_card is not None, verified.pairs)


def _policy_card(config: Config, summary: dict[str, Any]) -> PolicyCard | None:
    """Return how the policy was prompted; None if its own prompts were changed or deleted since."""
    fingerprint = mapping(summary, "content").get("prompts")
    card = PolicyCard.of(config.model_dump(mode="json"), fingerprint)
    if card.prompts is None:
        return card
    if config.format.name.startswith("python:"):  # publishing runs no code of others just to look at its prompts
        return None
    try:
        unchanged = open_format(config).fingerprint == fingerprint
    except ConfigError:
        return None
    return card if unchanged else None


def dataset_card(staged: StagedRun, *, repo_id: str, licence: str | None) -> tuple[Yaml, str]:
    """Return the card's YAML, for the Hub and for `datasets`, and its Markdown text.

    Args:
        staged: the staged run.
        repo_id: OWNER/NAME.
        licence: as the publisher gave it; None: the licences of the sources.
    """
    config, summary, retrieval = staged.config, staged.summary, staged.config.retrieval
    names = sorted({dataset for dataset, _ in staged.pairs})
    # Only a data set that was read by its name is known; a file may have any name.
    splits = splits_of_names(config.questions.dataset or "", config.questions.split)
    sources = {name: _LICENCES.get(name, []) if name in splits else [] for name in names}
    if retrieval.corpus or retrieval.index or retrieval.is_remote or (retrieval.kind or "").startswith("python:"):
        sources["the corpus that was searched"] = []  # its passages are in the data, too
    licences = sorted(set(chain(*sources.values())))
    known = all(sources.values())
    compared = "steps" if summary["pairs"]["level"] == "step" else "whole trajectories"
    rows = staged.pairs.total()
    configs = [_config("pairs", {split: staged.files[split] for split in ("train", "test") if split in staged.files})]
    if "nodes" in staged.files:
        configs.append(_config("trees", {"nodes": staged.files["nodes"]}))
    data: Yaml = {
        "license": licence or (licences if known and licences[1:] else licences[0] if known else UNKNOWN),
        "pretty_name": f"{printable(one_line(', '.join(names)))}: preferences over {compared} of agentic RAG",
        "size_categories": [_SIZES[min(len(str(rows // 1000)), 6) if rows >= 1000 else 0]],
        "task_categories": ["question-answering", "text-generation"],
        "tags": _TAGS,
        "configs": configs,
    }
    if known:
        data["language"] = ["en"]
        data["source_datasets"] = sorted({"original" if name == "demo" else HUB_REPOSITORY for name in names})
    settings = config.model_dump(mode="json", include={"search", "value", "pairs", "format"})
    return data, render(
        kind="dataset",
        repo_id=repo_id,
        compared=compared,
        names=names,
        staged=staged,
        config=config,
        summary=summary,
        counts=[(name, *(staged.pairs[name, split] for split in ("train", "test"))) for name in names],
        example=_example(staged.example),
        columns=[(name, _type(type), what) for name, type, what in _TABLES[summary["pairs"]["level"]].columns],
        tree_columns=[(name, _type(type), what) for name, type, what in tree_schema.columns],
        settings=fenced_yaml(settings),
        policy_kind=(config.policy.address.backend or BACKENDS["hf"]).description,
        sources=[(name, splits.get(name), ", ".join(names) or UNKNOWN) for name, names in sources.items()],
        licence=licence,
    )


def _config(name: str, files: dict[str, list[Path]]) -> Yaml:
    """Return an entry of the card's `configs`, by which `load_dataset` finds the files of each split."""
    patterns = [{"split": split, "path": f"{name}/{split}-*"} for split in files]
    return {"config_name": name, "data_files": patterns, **({"default": True} if name == "pairs" else {})}


def _type(type: pa.DataType) -> str:
    """Name a type as people write it: `list of {role, content}`."""
    import pyarrow as pa

    if pa.types.is_list(type):
        return f"list of {_type(type.value_type)}"
    return f"{{{', '.join(field.name for field in type)}}}" if pa.types.is_struct(type) else str(type)


def _example(row: Row) -> Any:
    """Show a pair as one block of code: prompt, chosen and rejected."""
    paragraphs = []
    for name in ("prompt", "chosen", "rejected"):
        steps = row.get(f"{name}_steps") or ()  # of a pair of whole trajectories, which has no prompt
        messages = row.get(name) or ()
        lines = [f"── {name} ──", *(step["text"][:_MESSAGE_CHARS] for step in steps)]
        lines += [f"[{message['role']}] {message['content'][:_MESSAGE_CHARS]}" for message in messages]
        paragraphs.append("\n".join(lines))
    rewards = f"chosen_reward: {row['chosen_reward']:.4g}, rejected_reward: {row['rejected_reward']:.4g}"
    return fenced("\n\n".join([*paragraphs, rewards]), "text")
