"""What a policy is trained on: preferences as token ids by split, those left out that are too long, and their lengths.

Rows are checked before a model is loaded. A split by question in the source is kept, and none is made up: without one
every pair is for training. Nothing is ever cut: a cut step is a different step.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.policy_card import PolicyCard
from reasonrag.dpo.preferences import CheckedRow, PairRules, Preferences, read_preferences
from reasonrag.dpo.token_rows import Encoded, Pair, Segment, encode
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.settings import PairSettings

_QUANTILES = {"min": 0.0, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class LengthReport:
    """Lengths of all pairs, measured before any is left out.

    `quantiles` are tokens by what is counted, then by quantile (a length that occurs: nearest rank). `prompt` is the
    longest prompt of a pair, `chosen` and `rejected` are the tokens that are scored, `total` is the longest sequence of
    prompt and step in the pair, which is what `max_length` bounds.
    """

    quantiles: Mapping[str, Mapping[str, int]]
    pairs: Mapping[str, int]  # by split
    left_out: Mapping[str, Mapping[int, int]]  # number of pairs that are too long, by split and depth
    max_length: int  # the limit that was applied, in tokens
    limited_by: str  # setting (`max_length`), context (the model's), or data (the longest pair)
    shifted: int = 0  # plain rows in which the end of the prompt is scored too: its tokens merge with the completion's
    shared_prompts: int = 0  # prompts that are in both splits, but for case and white space
    noun: str = "pairs"  # what is counted

    def share(self, split: str) -> float:
        """Return the share of a split's pairs that are left out, in [0, 1]."""
        return sum(self.left_out[split].values()) / max(self.pairs[split], 1)

    def lines(self) -> list[str]:
        """Return a table of lengths, the limit, what is left out, and anything odd, as lines for people."""
        lines = [f"{'tokens':<10}" + "".join(f"{name:>8}" for name in _QUANTILES)]
        for name, values in self.quantiles.items():
            lines.append(f"{name:<10}" + "".join(f"{value:>8}" for value in values.values()))
        longest = f"the longest of the {self.noun}"
        why = {"setting": "as set", "context": "the model's context", "data": longest}[self.limited_by]
        lines.append(f"max_length {self.max_length} ({why}); nothing is cut")
        for split, by_depth in self.left_out.items():
            line = f"{sum(by_depth.values())} of {self.pairs[split]} {split} {self.noun} left out as too long"
            if by_depth:
                depths = ", ".join(f"{count} at depth {depth}" for depth, count in by_depth.items())
                line += f" ({self.share(split):.1%}: {depths})"
            lines.append(line)
        if self.shifted:
            lines.append(
                f"{self.shifted} pairs: the tokens of the prompt merge with those of the completion, so the end of the "
                "prompt is scored too (TRL's rule); end prompts at the border of a token"
            )
        if self.shared_prompts:
            lines.append(
                f"{self.shared_prompts} prompts are in both splits: held-out metrics are not of unseen prompts"
            )
        return lines

    def summary(self) -> dict[str, Any]:
        values = asdict(self)
        del values["noun"]
        left_out = {
            split: {str(depth): n for depth, n in by_depth.items()} for split, by_depth in self.left_out.items()
        }
        shares = {split: self.share(split) for split in self.pairs}
        return {"tokens": values.pop("quantiles"), **values, "left_out": left_out, "share_left_out": shares}


@dataclass(frozen=True, slots=True)
class Examples:
    """Pairs that fit, and where they came from."""

    train: list[Pair]
    test: list[Pair]  # of held-out questions; empty if the source holds none out
    checksum: str  # 16 hex digits that change with any row of the source, whether it is in a sample or not
    card: PolicyCard | None  # how the policy was prompted, if the data comes from a known run
    source: str  # the data, as it was named
    report: LengthReport
    contradictory: dict[str, Any]  # pairs that contradict each other, see `Contradictions.summary`
    kinds: dict[str, dict[str, int]]  # chosen steps by split and kind of action, as far as kinds are known
    trajectories: Mapping[str, Any] | None  # counts of the trajectories that the steps are of
    encoded: Encoded  # how many steps are scored with the ids that were sampled

    def facts(self) -> dict[str, Any]:
        """Return source, checksum, counts and lengths for `training.json`."""
        path = Path(self.source)
        return {
            "source": path.resolve().name if path.exists() else self.source,
            "checksum": self.checksum,
            "train": _count(self.train, self.report.noun),
            "held_out": _count(self.test, self.report.noun),
            "kinds": self.kinds,
            "trajectories": self.trajectories,
            "contradictory": self.contradictory,
            "token_ids": self.encoded.summary(),
            "lengths": self.report.summary(),
        }


def open_examples(
    settings: PairSettings,
    chat: ChatTemplate,
    *,
    context: int | None,
    log: Callable[[str], object] = lambda line: None,
    read: Callable[[str], Preferences] = read_preferences,
) -> Examples:
    """Read, check and tokenise `settings.data`; leave out, whole, what is too long.

    The data is a run's folder, a folder that `reasonrag pairs --out` wrote, any folder of Parquet, a Parquet or
    JSONL(.gz) file, or a Hub data set. `settings.limit` samples so many questions of each split by `settings.seed`.
    `context` is that of the policy in tokens, if it is known. `log` receives counts and lengths before a refusal.
    `read` reads the data.

    Raises:
        ConfigError: no data is named, or the tokenizer cannot end a turn.
        DataError: nothing readable is there, some rows cannot be used (they are named), a question is in both splits,
            or too many pairs are too long.
        RunError: the data is a run that has not finished.
    """
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a run's folder, a Parquet or JSONL file, or a Hub id")
    preferences = read(settings.data)
    rules = PairRules()
    for split, rows in (("train", preferences.train), ("test", preferences.test)):
        for row in rows:
            rules.add_pair(split, row)
    rules.check_questions(settings.data)
    train = _sample(preferences.train, settings.limit, settings.seed)
    test = _sample(preferences.test, settings.limit, settings.seed)
    kinds = {"train": _kinds(train), "test": _kinds(test)}
    log(f"{len(train)} {preferences.noun} to train on, {len(test)} held out")
    if balance := ", ".join(f"{count} {kind}" for kind, count in kinds["train"].items()):
        log(f"kinds of steps to learn: {balance}")
    if str(rules):
        log(f"warning: {rules}; all are trained on")
    pairs, encoded = encode([*train, *test], chat, turn_end=settings.turn_end)
    if str(encoded):
        log(str(encoded))
    splits = {"train": pairs[: len(train)], "test": pairs[len(train) :]}
    odd = {"shifted": encoded.shifted, "shared_prompts": len(rules.shared_texts), "noun": preferences.noun}
    kept, report = fit(splits, settings, context=context, log=log, **odd)
    return Examples(
        kept["train"],
        kept["test"],
        preferences.checksum(),
        preferences.card,
        settings.data,
        report,
        rules.summary(),
        kinds,
        preferences.trajectories,
        encoded,
    )


def sft_segments(pairs: Iterable[Pair]) -> list[Segment]:
    """Return every chosen step once, in the order of first appearance."""
    return list(dict.fromkeys(segment for pair in pairs for segment in pair.chosen))


def _count(pairs: Sequence[Pair], noun: str) -> dict[str, int]:
    return {noun: len(pairs), "questions": len({pair.group for pair in pairs})}


def _kinds(rows: Iterable[CheckedRow]) -> dict[str, int]:
    return dict(Counter(row.types[0] for row in rows if row.types[0]).most_common())


def _sample(rows: list[CheckedRow], limit: int | None, seed: int) -> list[CheckedRow]:
    """Return the rows of a random sample of at most `limit` questions, in their order."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if limit is None or limit >= len(groups):
        return rows
    sampled = set(random.Random(seed).sample(groups, limit))
    return [row for row in rows if row.group in sampled]


def longest(pair: Pair) -> int:
    """Return the tokens of the longest sequence in a pair."""
    return max(segment.tokens for segment in (*pair.chosen, *pair.rejected))


def fit(
    splits: Mapping[str, Sequence[Pair]],
    settings: PairSettings,
    *,
    context: int | None,
    log: Callable[[str], object] = lambda line: None,
    **reported: Any,
) -> tuple[dict[str, list[Pair]], LengthReport]:
    """Return the pairs that fit, whole, by split; and the lengths of all.

    The limit is `settings.max_length`, else the longest pair, but never above the model's `context`. `train` must not
    be empty. What is `reported` goes into the report, which `log` receives before a refusal.

    Raises:
        DataError: more than `max_dropped` of a split is too long, or no pair is left to train on.
    """
    pairs = [pair for split in splits.values() for pair in split]
    limit, limited_by = settings.max_length, "setting"
    if limit is None:
        limit, limited_by = max(map(longest, pairs), default=0), "data"
    if context is not None and context < limit:
        limit, limited_by = context, "context"
    kept, left_out = {}, {}
    for split, members in splits.items():
        kept[split] = [pair for pair in members if longest(pair) <= limit]
        left_out[split] = dict(sorted(Counter(pair.depth for pair in members if longest(pair) > limit).items()))
    report = LengthReport(
        quantiles=_quantiles(pairs),
        pairs={split: len(members) for split, members in splits.items()},
        left_out=left_out,
        max_length=limit,
        limited_by=limited_by,
        **reported,
    )
    for line in report.lines():
        log(line)
    for split, members in splits.items():
        if report.share(split) > settings.max_dropped or (split == "train" and not kept[split]):
            raise DataError(_too_long(report, split, max(map(longest, members)), settings, context))
    return kept, report


def _too_long(report: LengthReport, split: str, longest: int, settings: PairSettings, context: int | None) -> str:
    count = sum(report.left_out[split].values())
    problem = (
        f"{settings.data}: {count} of {report.pairs[split]} {split} {report.noun} ({report.share(split):.1%}) are "
        f"longer than {report.max_length} tokens, the longest has {longest}"
    )
    if context is not None and report.max_length >= context:
        why = f"{context} is the model's context, and no --max-length goes above it"
        advice = "train a model with a longer context"
    else:
        why = "nothing is ever cut"
        advice = f"raise --max-length up to {longest if context is None else min(longest, context)}"
    if count == report.pairs[split] and split == "train":
        return f"{problem}; {why}, so nothing is left to train on; {advice}"
    share = math.ceil(report.share(split) * 1000) / 1000  # rounded up, so that the advised share is enough
    return (
        f"{problem}, and {settings.max_dropped:.1%} may be left out; {why}; {advice}, or allow it with --max-dropped "
        f"{share:g}"
    )


def _quantiles(pairs: Sequence[Pair]) -> dict[str, dict[str, int]]:
    lengths = {
        "prompt": [max(len(s.prompt_ids) for s in (*pair.chosen, *pair.rejected)) for pair in pairs],
        "chosen": [sum(len(s.completion_ids) for s in pair.chosen) for pair in pairs],
        "rejected": [sum(len(s.completion_ids) for s in pair.rejected) for pair in pairs if pair.rejected],
        "total": [longest(pair) for pair in pairs],
    }
    quantiles: dict[str, dict[str, int]] = {}
    for name, counts in lengths.items():
        if pairs and not counts:
            continue  # no example has a rejected side
        counts.sort()
        ranks = {label: max(math.ceil(share * len(counts)) - 1, 0) for label, share in _QUANTILES.items()}
        quantiles[name] = {label: counts[rank] for label, rank in ranks.items()}
    return quantiles
