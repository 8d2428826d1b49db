"""Preferences to token ids: exactly the ids that the policy sampled are scored, after exactly the ids that it read.

Text is encoded only if its ids are unknown, because encoding the text of sampled ids often returns others: a policy
writes `.` and `</` as two tokens, its tokenizer `.</` as one. A policy never wrote more than its step: a stop string
ended most of them, and no end token was sampled there. Trainers that render the whole turn with the chat template score
one all the same, in both completions of a pair.

Nothing is ever cut, as a cut step is a different step: pairs that are too long are left out, and reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import excerpt, valid_unicode
from reasonrag.core.types import Prompt
from reasonrag.dpo.preferences import ChatSides, CheckedRow, Ids, Messages, StepSides, StepText, Target, TextSides
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.training.settings import PairSettings

_BATCH = 1000
_QUANTILES = {"min": 0.0, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}


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

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest sequence in the pair."""
        return max(segment.tokens for segment in (*self.chosen, *self.rejected))


@dataclass(slots=True)
class Encoded:
    """Counts of the encoded steps and rows. A step of several pairs counts in each.

    Attributes:
        steps: with a known end, as the policy wrote them.
        without_ids: of these, steps without known ids, so their text was encoded.
        of_another_tokenizer: of these, steps with ids that do not spell their text here, so it was encoded.
        differing: of these, steps with sampled ids, and a text that would have been encoded to others.
        shifted: rows of plain text in which the tokens of the prompt are not a prefix of those of prompt and
            completion, so that TRL's rule moves the end of the prompt into the scored tokens.
    """

    steps: int = 0
    without_ids: int = 0
    of_another_tokenizer: int = 0
    differing: int = 0
    shifted: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the number of steps, and shares of it in [0, 1]; `shifted` is in the report of the lengths."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "without_ids": self.without_ids / steps,
            "of_another_tokenizer": self.of_another_tokenizer / steps,
            "encoded_differently": self.differing / steps,
        }

    def __str__(self) -> str:
        """Return how many steps are scored with other ids than were sampled, as far as known; "" if none are."""
        problems = {
            "have no sampled token ids": self.without_ids,
            "were sampled with another tokenizer": self.of_another_tokenizer,
        }
        parts = [f"{count} of {self.steps} steps {problem}" for problem, count in problems.items() if count]
        return f"{', '.join(parts)}: their text is encoded" if parts else ""


def encode(rows: Sequence[CheckedRow], chat: ChatTemplate) -> tuple[list[Pair], Encoded]:
    """Return token ids of every row, in order, and counts.

    A step is the sampled ids, and its prompt the ids that the policy read (`ChatTemplate.token_ids`). Ids that
    do not spell the step's text are another tokenizer's: then, and without ids, its text is encoded by itself, and one
    end-of-turn token follows if the policy wrote one. Rows with unknown ends are tokenised
    as TRL 1.16's DPOTrainer does: the whole turn with the template's own end, or the text and the EOS token.

    Raises:
        DataError: the chat template refuses a row, or a completion has nothing left to score.
        ConfigError: an end-of-turn token is needed and the tokenizer has none.
    """
    # One object per id: a tokenizer makes a new one for every token, which takes four times the memory.
    shared: dict[int, int] = {}
    tokenise = partial(_tokenise, chat.tokenizer, shared)
    places: dict[Prompt, str] = {}
    steps: list[StepText] = []
    chat_texts: list[str] = []
    plain_texts: list[str] = []
    whole_texts: dict[int, list[str]] = {}  # by row: the prompt, and the prompt with either completion
    for number, row in enumerate(rows):
        if isinstance(row.sides, StepSides):
            for step in (*row.sides.chosen, *row.sides.rejected):
                places.setdefault(step.prompt, row.place)
                steps.append(step)
        else:
            whole_texts[number] = _whole_texts(chat, row.place, row.sides)
            (chat_texts if isinstance(row.sides, ChatSides) else plain_texts).extend(whole_texts[number])
    spans = [(span.text, span.token_ids) for prompt in places for span in prompt.turn]
    spelled = _spelled(chat.tokenizer, [*((step.text, step.token_ids) for step in steps), *spans], shared)
    pieces = {prompt: _pieces(chat, place, prompt, spelled) for prompt, place in places.items()}

    # Three ways to call the tokenizer. A template writes its special tokens into the text, and nothing else may: a step
    # was decoded without special tokens, so one that is spelled out in it was written in ordinary tokens.
    rendered = [piece for parts in pieces.values() for piece in parts if isinstance(piece, str)]
    rendered_ids = tokenise([*rendered, *chat_texts], add_special_tokens=False)
    step_texts = [valid_unicode(step.text) for step in steps]
    written_ids = tokenise(step_texts, add_special_tokens=False, split_special_tokens=True)
    plain_ids = tokenise(plain_texts)

    prompt_ids: dict[Prompt, Ids] = {}
    for prompt, parts in pieces.items():
        ids: list[int] = []
        for piece in parts:
            ids += rendered_ids[piece] if isinstance(piece, str) else piece
        prompt_ids[prompt] = tuple(ids)
    counts = Encoded()

    def segment(step: StepText) -> Segment:
        by_text = written_ids[valid_unicode(step.text)]
        sampled = spelled.get((step.text, step.token_ids))
        if step.end == "turn":
            by_text = (*by_text, chat.end_of_turn)
        scored = sampled or by_text
        counts.steps += 1
        counts.without_ids += step.token_ids is None
        counts.of_another_tokenizer += sampled is None and step.token_ids is not None
        counts.differing += sampled is not None and scored != by_text
        return Segment(prompt_ids[step.prompt], scored)

    pairs = []
    for number, row in enumerate(rows):
        if isinstance(row.sides, StepSides):
            chosen, rejected = tuple(map(segment, row.sides.chosen)), tuple(map(segment, row.sides.rejected))
        else:
            ids_by_text = plain_ids if isinstance(row.sides, TextSides) else rendered_ids
            read, with_chosen, with_rejected = (ids_by_text[text] for text in whole_texts[number])
            border = 0  # TRL's rule: scoring begins at the first token in which the prompt and either sequence differ
            for in_prompt, in_chosen, in_rejected in zip(read, with_chosen, with_rejected, strict=False):
                if not in_prompt == in_chosen == in_rejected:
                    break
                border += 1
            counts.shifted += border < len(read)
            chosen = (Segment(read[:border], with_chosen[border:]),)
            rejected = (Segment(read[:border], with_rejected[border:]),)
        for side, segments in (("chosen", chosen), ("rejected", rejected)):
            if not all(segment.prompt_ids and segment.completion_ids for segment in segments):
                raise DataError(
                    f"{row.place}: no token of its {side} side can be scored (prompt or completion is empty for this "
                    "model's tokenizer); remove the row"
                )
        pairs.append(Pair(chosen, rejected, row.margin, row.depth, row.group, row.target))
    return pairs, counts


def _tokenise(tokenizer: Any, shared: dict[int, int], texts: Sequence[str], **options: bool) -> dict[str, Ids]:
    """Return the ids of each distinct text, tokenised once, in batches."""
    distinct = list(dict.fromkeys(texts))
    ids_by_text: dict[str, Ids] = {}
    for start in range(0, len(distinct), _BATCH):
        batch = distinct[start : start + _BATCH]
        # `verbose` would warn of texts above the model's context; lengths are checked and reported by `fit`.
        encoded = tokenizer(batch, verbose=False, return_attention_mask=False, **options)["input_ids"]
        for text, ids in zip(batch, encoded, strict=True):
            ids_by_text[text] = tuple(shared.setdefault(token, token) for token in ids)
    return ids_by_text


def _spelled(
    tokenizer: Any, written: Iterable[tuple[str, Ids | None]], shared: dict[int, int]
) -> dict[tuple[str, Ids | None], Ids]:
    """Return the sampled ids that spell their text in this tokenizer, by text and ids.

    The last token may hold more than the text, which ends at a stop string; and some decoders drop a leading blank.
    """
    spelled: dict[tuple[str, Ids | None], Ids] = {}
    vocabulary = len(tokenizer)
    for text, ids in dict.fromkeys(written):
        if ids is None or max(ids, default=0) >= vocabulary:
            continue
        decoded = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False).lstrip()
        own = valid_unicode(text).lstrip()
        if decoded.startswith(own) if own else not decoded:
            spelled[text, ids] = tuple(shared.setdefault(token, token) for token in ids)
    return spelled


def _pieces(
    chat: ChatTemplate, place: str, prompt: Prompt, spelled: Mapping[tuple[str, Ids | None], Ids]
) -> list[str | Ids]:
    """Return the texts of a prompt that are encoded, each by itself, and the sampled ids between them."""
    sampled = [spelled.get((span.text, span.token_ids)) for span in prompt.turn]
    if not any(sampled):
        return [_rendered(place, partial(chat.text, prompt))]
    chat_text = _rendered(place, partial(chat.text, Prompt(prompt.messages)))
    turn = [ids or chat.span_text(span) for ids, span in zip(sampled, prompt.turn, strict=True)]
    return [chat_text, *turn]


def _whole_texts(chat: ChatTemplate, place: str, sides: ChatSides | TextSides) -> list[str]:
    """Return the text of the prompt, and of the prompt with either completion."""
    tokenizer = chat.tokenizer
    if isinstance(sides, TextSides):
        eos = tokenizer.eos_token
        if eos is None:
            raise ConfigError("the model's tokenizer has no EOS token to end a text with; give lists of messages")
        completions = [side if side.endswith(eos) else side + eos for side in (sides.chosen, sides.rejected)]
        return [valid_unicode(sides.prompt + completion) for completion in ("", *completions)]

    def render(messages: Messages, **options: bool) -> str:
        template = partial(tokenizer.apply_chat_template, messages, tokenize=False, **options, **sides.template)
        return _rendered(place, template)

    return [
        render(sides.prompt, add_generation_prompt=True),
        render(sides.prompt + sides.chosen),
        render(sides.prompt + sides.rejected),
    ]


def _rendered(place: str, render: Callable[[], Any]) -> str:
    try:
        return valid_unicode(str(render()))
    except Exception as error:  # templates may raise anything
        reason = excerpt(str(error), 120) or type(error).__name__
        raise DataError(
            f"{place}: the model's chat template cannot show its messages ({reason}); "
            "change the row, or use a model with another template"
        ) from error


def fit(
    splits: Mapping[str, Sequence[Pair]],
    settings: PairSettings,
    *,
    context: int | None,
    log: Callable[[str], object] = lambda line: None,
    shifted: int = 0,
    shared_prompts: int = 0,
    noun: str = "pairs",
) -> tuple[dict[str, list[Pair]], dict[str, Any]]:
    """Return the pairs that fit, whole, by split; and a report on the lengths of all, as JSON can hold it.

    The limit is `settings.max_length`, else the longest pair, but never above the model's `context`.

    Args:
        splits: `train`, which must not be empty, and `test`.
        settings: `max_length` and `max_dropped` are used.
        context: of the model, in tokens; None if it is unknown.
        log: receives the report before a refusal.
        shifted: plain rows in which the end of the prompt is scored too.
        shared_prompts: prompts that are in both splits, but for case and white space.
        noun: name of a row in messages.

    Returns:
        In the report, `tokens` are quantiles of `prompt` (the longest of a pair), `chosen` and `rejected` (scored
        tokens) and `total` (the longest sequence, which the limit bounds), each a length that occurs (nearest rank).

    Raises:
        DataError: more than `max_dropped` of a split is too long, or no pair is left to train on.
    """
    pairs = [pair for members in splits.values() for pair in members]
    limit, limited_by, why = settings.max_length, "setting", "as set"
    if limit is None:
        limit, limited_by = max((pair.tokens for pair in pairs), default=0), "data"
        why = f"the longest of the {noun}"
    if context is not None and context < limit:
        limit, limited_by, why = context, "context", "the model's context"
    quantiles = _quantiles(pairs)
    log(f"{'tokens':<10}" + "".join(f"{name:>8}" for name in _QUANTILES))
    for name, values in quantiles.items():
        log(f"{name:<10}" + "".join(f"{value:>8}" for value in values.values()))
    log(f"max_length {limit} ({why}); nothing is cut")
    kept: dict[str, list[Pair]] = {}
    left_out: dict[str, dict[str, int]] = {}
    shares: dict[str, float] = {}
    for split, members in splits.items():
        kept[split] = [pair for pair in members if pair.tokens <= limit]
        by_depth = Counter(pair.depth for pair in members if pair.tokens > limit)
        left_out[split] = {str(depth): by_depth[depth] for depth in sorted(by_depth)}
        shares[split] = by_depth.total() / max(len(members), 1)
        depths = ", ".join(f"{count} at depth {depth}" for depth, count in left_out[split].items())
        more = f" ({shares[split]:.1%}: {depths})" if depths else ""
        log(f"{by_depth.total()} of {len(members)} {split} {noun} left out as too long{more}")
    if shifted:
        log(
            f"{shifted} pairs: the tokens of the prompt merge with those of the completion, so the end of the "
            "prompt is scored too (TRL's rule); end prompts at the border of a token"
        )
    if shared_prompts:
        log(f"{shared_prompts} prompts are in both splits: held-out metrics are not of unseen prompts")
    for split, members in splits.items():
        nothing_left = split == "train" and not kept[split]
        if shares[split] > settings.max_dropped or nothing_left:
            longest = max(pair.tokens for pair in members)
            if context is not None and limit >= context:
                reason = f"{context} is the model's context, and no --max-length goes above it"
                advice = "train a model with a longer context"
            else:
                reason = "nothing is ever cut"
                advice = f"raise --max-length up to {longest if context is None else min(longest, context)}"
            problem = (
                f"{settings.data}: {len(members) - len(kept[split])} of {len(members)} {split} {noun} "
                f"({shares[split]:.1%}) are longer than {limit} tokens, the longest has {longest}"
            )
            if nothing_left:
                raise DataError(f"{problem}; {reason}, so nothing is left to train on; {advice}")
            enough = math.ceil(shares[split] * 1000) / 1000  # rounded up, so that the advised share is enough
            raise DataError(
                f"{problem}, and {settings.max_dropped:.1%} may be left out; {reason}; {advice}, or allow it with "
                f"--max-dropped {enough:g}"
            )
    return kept, {
        "tokens": quantiles,
        "pairs": {split: len(members) for split, members in splits.items()},
        "left_out": left_out,
        "max_length": limit,
        "limited_by": limited_by,
        "shifted": shifted,
        "shared_prompts": shared_prompts,
        "share_left_out": shares,
    }


def _quantiles(pairs: Sequence[Pair]) -> dict[str, dict[str, int]]:
    lengths: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": [], "total": []}
    for pair in pairs:
        lengths["prompt"].append(max(len(segment.prompt_ids) for segment in (*pair.chosen, *pair.rejected)))
        lengths["chosen"].append(sum(len(segment.completion_ids) for segment in pair.chosen))
        if pair.rejected:
            lengths["rejected"].append(sum(len(segment.completion_ids) for segment in pair.rejected))
        lengths["total"].append(pair.tokens)
    quantiles: dict[str, dict[str, int]] = {}
    for name, counts in lengths.items():
        if counts:  # single steps have no rejected side
            counts.sort()
            ranks = {label: max(math.ceil(share * len(counts)) - 1, 0) for label, share in _QUANTILES.items()}
            quantiles[name] = {label: counts[rank] for label, rank in ranks.items()}
    return quantiles
