"""Preferences to token ids: exactly the ids that the policy sampled are scored, after exactly the ids that it read.

Text is encoded only if its ids are unknown, because encoding the text of sampled ids often returns
others: a policy writes `.` and `</` as two tokens, its tokenizer `.</` as one. A policy never wrote more
than its step: a stop string ended most of them, and no end token was sampled there. Trainers that render
the whole turn with the chat template score one all the same, in both completions of a pair.

Nothing is ever cut, as a cut step is a different step:
pairs that are too long are left out, and reported.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reasonrag.core.config import PolicyCard
from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import common_length, excerpt, valid_unicode
from reasonrag.core.types import Prompt
from reasonrag.dpo.preferences import (
    ChatSides,
    CheckedRow,
    Ids,
    PairRules,
    Preferences,
    StepSides,
    StepText,
    Target,
    TextSides,
)
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.run import Log
from reasonrag.training.settings import PairSettings

_ENCODED = ("without_ids", "of_another_tokenizer", "encoded_differently")
_MOST_UNKNOWN = 0.1  # of the tokens of all steps


@dataclass(frozen=True, slots=True)
class Segment:
    """One step in its own prompt: `[P]` ids that are read and `[C]` ids that are scored, P and C at least 1."""

    prompt_ids: Ids
    completion_ids: Ids

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference. Step pairs have one segment a side, trajectory pairs one a step; further fields: `CheckedRow`."""

    chosen: tuple[Segment, ...]
    rejected: tuple[Segment, ...]
    margin: float | None
    depth: int
    group: tuple[str, str]
    target: Target | None = None
    confidence: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest sequence in the pair."""
        return max(segment.tokens for segment in (*self.chosen, *self.rejected))


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs as token ids, without pairs that are too long, and their source."""

    train: list[Pair]
    test: list[Pair]  # of held-out questions; empty if the source holds none out
    checksum: str  # changes with any row of the source, whether it is in a sample or not
    card: PolicyCard | None  # how the policy was prompted, if the data comes from a known run
    encoded: Counter[str]  # how many steps are scored with the ids that were sampled, as from `encode`
    facts: dict[str, Any]  # counts and lengths, for `training.json`


def data_of(settings: PairSettings) -> str:
    """Return the data of the settings; raise ConfigError if none is named."""
    if settings.data is None:
        raise ConfigError("nothing to train on: add --data with a run's folder, a Parquet or JSONL file, or a Hub id")
    return settings.data


def tokenise(
    preferences: Preferences, settings: PairSettings, chat: ChatTemplate, *, context: int | None, log: Log
) -> TokenPairs:
    """Check and tokenise preferences; leave out, whole, pairs that are too long.

    A split by question in the source is kept, and none is made up: without one
    every pair is for training. `settings.limit` samples so many questions of
    each split by `settings.seed`. `context` is that of the policy in tokens,
    if it is known. `log` receives counts and lengths before a refusal.

    Raises:
        DataError: a question is in both splits, or too many pairs are too long.
    """
    source, noun = data_of(settings), preferences.noun
    # The rules see all rows, whatever a limit takes: the
    # same data is refused or accepted with any sample.
    rules, samples, kinds = PairRules(), {}, {}
    for split, rows in (("train", preferences.train), ("test", preferences.test)):
        for row in rows:
            rules.add_row(split, row)
        samples[split] = _sample(rows, settings)
        kinds[split] = dict(Counter(row.types[0] for row in samples[split] if row.types[0]).most_common())
    rules.check_questions(source)
    train, test = samples["train"], samples["test"]
    log(f"{len(train)} {noun} to train on, {len(test)} held out")
    if kinds["train"]:
        log("kinds of steps to learn: " + ", ".join(f"{count} {kind}" for kind, count in kinds["train"].items()))
    if str(rules):
        log(f"warning: {rules}; all are trained on")
    if shared := len(rules.shared_texts):
        log(f"warning: {shared} texts are in both splits: held-out metrics are not of unseen questions")
    if rules.repeats:
        log(f"warning: {rules.repeats} {noun} repeat another one word for word; all are kept")
    pairs, encoded = encode([*train, *test], chat)
    step_count = encoded["steps"]
    # As the demo's tokenizer on other texts: sides that differ for a reader may be the same ids.
    unknown_share = encoded["unknown_tokens"] / max(encoded["tokens"], 1)
    if unknown_share > _MOST_UNKNOWN:
        log(f"warning: the tokenizer does not know {unknown_share:.0%} of the tokens to learn; choose another --model")
    if problem_count := encoded["without_ids"] + encoded["of_another_tokenizer"]:
        log(f"{problem_count} of {step_count} steps have no sampled token ids of this tokenizer: their text is encoded")
    splits = {"train": pairs[: len(train)], "test": pairs[len(train) :]}
    kept, lengths = fit(splits, settings, context=context, log=log, noun=noun)
    # Shares in [0, 1] of the steps.
    shares = {name: encoded[name] / max(step_count, 1) for name in _ENCODED}
    counts = {}
    for split, members in kept.items():
        counts[split] = {noun: len(members), "questions": len({pair.group for pair in members})}
    path, checksum = Path(source), preferences.checksum()
    facts = {
        "source": path.resolve().name if path.exists() else source,  # no path of this machine
        "checksum": checksum,
        "train": counts["train"],
        "held_out": counts["test"],
        "kinds": kinds,
        "trajectories": preferences.trajectories,
        "contradictory": rules.summary(),
        "token_ids": {"steps": step_count, **shares},
        "lengths": lengths,
    }
    return TokenPairs(kept["train"], kept["test"], checksum, preferences.card, encoded, facts)


def _sample(rows: list[CheckedRow], settings: PairSettings) -> list[CheckedRow]:
    """Return the rows of a random sample of at most `limit` questions, in their order."""
    groups = list(dict.fromkeys(row.group for row in rows))
    if settings.limit is None or settings.limit >= len(groups):
        return rows
    sampled = set(random.Random(settings.seed).sample(groups, settings.limit))
    return [row for row in rows if row.group in sampled]


def encode(rows: Sequence[CheckedRow], chat: ChatTemplate) -> tuple[list[Pair], Counter[str]]:
    """Return token ids of every row, in order, and counts.

    A step is the sampled ids, and its prompt the ids that the policy read
    (`ChatTemplate.token_ids`). Ids that do not spell the step's text are another tokenizer's:
    then, and without ids, its text is encoded by itself, and one end-of-turn token follows if
    the policy wrote one. Rows with unknown ends are tokenised as TRL 1.16's DPOTrainer does:
    the whole turn with the template's own end, or the text and the EOS token.

    The counts are of `steps` with a known end, in every pair that has them;
    and of these, steps `without_ids`, steps `of_another_tokenizer`, and
    steps that would have been `encoded_differently` than they were sampled.

    Raises:
        DataError: the chat template refuses a row, or a completion has nothing left to score.
        ConfigError: an end-of-turn token is needed and the tokenizer has none.
    """
    encoder = _Encoder(chat)
    return [encoder.pair(row) for row in rows], encoder.counts


class _Encoder:
    """Encodes rows with one tokenizer; a prompt that several steps share is encoded once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat = chat
        self.counts = Counter[str]()
        # One object per id: a tokenizer makes a new one for
        # every token, which takes four times the memory.
        self._shared_ids: dict[int, int] = {}
        self._prompt_ids: dict[Prompt, Ids] = {}
        self._vocabulary = len(chat.tokenizer)

    def pair(self, row: CheckedRow) -> Pair:
        """Return a row as token ids."""
        if isinstance(row.sides, StepSides):
            chosen = tuple(self._step(row.place, step) for step in row.sides.chosen)
            rejected = tuple(self._step(row.place, step) for step in row.sides.rejected)
        else:
            chosen, rejected = self._whole_turns(row.place, row.sides)
        for side, segments in (("chosen", chosen), ("rejected", rejected)):
            if not all(segment.prompt_ids and segment.completion_ids for segment in segments):
                raise DataError(
                    f"{row.place}: no token of its {side} side can be scored (prompt or completion is empty for this "
                    "model's tokenizer); remove the row"
                )
        return Pair(chosen, rejected, row.margin, row.depth, row.group, row.target, row.confidence)

    def _step(self, place: str, step: StepText) -> Segment:
        # Both sides of a pair, and often several pairs, have one prompt.
        if (prompt_ids := self._prompt_ids.get(step.prompt)) is None:
            prompt_ids = self._prompt_ids[step.prompt] = self._prompt(place, step.prompt)
        # A template writes its special tokens into the text, and nothing
        # else may: a step was decoded without special tokens, so one
        # that is spelled out in it was written in ordinary tokens.
        text = valid_unicode(step.text)
        by_text = self._ids(text, add_special_tokens=False, split_special_tokens=True)
        if step.end == "turn":
            by_text = (*by_text, self.chat.end_of_turn)
        sampled = self._spelled(step.text, step.token_ids)
        self.counts["steps"] += 1
        if step.token_ids is None:
            self.counts["without_ids"] += 1
        elif sampled is None:
            self.counts["of_another_tokenizer"] += 1
        elif sampled != by_text:
            self.counts["encoded_differently"] += 1
        completion_ids = sampled or by_text
        self.counts["tokens"] += len(completion_ids)
        self.counts["unknown_tokens"] += completion_ids.count(self.chat.tokenizer.unk_token_id)
        return Segment(prompt_ids, completion_ids)

    def _prompt(self, place: str, prompt: Prompt) -> Ids:
        """Return the ids of chat and open turn: text and sampled ids each by itself, or all as one text without ids."""
        sampled = [self._spelled(span.text, span.token_ids) for span in prompt.turn]
        if not any(sampled):
            return self._rendered(place, self.chat.text, prompt)
        ids = self._rendered(place, self.chat.text, Prompt(prompt.messages))
        for span, span_ids in zip(prompt.turn, sampled, strict=True):
            ids += span_ids or self._ids(self.chat.span_text(span), add_special_tokens=False)
        return ids

    def _spelled(self, text: str, ids: Ids | None) -> Ids | None:
        """Return sampled ids if they spell their text in this tokenizer, else None.

        The last token may hold more than the text, which ends at a stop string, and one that ends
        the turn may follow: what came behind would be trained on, and seen by nobody. Some decoders
        drop a leading blank.
        """
        if ids is None or max(ids, default=0) >= self._vocabulary:
            return None
        decode = partial(self.chat.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        written = valid_unicode(text).lstrip()
        decoded, begun = (decode(list(part)).lstrip() for part in (ids, ids[:-2]))
        is_spelled = decoded.startswith(written) and not begun.startswith(written) if written else not decoded
        return self._share(ids) if is_spelled else None

    def _whole_turns(self, place: str, sides: ChatSides | TextSides) -> tuple[tuple[Segment], tuple[Segment]]:
        """Return both sides by TRL's rule: scored from the first token in which the prompt and either side differ."""
        ids = self._plain_ids(sides) if isinstance(sides, TextSides) else self._chat_ids(place, sides)
        read, with_chosen, with_rejected = ids
        # Tokens of prompt and completion may merge, so the
        # prompt's ids need not begin those of the whole.
        border = min(common_length(read, with_chosen), common_length(read, with_rejected))
        prompt_ids = read[:border]
        return (Segment(prompt_ids, with_chosen[border:]),), (Segment(prompt_ids, with_rejected[border:]),)

    def _plain_ids(self, sides: TextSides) -> list[Ids]:
        """Return the ids of the prompt, and of the prompt with either completion and its EOS token."""
        if (eos_token := self.chat.tokenizer.eos_token) is None:
            raise ConfigError("the model's tokenizer has no EOS token to end a text with; give lists of messages")
        ended = [side.removesuffix(eos_token) + eos_token for side in (sides.chosen, sides.rejected)]
        return [self._ids(valid_unicode(sides.prompt + completion)) for completion in ("", *ended)]

    def _chat_ids(self, place: str, sides: ChatSides) -> list[Ids]:
        """Return the ids of the rendered prompt, and of the whole chat with either completion."""
        render = partial(self._rendered, place, self.chat.tokenizer.apply_chat_template, tokenize=False)
        whole_turns = [render(sides.prompt + side) for side in (sides.chosen, sides.rejected)]
        return [render(sides.prompt, add_generation_prompt=True), *whole_turns]

    def _rendered(self, place: str, render: Callable[..., Any], *chat: Any, **options: bool) -> Ids:
        """Return the ids of a rendered chat, whose template writes its special tokens into the text."""
        try:
            text = valid_unicode(str(render(*chat, **options)))
        except Exception as error:  # templates may raise anything
            reason = excerpt(str(error), 120) or type(error).__name__
            raise DataError(
                f"{place}: the model's chat template cannot show its messages ({reason}); "
                "change the row, or use a model with another template"
            ) from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> Ids:
        # `verbose` would warn of texts above the model's
        # context; lengths are checked and reported by `fit`.
        return self._share(self.chat.tokenizer(text, verbose=False, **options)["input_ids"])

    def _share(self, ids: Sequence[int]) -> Ids:
        return tuple(self._shared_ids.setdefault(token, token) for token in ids)


def fit(
    splits: Mapping[str, Sequence[Pair]],
    settings: PairSettings,
    *,
    context: int | None,
    log: Log = lambda line: None,
    noun: str = "pairs",
) -> tuple[dict[str, list[Pair]], dict[str, Any]]:
    """Return the pairs that fit, whole, by split; and a report on the lengths of all, as JSON can hold it.

    The limit is `settings.max_length`, else the longest pair, but never above the model's `context`.

    Args:
        splits: `train`, which must not be empty, and `test`.
        settings: `max_length` and `max_dropped` are used.
        context: of the model, in tokens; None if it is unknown.
        log: receives the report before a refusal.
        noun: name of a row in messages.

    Raises:
        DataError: more than `max_dropped` of a split is too long, or no pair is left to train on.
    """
    # `[prompt + step]` tokens of one forward pass. A cut step
    # would be another step, so pairs fit or are left out.
    longest = max(pair.tokens for members in splits.values() for pair in members)
    limit = min(settings.max_length or longest, context or longest)
    log(f"max_length {limit}, the longest of the {noun} has {longest} tokens; longer ones are left out, not cut")
    kept: dict[str, list[Pair]] = {}
    left_out: dict[str, dict[str, int]] = {}
    for split, members in splits.items():
        kept[split] = [pair for pair in members if pair.tokens <= limit]
        by_depth = Counter(pair.depth for pair in members if pair.tokens > limit)
        left_out[split] = {str(depth): by_depth[depth] for depth in sorted(by_depth)}
        share = by_depth.total() / max(len(members), 1)
        depths = ", ".join(f"{count} at depth {depth}" for depth, count in left_out[split].items())
        more = f" ({share:.1%}: {depths})" if depths else ""
        log(f"{by_depth.total()} of {len(members)} {split} {noun} left out as too long{more}")
        if share <= settings.max_dropped and (kept[split] or split == "test"):
            continue
        enough = math.ceil(share * 1000) / 1000  # rounded up, so that the advised share is enough
        longer = "" if limit == context else "raise --max-length up to that context, or "
        advice = f"allow it with --max-dropped {enough:g}" if kept[split] else "nothing is left to train on"
        raise DataError(
            f"{settings.data}: {by_depth.total()} of {len(members)} {split} {noun} are longer than "
            f"{limit} tokens, the longest has {max(pair.tokens for pair in members)} (context of the model: "
            f"{context or 'unknown'}), and nothing is ever cut: {longer}{advice}"
        )
    counts = {split: len(members) for split, members in splits.items()}
    return kept, {"longest": longest, "max_length": limit, "pairs": counts, "left_out": left_out}
