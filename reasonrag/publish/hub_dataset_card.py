"""The Hub card of a published run: YAML for the Hub and for `datasets`, and a text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reasonrag import __version__
from reasonrag.core.models import BACKENDS
from reasonrag.publish.dataset import ALL, SPLITS, TREES, Counts, Part, StagedRun
from reasonrag.publish.hub_card import Yaml, fenced, mapping, number, render, versions
from reasonrag.publish.licences import Source, known_sources, licence_field, source_of
from reasonrag.publish.staged_files import settings_text
from reasonrag.storage.parquet import Row
from reasonrag.storage.questions import splits_of_names
from reasonrag.storage.tables import tree_schema

if TYPE_CHECKING:
    import pyarrow as pa

_TAGS = ["dpo", "trl", "preference", "process-reward", "agentic-rag", "mcts", "synthetic", "reasonrag"]
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
_MESSAGE_CHARS = 1_500
_TYPES = ("query", "evidence", "answer", "malformed")


def card(staged: StagedRun, *, repo_id: str, licence: str | None, given: Sequence[str]) -> tuple[Yaml, str]:
    """Return the card's YAML, and its Markdown text: how to load the data, columns, counts, settings, licences.

    Args:
        staged: the staged run.
        repo_id: OWNER/NAME.
        licence: as the publisher gave it; None: the licences of the sources.
        given: `NAME=KNOWN`: the known data sets that the files of questions are, as the publisher says.
    """
    config, summary, retrieval = staged.config, staged.summary, staged.config.retrieval
    sources = _sources(staged, given)
    data: Yaml = {"license": licence_field(sources, licence)}
    if languages := sorted({source.language for source in sources if source.language}):
        data["language"] = languages
    names = ", ".join(dict.fromkeys(part.config for part in staged.pairs))
    data["pretty_name"] = f"{names}: preferences over {staged.compared} of agentic RAG"
    thousands = staged.pair_count // 1000
    data["size_categories"] = [_SIZES[min(len(str(thousands)), 6) if thousands else 0]]
    data["task_categories"] = ["question-answering", "text-generation"]
    if origins := sorted({source.hub for source in sources if source.hub}):
        data["source_datasets"] = origins
    data["tags"] = _TAGS
    by_config: dict[str, list[Part]] = {ALL: staged.pairs}
    for part in staged.parts:
        by_config.setdefault(part.config, []).append(part)
    data |= _configs(staged, by_config)

    settings = config.model_dump(mode="json", include={"search", "value", "pairs", "format"})
    return data, render(
        "dataset.md.j2",
        repo_id=repo_id,
        compared=staged.compared,
        has_policy_card=staged.has_policy_card,
        names=[source or "unnamed" for source in staged.sources],
        pairs=staged.pair_count,
        configs=by_config,
        by_source=_by_split(staged.counts, "source"),
        by_depth=_by_split(staged.counts, "depth"),
        matrix=_matrix(staged.counts),
        types=_TYPES,
        example=_example(staged.example),
        columns=staged.table.columns,
        tree_columns=tree_schema.columns if TREES in by_config else (),
        type_name=_type,
        settings=fenced(settings_text(settings).strip(), "yaml"),
        policy=_model(summary.get("policy"), config.policy.revision),
        kind=(config.policy.address.backend or BACKENDS["hf"]).description,
        is_plain=config.format.name == "reasonrag",
        judge=_model(summary.get("judge"), config.judge.revision) if config.value.kind == "judge" else None,
        sampling=config.policy,
        retrieval=retrieval,
        retriever=retrieval.kind or ("index" if retrieval.index else "remote" if retrieval.url else "bm25"),
        content=mapping(summary, "content"),
        summary=summary,
        contradictory=staged.contradictions.same_content,
        versions=versions(summary),
        without_pairs=_without_pairs(summary),
        sources=sources,
        licence=licence,
        version=__version__,
    )


def _sources(staged: StagedRun, given: Sequence[str]) -> list[Source]:
    """Return the questions' data sets, and the corpus if it is a separate one: its passages are in the data, too."""
    asked = staged.config.questions
    splits, said = splits_of_names(asked.dataset or "", asked.split), known_sources(given, staged.sources)
    sources = [source_of(name, splits, said) for name in staged.sources]
    retrieval = staged.config.retrieval
    if retrieval.corpus or retrieval.index or retrieval.is_remote or (retrieval.kind or "").startswith("python:"):
        checksum = mapping(staged.summary, "content").get("corpus")
        sources.append(Source("the corpus that was searched", note=f"checksum {checksum}"))
    return sources


def _configs(staged: StagedRun, by_config: dict[str, list[Part]]) -> Yaml:
    """Return `configs` and `dataset_info`, made by the library that reads them."""
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict, SplitInfo
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    configs, infos = MetadataConfigs(), DatasetInfosDict()
    for name, parts in by_config.items():
        data_files = []
        splits = SplitDict()
        for split in (*SPLITS, "nodes"):
            of_split = [part for part in parts if part.split == split]
            if of_split:
                data_files.append({"split": split, "path": [part.pattern for part in of_split]})
                memory_bytes = sum(part.memory_bytes for part in of_split)
                splits[split] = SplitInfo(split, memory_bytes, sum(part.rows for part in of_split))
        configs[name] = {"data_files": data_files} | ({"default": True} if name == ALL else {})
        infos[name] = DatasetInfo(
            config_name=name,
            features=Features.from_arrow_schema(tree_schema() if name == TREES else staged.table()),
            splits=splits,
            download_size=sum(part.file_bytes for part in parts),
            dataset_size=sum(part.memory_bytes for part in parts),
        )
    data = DatasetCardData()
    configs.to_dataset_card_data(data)
    infos.to_dataset_card_data(data)
    info = data["dataset_info"]
    return {"configs": data["configs"], "dataset_info": info if isinstance(info, list) else [info]}


def _type(type: pa.DataType) -> str:
    """Name a type as people write it: `list of {role, content}`."""
    import pyarrow as pa

    if pa.types.is_list(type):
        return f"list of {_type(type.value_type)}"
    return f"{{{', '.join(field.name for field in type)}}}" if pa.types.is_struct(type) else str(type)


def _by_split(counts: Counts, field: str) -> list[list[Any]]:
    """A row per value of a field of `Group`: the value, then its pairs in each split."""
    pairs: Counter[tuple[Any, str]] = Counter()
    for group, count in counts.items():
        pairs[getattr(group, field), group.split] += count
    values = sorted({value for value, _ in pairs})
    return [[value if value != "" else "unnamed", *(pairs[value, split] for split in SPLITS)] for value in values]


def _matrix(counts: Counts) -> list[list[Any]]:
    """A row per type of chosen step, a column per type of rejected step; empty for pairs of whole trajectories."""
    pairs: Counter[tuple[Any, Any]] = Counter()
    for group, count in counts.items():
        pairs[group.chosen, group.rejected] += count
    if set(pairs) == {(None, None)}:
        return []
    return [[chosen, *(pairs[chosen, rejected] for rejected in _TYPES)] for chosen in _TYPES[:-1]]


def _example(row: Row) -> Any:
    """Show a pair as one block of code: prompt, chosen and rejected."""
    paragraphs = []
    for name in ("prompt", "chosen", "rejected"):
        if f"{name}_steps" in row:
            lines = [_shortened(step["text"]) for step in row[f"{name}_steps"]]
        elif name in row:
            lines = [f"[{message['role']}] {_shortened(message['content'])}" for message in row[name]]
        else:  # a pair of whole trajectories has no prompt
            continue
        paragraphs.append("\n".join([f"── {name} ──", *lines]))
    rewards = f"chosen_reward: {number(row['chosen_reward'])}, rejected_reward: {number(row['rejected_reward'])}"
    return fenced("\n\n".join([*paragraphs, rewards]), "text")


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}…"


def _model(name: object, revision: str | None) -> str | None:
    """Name a model with its revision, unless the name holds it already."""
    if name is None:
        return None
    return str(name) if revision is None or revision in str(name) else f"{name}, revision {revision}"


def _without_pairs(summary: Row) -> int | None:
    """Count questions that have a tree, but no two siblings that differ enough."""
    try:
        return int(summary["questions"]["finished"] - summary["pairs"]["questions_with_pairs"])
    except (KeyError, TypeError):
        return None
