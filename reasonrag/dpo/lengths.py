"""How long pairs are, and which are left out for it. Nothing is ever cut: a cut step is another step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reasonrag.core.errors import DataError
from reasonrag.dpo.token_rows import Pair

_QUANTILES = {"min": 0.0, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What was measured, before anything was left out.

    Attributes:
        quantiles: tokens by what is counted, then by quantile (a length that occurs: nearest rank). `prompt` is the
            longest prompt of a pair, `chosen` and `rejected` are the tokens that are scored, `total` is the longest
            sequence of prompt and step in the pair, which is what `max_length` bounds.
        pairs: how many there were, by split.
        left_out: how many were too long, by split and depth.
        max_length: that was used, in tokens.
        limited_by: setting (`max_length`), context (the model's), or data (the longest pair).
        shifted: plain rows in which the end of the prompt is scored too, as its tokens merge with the completion's.
        shared_prompts: prompts of rows without a question's id that stand in both splits.
    """

    quantiles: Mapping[str, Mapping[str, int]]
    pairs: Mapping[str, int]
    left_out: Mapping[str, Mapping[int, int]]
    max_length: int
    limited_by: str
    shifted: int = 0
    shared_prompts: int = 0

    def share(self, split: str) -> float:
        """Of a split's pairs that were left out, in [0, 1]."""
        return sum(self.left_out[split].values()) / max(self.pairs[split], 1)

    def lines(self) -> list[str]:
        """For people: a table, the limit, what was left out, and anything odd."""
        heads = "".join(f"{name:>8}" for name in _QUANTILES)
        lines = [f"{'tokens':<10}{heads}"]
        for name, values in self.quantiles.items():
            lines.append(f"{name:<10}" + "".join(f"{value:>8}" for value in values.values()))
        why = {"setting": "as set", "context": "the model's context", "data": "the longest pair"}[self.limited_by]
        lines.append(f"max_length {self.max_length} ({why}); nothing is cut")
        for split, by_depth in self.left_out.items():
            where = ", ".join(f"{count} at depth {depth}" for depth, count in by_depth.items())
            found = f"{sum(by_depth.values())} of {self.pairs[split]} {split} pairs left out as too long"
            lines.append(f"{found} ({self.share(split):.1%}: {where})" if by_depth else found)
        if self.shifted:
            lines.append(
                f"{self.shifted} pairs: the tokens of the prompt merge with those of the completion, so the end of the "
                "prompt is scored too (TRL's rule); end prompts at the border of a token"
            )
        if self.shared_prompts:
            lines.append(f"{self.shared_prompts} prompts stand in both splits: test figures are not of unseen prompts")
        return lines

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": {name: dict(values) for name, values in self.quantiles.items()},
            "pairs": dict(self.pairs),
            "left_out": {
                split: {str(depth): count for depth, count in by_depth.items()}
                for split, by_depth in self.left_out.items()
            },
            "share_left_out": {split: self.share(split) for split in self.pairs},
            "max_length": self.max_length,
            "limited_by": self.limited_by,
            "shifted": self.shifted,
            "shared_prompts": self.shared_prompts,
        }


def longest(pair: Pair) -> int:
    """Tokens of the longest sequence in a pair."""
    return max(segment.tokens for segment in (*pair.chosen, *pair.rejected))


def fit(
    splits: Mapping[str, Sequence[Pair]],
    *,
    source: str,
    max_length: int | None,
    context: int | None,
    max_dropped: float,
    shifted: int = 0,
    shared_prompts: int = 0,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, list[Pair]], LengthReport]:
    """The pairs that fit, by split, whole; and what was measured.

    Args:
        splits: pairs by split; `train` has to have some.
        source: of the data, for messages.
        max_length: tokens of prompt and step; None takes the longest pair.
        context: of the model, never exceeded; None where it is unknown.
        max_dropped: share of a split that may be left out, in [0, 1].
        shifted: for the report.
        shared_prompts: for the report.
        say: is told the report, before anything is refused.

    Raises:
        DataError: more than `max_dropped` of a split is too long, or no pair is left to train on.
    """
    every = [pair for pairs in splits.values() for pair in pairs]
    limit, limited_by = _limit(max(map(longest, every), default=0), max_length, context)
    kept = {split: [pair for pair in pairs if longest(pair) <= limit] for split, pairs in splits.items()}
    report = LengthReport(
        quantiles=_quantiles(every),
        pairs={split: len(pairs) for split, pairs in splits.items()},
        left_out={
            split: dict(sorted(Counter(pair.depth for pair in pairs if longest(pair) > limit).items()))
            for split, pairs in splits.items()
        },
        max_length=limit,
        limited_by=limited_by,
        shifted=shifted,
        shared_prompts=shared_prompts,
    )
    if say is not None:
        for line in report.lines():
            say(line)
    for split in splits:
        if report.share(split) > max_dropped or (split == "train" and not kept[split]):
            raise DataError(_too_long(report, split, source, max(map(longest, splits[split])), context, max_dropped))
    return kept, report


def _limit(found: int, max_length: int | None, context: int | None) -> tuple[int, str]:
    if context is not None and context < (found if max_length is None else max_length):
        return context, "context"
    return (found, "data") if max_length is None else (max_length, "setting")


def _too_long(
    report: LengthReport, split: str, source: str, longest: int, context: int | None, max_dropped: float
) -> str:
    out = sum(report.left_out[split].values())
    found = (
        f"{source}: {out} of {report.pairs[split]} {split} pairs ({report.share(split):.1%}) are longer than "
        f"{report.max_length} tokens, the longest has {longest}"
    )
    if context is not None and report.max_length >= context:
        why = f"{context} is the model's context, and no --max-length goes above it"
        advice = "train a model with a longer context"
    else:
        why = "no pair is ever cut"
        advice = f"raise --max-length up to {longest if context is None else min(longest, context)}"
    if out == report.pairs[split] and split == "train":
        return f"{found}; {why}, so nothing is left to train on; {advice}"
    needed = math.ceil(report.share(split) * 1000) / 1000
    return f"{found}, and {max_dropped:.1%} may be left out; {why}; {advice}, or allow it with --max-dropped {needed:g}"


def _quantiles(pairs: Sequence[Pair]) -> dict[str, dict[str, int]]:
    counted: dict[str, Callable[[Pair], int]] = {
        "prompt": lambda pair: max(len(s.prompt_ids) for s in (*pair.chosen, *pair.rejected)),
        "chosen": lambda pair: sum(len(s.completion_ids) for s in pair.chosen),
        "rejected": lambda pair: sum(len(s.completion_ids) for s in pair.rejected),
        "total": longest,
    }
    quantiles = {}
    for name, count in counted.items():
        lengths = sorted(map(count, pairs))
        quantiles[name] = {
            label: lengths[max(math.ceil(share * len(lengths)) - 1, 0)] for label, share in _QUANTILES.items()
        }
    return quantiles
