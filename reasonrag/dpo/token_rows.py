"""Preferences to token ids: exactly the ids that the policy sampled are scored, after exactly those that it read.

Text is encoded only where no ids are known, because encoding the text of sampled ids often returns others: a policy
writes `.` and `</` as two tokens, its tokenizer `.</` as one. A policy never wrote more than its step: a stop string
ended most of them, and no end token was sampled there. Trainers that render the whole turn with the chat template score
one all the same, in both completions of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.secrets import excerpt
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Prompt
from reasonrag.dpo.preferences import ChatSides, CheckedRow, Ids, Messages, StepSides, StepText, Target, TextSides
from reasonrag.llm.chat_template import ChatTemplate

TurnEnd = Literal["as_sampled", "always"]
_Spelled = dict[tuple[str, Ids | None], Ids]

_BATCH = 1000


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
    """A preference. Step pairs have one segment a side, trajectory pairs one a step.

    `margin` is the difference of the rewards, None if the data has none. `depth` counts the steps before the decision.
    `group` is data set and question; rows without a question id are grouped by their prompt.
    """

    chosen: tuple[Segment, ...]
    rejected: tuple[Segment, ...]
    margin: float | None
    depth: int
    group: tuple[str, str]
    target: Target | None = None


@dataclass(slots=True)
class Encoded:
    """What was encoded, as counts. A step that stands in several pairs counts in each.

    Attributes:
        steps: with a known end, as the policy wrote them.
        without_ids: of these, steps of which no ids are known, so their text was encoded.
        of_another_tokenizer: of these, steps whose ids do not spell their text in this tokenizer, so it was encoded.
        differing: of these, steps with sampled ids whose text would have been encoded to others.
        shifted: rows of plain text in which the tokens of the prompt are not a prefix of those of prompt and
            completion, so that TRL's rule moves the end of the prompt into what is scored.
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
        """Say how many steps are scored with other ids than were sampled, as far as known; "" if there is none."""
        problems = {
            "have no sampled token ids": self.without_ids,
            "were sampled with another tokenizer": self.of_another_tokenizer,
        }
        found = [f"{count} of {self.steps} steps {problem}" for problem, count in problems.items() if count]
        return f"{', '.join(found)}: their text is encoded" if found else ""


def encode(rows: Sequence[CheckedRow], chat: ChatTemplate, *, turn_end: TurnEnd) -> tuple[list[Pair], Encoded]:
    """Return token ids of every row, in order, and counts.

    A step is the ids that were sampled, and its prompt those that the policy read (`ChatTemplate.token_ids`). Ids that
    do not spell the step's text are another tokenizer's: then, and without ids, its text is encoded by itself, and one
    end-of-turn token follows if the policy wrote one (`as_sampled`), or always. Rows whose ends are unknown are
    tokenised as TRL 1.16's DPOTrainer does: the whole turn with the template's own end, or the text and the EOS token.

    Raises:
        DataError: the chat template refuses a row, or nothing of a completion is left to score.
        ConfigError: an end-of-turn token is needed and the tokenizer has none.
    """
    shared: dict[int, int] = {}
    tokenise = partial(_tokenise, chat.tokenizer, shared)
    sides = [row.sides for row in rows]
    places: dict[Prompt, str] = {}
    steps: list[StepText] = []
    for row in rows:
        if isinstance(row.sides, StepSides):
            for step in (*row.sides.chosen, *row.sides.rejected):
                places.setdefault(step.prompt, row.place)
                steps.append(step)
    spans = [(span.text, span.token_ids) for prompt in places for span in prompt.turn]
    spelled = _spelled(chat.tokenizer, [*((step.text, step.token_ids) for step in steps), *spans], shared)

    pieces = {prompt: _pieces(chat, place, prompt, spelled) for prompt, place in places.items()}
    whole_texts = {
        number: _whole_texts(chat, row.place, row.sides)
        for number, row in enumerate(rows)
        if not isinstance(row.sides, StepSides)
    }

    # Three ways to call the tokenizer. A template writes its special tokens into the text, and nothing else may: a step
    # was decoded without special tokens, so one that is spelled out in it was written in ordinary tokens.
    rendered = [piece for of_prompt in pieces.values() for piece in of_prompt if isinstance(piece, str)]
    chats = [text for number, texts in whole_texts.items() if isinstance(sides[number], ChatSides) for text in texts]
    rendered_ids = tokenise([*rendered, *chats], add_special_tokens=False)
    written_ids = tokenise(
        [valid_unicode(step.text) for step in steps], add_special_tokens=False, split_special_tokens=True
    )
    text_ids = tokenise(
        [text for number, texts in whole_texts.items() if isinstance(sides[number], TextSides) for text in texts]
    )
    prompt_ids = {
        prompt: tuple(id for piece in of_prompt for id in (rendered_ids[piece] if isinstance(piece, str) else piece))
        for prompt, of_prompt in pieces.items()
    }
    counts = Encoded()
    special = {id for id, token in chat.tokenizer.added_tokens_decoder.items() if token.special}

    def segment(step: StepText) -> Segment:
        by_text = written_ids[valid_unicode(step.text)]
        sampled = spelled.get((step.text, step.token_ids))
        if turn_end == "always" or step.end == "turn":
            by_text = (*by_text, chat.end_of_turn)
        ids = sampled or by_text
        if turn_end == "always" and sampled and sampled[-1] not in special:
            ids = (*sampled, chat.end_of_turn)
        counts.steps += 1
        counts.without_ids += step.token_ids is None
        counts.of_another_tokenizer += sampled is None and step.token_ids is not None
        counts.differing += sampled is not None and ids != by_text
        return Segment(prompt_ids[step.prompt], ids)

    pairs = []
    for number, row in enumerate(rows):
        if isinstance(row.sides, StepSides):
            chosen, rejected = tuple(map(segment, row.sides.chosen)), tuple(map(segment, row.sides.rejected))
        else:
            ids = text_ids if isinstance(row.sides, TextSides) else rendered_ids
            prompt, with_chosen, with_rejected = (ids[text] for text in whole_texts[number])
            border = 0  # TRL's rule: what is scored begins where the prompt and either sequence part
            for in_prompt, in_chosen, in_rejected in zip(prompt, with_chosen, with_rejected, strict=False):
                if not in_prompt == in_chosen == in_rejected:
                    break
                border += 1
            counts.shifted += border < len(prompt)
            chosen = (Segment(prompt[:border], with_chosen[border:]),)
            rejected = (Segment(prompt[:border], with_rejected[border:]),)
        pair = Pair(chosen, rejected, row.margin, row.depth, row.group, row.target)
        _check_scored(row, pair)
        pairs.append(pair)
    return pairs, counts


def _tokenise(tokenizer: Any, shared: dict[int, int], texts: Sequence[str], **options: bool) -> dict[str, Ids]:
    """Return the ids of each distinct text, tokenised once, in batches.

    `shared` keeps one object per id: a tokenizer makes a new one for every token, which takes four times the memory.
    """
    distinct = list(dict.fromkeys(texts))
    ids_by_text: dict[str, Ids] = {}
    for start in range(0, len(distinct), _BATCH):
        batch = distinct[start : start + _BATCH]
        # `verbose` would warn of texts above the model's context; lengths are checked and reported by `fit`.
        encoded = tokenizer(batch, verbose=False, return_attention_mask=False, **options)["input_ids"]
        for text, ids in zip(batch, encoded, strict=True):
            ids_by_text[text] = tuple(shared.setdefault(token, token) for token in ids)
    return ids_by_text


def _spelled(tokenizer: Any, written: Iterable[tuple[str, Ids | None]], shared: dict[int, int]) -> _Spelled:
    """Return the sampled ids that spell their text in this tokenizer, by text and ids.

    The last token may hold more than the text, which ends at a stop string; and some decoders drop a leading blank.
    """
    spelled: _Spelled = {}
    vocabulary = len(tokenizer)
    for text, ids in dict.fromkeys(written):
        if ids is None or max(ids, default=0) >= vocabulary:
            continue
        decoded = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False).lstrip()
        own = valid_unicode(text).lstrip()
        if decoded.startswith(own) if own else not decoded:
            spelled[text, ids] = tuple(shared.setdefault(token, token) for token in ids)
    return spelled


def _pieces(chat: ChatTemplate, place: str, prompt: Prompt, spelled: _Spelled) -> list[str | Ids]:
    """Return the texts of a prompt that are encoded, each by itself, and the sampled ids between them."""
    sampled = [spelled.get((span.text, span.token_ids)) for span in prompt.turn]
    if not any(sampled):
        return [_rendered(place, partial(chat.text, prompt))]
    chat_text = _rendered(place, partial(chat.text, Prompt(prompt.messages)))
    turn = [ids or chat.span_text(span) for ids, span in zip(sampled, prompt.turn, strict=True)]
    return [chat_text, *turn]


def _whole_texts(chat: ChatTemplate, place: str, sides: ChatSides | TextSides) -> list[str]:
    """Return the text of the prompt, and those of the prompt with either completion."""
    tokenizer = chat.tokenizer
    if isinstance(sides, TextSides):
        eos = tokenizer.eos_token
        if eos is None:
            raise ConfigError("the model's tokenizer has no EOS token to end a text with; give lists of messages")
        completions = [side if side.endswith(eos) else side + eos for side in (sides.chosen, sides.rejected)]
        return [valid_unicode(sides.prompt + completion) for completion in ("", *completions)]
    return [
        _template_text(tokenizer, sides.prompt, sides.template, place, add_generation_prompt=True),
        _template_text(tokenizer, sides.prompt + sides.chosen, sides.template, place),
        _template_text(tokenizer, sides.prompt + sides.rejected, sides.template, place),
    ]


def _template_text(tokenizer: Any, messages: Messages, template: Mapping[str, Any], place: str, **options: bool) -> str:
    return _rendered(place, partial(tokenizer.apply_chat_template, messages, tokenize=False, **options, **template))


def _rendered(place: str, render: Callable[[], Any]) -> str:
    try:
        return valid_unicode(str(render()))
    except Exception as error:  # templates may raise anything
        reason = excerpt(str(error), 120) or type(error).__name__
        raise DataError(
            f"{place}: the model's chat template cannot show its messages ({reason}); "
            "change the row, or use a model with another template"
        ) from error


def _check_scored(row: CheckedRow, pair: Pair) -> None:
    for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not all(segment.prompt_ids and segment.completion_ids for segment in segments):
            raise DataError(
                f"{row.place}: no token of its {side} side can be scored (prompt or completion is empty for this "
                "model's tokenizer); remove the row"
            )
