"""The card of a published run: YAML for the Hub and `datasets`, and a text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reasonrag import __version__
from reasonrag.core.config import Config
from reasonrag.publish.cards import Yaml, fenced, mapping, number, render
from reasonrag.publish.dataset import ALL, SPLITS, TREES, Counts, Part, Staged
from reasonrag.publish.licences import Source, licence_field, source_of
from reasonrag.publish.staging import settings_text
from reasonrag.storage.parquet import Row
from reasonrag.storage.tables import Described, tree_schema

if TYPE_CHECKING:
    import pyarrow as pa

_TAGS = ["dpo", "trl", "preference", "process-reward", "agentic-rag", "mcts", "synthetic", "reasonrag"]
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
_MESSAGE_CHARS = 1_500
_TYPES = ("query", "evidence", "answer", "malformed")


def sources_of(staged: Staged) -> list[Source]:
    """The questions' data sets, and the corpus where that is another one: its passages are in the data too."""
    found = [source_of(name) for name in _sources(staged)]
    retrieval = staged.config.retrieval
    if retrieval.corpus or retrieval.index or retrieval.url or (retrieval.kind or "").startswith("python:"):
        found.append(
            Source("the corpus that was searched", note=f"checksum {mapping(staged.summary, 'content').get('corpus')}")
        )
    return found


def card_data(staged: Staged, *, licence: str | None) -> Yaml:
    """The card's YAML.

    Args:
        staged: what goes up.
        licence: as it was given; None: those of the sources.
    """
    sources = sources_of(staged)
    data: Yaml = {"license": licence_field(sources, licence)}
    if languages := sorted({source.language for source in sources if source.language}):
        data["language"] = languages
    names = ", ".join(dict.fromkeys(part.config for part in staged.pairs))
    data["pretty_name"] = f"{names}: preferences over {_compared(staged)} of agentic RAG"
    data["size_categories"] = [_SIZES[min(len(str(_pairs(staged) // 1000)) if _pairs(staged) >= 1000 else 0, 6)]]
    data["task_categories"] = ["question-answering", "text-generation"]
    if origins := sorted({source.hub for source in sources if source.hub}):
        data["source_datasets"] = origins
    data["tags"] = _TAGS
    return data | _configs(staged)


def _configs(staged: Staged) -> Yaml:
    """`configs` and `dataset_info`, by the library that reads them."""
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict, SplitInfo
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    configs, infos = MetadataConfigs(), DatasetInfosDict()
    for name, parts in _by_config(staged).items():
        splits = {split: [part for part in parts if part.split == split] for split in (*SPLITS, "nodes")}
        splits = {split: found for split, found in splits.items() if found}
        files = [{"split": split, "path": [part.pattern for part in found]} for split, found in splits.items()]
        configs[name] = {"data_files": files} | ({"default": True} if name == ALL else {})
        infos[name] = DatasetInfo(
            config_name=name,
            features=Features.from_arrow_schema(tree_schema() if name == TREES else staged.table()),
            splits=SplitDict(
                {
                    split: SplitInfo(split, sum(part.memory_bytes for part in found), sum(part.rows for part in found))
                    for split, found in splits.items()
                }
            ),
            download_size=sum(part.file_bytes for part in parts),
            dataset_size=sum(part.memory_bytes for part in parts),
        )
    data = DatasetCardData()
    configs.to_dataset_card_data(data)
    infos.to_dataset_card_data(data)
    info = data["dataset_info"]
    return {"configs": data["configs"], "dataset_info": info if isinstance(info, list) else [info]}


def _by_config(staged: Staged) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {ALL: staged.pairs}
    for part in staged.parts:
        found.setdefault(part.config, []).append(part)
    return found


def card_body(staged: Staged, *, repo_id: str, licence: str | None) -> str:
    """The card's text."""
    config, summary = staged.config, staged.summary
    settings = config.model_dump(mode="json", include={"search", "value", "pairs", "format"})
    trees = [part for part in staged.parts if part.config == TREES]
    return render(
        "dataset.md.j2",
        repo_id=repo_id,
        compared=_compared(staged),
        asked=staged.asked,
        names=[source or "unnamed" for source in _sources(staged)],
        pairs=_pairs(staged),
        configs=_by_config(staged),
        by_source=[[source or "unnamed", *_of(staged, "source", source)] for source in _sources(staged)],
        by_depth=[[depth, *_of(staged, "depth", depth)] for depth in sorted({group.depth for group in staged.counts})],
        matrix=_matrix(staged.counts),
        types=_TYPES,
        example=_example(staged.example),
        columns=_columns(staged.table),
        tree_columns=_columns(tree_schema) if trees else (),
        settings=fenced(settings_text(settings).strip(), "yaml"),
        policy=_model(summary.get("policy"), config.policy.revision),
        judge=_model(summary.get("judge"), config.judge.revision) if config.value.kind == "judge" else None,
        sampling=config.policy,
        retrieval=config.retrieval,
        retriever=_retriever(config),
        content=mapping(summary, "content"),
        summary=summary,
        versions=[f"{name} {version}" for name, version in mapping(summary, "versions").items()],
        without_pairs=_without_pairs(summary),
        sources=sources_of(staged),
        licence=licence,
        version=__version__,
    )


def _columns(table: Described) -> list[tuple[str, str, str]]:
    """Name, type and meaning."""
    return [(name, _type(type), meaning) for name, type, meaning in table.columns]


def _type(type: pa.DataType) -> str:
    """As people write it: `list of {role, content}`."""
    import pyarrow as pa

    if pa.types.is_list(type):
        return f"list of {_type(type.value_type)}"
    return f"{{{', '.join(field.name for field in type)}}}" if pa.types.is_struct(type) else str(type)


def _sources(staged: Staged) -> list[str]:
    return list(dict.fromkeys(part.source for part in staged.pairs if part.source is not None))


def _compared(staged: Staged) -> str:
    return "steps" if staged.level == "step" else "whole trajectories"


def _pairs(staged: Staged) -> int:
    return sum(part.rows for part in staged.pairs)


def _of(staged: Staged, field: str, value: Any) -> list[int]:
    """Pairs by split, of those groups in which a field is this."""
    counted = [(group.split, n) for group, n in staged.counts.items() if getattr(group, field) == value]
    return [sum(n for split, n in counted if split == name) for name in SPLITS]


def _matrix(counts: Counts) -> list[list[Any]]:
    """A row a type of chosen step, a column a type of rejected step; nothing of whole trajectories."""
    types: Counter[tuple[Any, Any]] = Counter()
    for group, count in counts.items():
        types[group.chosen, group.rejected] += count
    if set(types) == {(None, None)}:
        return []
    return [[chosen, *(types[chosen, rejected] for rejected in _TYPES)] for chosen in _TYPES[:-1]]


def _example(row: Row) -> Any:
    """A pair as one block: what was asked, what was preferred, what was not."""
    if "chosen_steps" in row:
        parts = [("chosen", _steps(row["chosen_steps"])), ("rejected", _steps(row["rejected_steps"]))]
    else:
        parts = [(name, _messages(row[name])) for name in ("prompt", "chosen", "rejected")]
    rewards = f"chosen_reward: {number(row['chosen_reward'])}, rejected_reward: {number(row['rejected_reward'])}"
    return fenced("\n\n".join([f"── {name} ──\n{text}" for name, text in parts] + [rewards]), "text")


def _messages(messages: Sequence[Row]) -> str:
    return "\n".join(f"[{message['role']}] {_shortened(message['content'])}" for message in messages)


def _steps(steps: Sequence[Row]) -> str:
    return "\n".join(_shortened(step["text"]) for step in steps)


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}…"


def _model(name: object, revision: str | None) -> str | None:
    """With its revision, which names of Hub models carry already where one was asked for."""
    if name is None:
        return None
    return str(name) if revision is None or revision in str(name) else f"{name}, revision {revision}"


def _retriever(config: Config) -> str:
    """What was searched with."""
    wanted = config.retrieval
    return wanted.kind or ("index" if wanted.index else "remote" if wanted.url else "bm25")


def _without_pairs(summary: Row) -> int | None:
    """Questions of which a tree was built, but no two siblings differ enough."""
    try:
        return int(summary["questions"]["finished"] - summary["pairs"]["questions_with_pairs"])
    except (KeyError, TypeError):
        return None
