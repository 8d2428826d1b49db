"""What a policy is trained on: a run, a folder or a file of pairs, or a Hub data set, as token ids by split.

Rows are checked before a model is loaded. A split by question in the source is kept, and none is made up: without one
every pair is for training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.policy_card import PolicyCard
from reasonrag.core.text import quoted
from reasonrag.dpo.lengths import LengthReport, fit
from reasonrag.dpo.row_layouts import BY_PROMPT, as_fields
from reasonrag.dpo.sources import Source, read_source
from reasonrag.dpo.token_rows import Pair, Row, Segment, encode
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.settings import PairSettings

__all__ = ["Examples", "Pair", "Segment", "open_examples", "sft_segments"]


@dataclass(frozen=True, slots=True)
class Examples:
    """Pairs that fit, and where they came from.

    Attributes:
        train: to learn from.
        test: held-out questions; empty where the source holds none out.
        checksum: 16 hex digits that change with any row of the source, whether it is in a sample or not.
        card: how the policy was prompted, if the data comes from a known run.
        source: the data, as it was named.
        report: lengths, and what was left out.
    """

    train: list[Pair]
    test: list[Pair]
    checksum: str
    card: PolicyCard | None
    source: str
    report: LengthReport

    def facts(self) -> dict[str, Any]:
        """Return source, checksum, counts and lengths for `training.json`."""
        path = Path(self.source)
        return {
            "source": path.resolve().name if path.exists() else self.source,
            "checksum": self.checksum,
            "train": _count(self.train),
            "held_out": _count(self.test),
            "lengths": self.report.summary(),
        }


def _count(pairs: list[Pair]) -> dict[str, int]:
    return {"pairs": len(pairs), "questions": len({pair.group for pair in pairs})}


def open_examples(
    settings: PairSettings, chat: ChatTemplate, *, context: int | None, log: Callable[[str], None] | None = None
) -> Examples:
    """Read, check and tokenise `settings.data`; leave out, whole, what is too long.

    The data is a run's folder, a folder that `reasonrag pairs --out` wrote, any folder of Parquet, a Parquet or
    JSONL(.gz) file, or a Hub data set. `settings.limit` samples questions of the training split by `settings.seed`.

    Args:
        settings: of the training.
        chat: tokenizer and chat template of the policy.
        context: of the policy, in tokens; None where it is unknown.
        log: receives counts and lengths, before anything is refused.

    Raises:
        ConfigError: no data was named, or the tokenizer cannot end a turn.
        DataError: nothing readable there, rows that cannot be used (they are named), a question in both splits, too
            many pairs that are too long.
        RunError: a run that is not finished.
    """
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a run's folder, a Parquet or JSONL file, or a Hub id")
    source = read_source(settings.data)
    shared_prompts = _check_splits(settings.data, source)
    train = _sample(source.train, settings.limit, settings.seed)
    if log is not None:
        log(f"{len(train)} pairs to train on, {len(source.test)} held out")
    pairs, shifted = encode([*train, *source.test], chat, turn_end=settings.turn_end)
    kept, report = fit(
        {"train": pairs[: len(train)], "test": pairs[len(train) :]},
        source=settings.data,
        max_length=settings.max_length,
        context=context,
        max_dropped=settings.max_dropped,
        shifted=shifted,
        shared_prompts=shared_prompts,
        say=log,
    )
    return Examples(kept["train"], kept["test"], _fingerprint(source), source.card, settings.data, report)


def sft_segments(pairs: Iterable[Pair]) -> list[Segment]:
    """Every chosen step once, in the order in which they first come."""
    return list(dict.fromkeys(segment for pair in pairs for segment in pair.chosen))


def _check_splits(name: str, source: Source) -> int:
    """Refuse a question in both splits; returns how many prompts of rows without a question's id are in both."""
    common = {row.group for row in source.train} & {row.group for row in source.test}
    leaked = sorted(group for group in common if not group[1].startswith(BY_PROMPT))
    if leaked:
        dataset, question = leaked[0]
        raise DataError(
            f"{name}: question {quoted(question)}{f' of {quoted(dataset)}' if dataset else ''} stands in both splits"
            f"{f', and {len(leaked) - 1} more do' if leaked[1:] else ''}, so the held-out figures would mean nothing; "
            "split by question, as build-tree does"
        )
    return len(common)


def _sample(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    """Rows of a random sample of at most `limit` questions, in their order."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if limit is None or limit >= len(groups):
        return rows
    taken = set(random.Random(seed).sample(groups, limit))
    return [row for row in rows if row.group in taken]


def _fingerprint(source: Source) -> str:
    digest = hashlib.sha256()
    for split, rows in (("train", source.train), ("test", source.test)):
        for row in rows:
            known_by = [split, row.sides, row.margin, row.depth, row.group]
            digest.update(json.dumps(known_by, default=as_fields).encode() + b"\n")
    return digest.hexdigest()[:16]
