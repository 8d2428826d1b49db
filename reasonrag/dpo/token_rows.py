"""Preferences as text to preferences as token ids: what is scored of a step is exactly the step.

A policy never wrote more than its step: a stop string ended most of them, and no end token was sampled there. Trainers
that write the whole turn with the chat template score one all the same, in both completions of a pair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from reasonrag.core.errors import ConfigError, DataError
from reasonrag.core.text import one_line, valid_unicode
from reasonrag.core.types import Prompt
from reasonrag.llm.chat_template import ChatTemplate

TurnEnd = Literal["as_sampled", "always"]
Ids = tuple[int, ...]
Messages = list[dict[str, Any]]

_BATCH = 1000
_PROBE = "reasonrag"


@dataclass(frozen=True, slots=True)
class Segment:
    """One step in its own prompt: `[P]` ids that are read and `[C]` ids that are scored, C and P at least 1."""

    prompt_ids: Ids
    completion_ids: Ids

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference. Step pairs have one segment a side, trajectory pairs one a step.

    `margin` is the difference of the rewards, None where the data has none. `depth` counts the steps before the
    decision. `group` is data set and question; rows without a question's id are grouped by their prompt.
    """

    chosen: tuple[Segment, ...]
    rejected: tuple[Segment, ...]
    margin: float | None
    depth: int
    group: tuple[str, str]


@dataclass(frozen=True, slots=True)
class StepText:
    """A step as it was written. `end`: stop (at a stop string), turn (the policy ended its turn), length (cut off)."""

    prompt: Prompt
    text: str
    end: str


@dataclass(frozen=True, slots=True)
class StepSides:
    """Two steps, or two trajectories, whose ends are known."""

    chosen: tuple[StepText, ...]
    rejected: tuple[StepText, ...]


@dataclass(frozen=True, slots=True)
class ChatSides:
    """Two whole turns as lists of messages, TRL's conversational layout.

    `template` goes to the chat template: TRL's columns `tools` and `chat_template_kwargs`.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextSides:
    """Two texts that go on where a text ends, TRL's standard layout."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A checked row of the data, `place` for messages to people."""

    place: str
    sides: StepSides | ChatSides | TextSides
    margin: float | None
    depth: int
    group: tuple[str, str]


def encode(rows: Sequence[CheckedRow], chat: ChatTemplate, *, turn_end: TurnEnd) -> tuple[list[Pair], int]:
    """Token ids of every row, in order.

    A step's prompt is tokenised as at inference (`ChatTemplate.token_ids`), its text by itself. One end-of-turn token
    follows where the policy wrote one (`as_sampled`), or always. Rows whose ends are unknown are tokenised as TRL
    1.16's DPOTrainer does: the whole turn with the template's own end, or the text and the EOS token.

    Returns:
        The pairs, and in how many plain rows the prompt's tokens are no beginning of those of prompt and completion,
        so that TRL's rule moves the end of the prompt into what is scored.

    Raises:
        DataError: the chat template refuses a row, or nothing of a completion is left to score.
        ConfigError: an end-of-turn token is needed and the tokenizer has none.
    """
    encoder = _Encoder(chat, turn_end)
    encoder.read(rows)
    pairs = [encoder.pair(number, row) for number, row in enumerate(rows)]
    _check_scored(rows, pairs)
    return pairs, encoder.shifted


def end_of_turn(chat: ChatTemplate) -> int:
    """The token with which the policy ends its turn: the first special token that the template writes behind one.

    In some models that is not the EOS token (`<end_of_turn>` and `<eos>`); it is EOS where the template writes none.

    Raises:
        ConfigError: there is neither.
    """
    tokenizer = chat.tokenizer
    added = tokenizer.added_tokens_decoder
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    behind = ""
    with contextlib.suppress(DataError):  # a template may refuse a chat without, say, a system prompt
        _, _, behind = _render(tokenizer, messages, {}, "").partition(_PROBE)
    for token in tokenizer(behind, add_special_tokens=False)["input_ids"]:
        if token in added and added[token].special:
            return int(token)
    if tokenizer.eos_token_id is None:
        raise ConfigError("the model's tokenizer has no EOS token, and its chat template writes no end of a turn")
    return int(tokenizer.eos_token_id)


class _Encoder:
    """Reads all the texts first, so that each distinct one is tokenised once and in batches."""

    def __init__(self, chat: ChatTemplate, turn_end: TurnEnd) -> None:
        self.shifted = 0
        self._chat = chat
        self._always = turn_end == "always"
        self._end = cache(lambda: (end_of_turn(chat),))
        self._texts: dict[Prompt, str] = {}
        self._wholes: dict[int, list[str]] = {}
        shared = _Shared()
        # A template writes its special tokens into the text; nobody else may. A step was decoded without special
        # tokens, so one that is spelled out in it was written in ordinary ones.
        self._rendered = _Tokens(chat.tokenizer, shared, add_special_tokens=False)
        self._written = _Tokens(chat.tokenizer, shared, add_special_tokens=False, split_special_tokens=True)
        self._plain = _Tokens(chat.tokenizer, shared)

    def read(self, rows: Sequence[CheckedRow]) -> None:
        steps = []
        for number, row in enumerate(rows):
            if not isinstance(row.sides, StepSides):
                texts = self._wholes[number] = self._whole_texts(row.place, row.sides)
                self._whole_tokens(row.sides).want(*texts)
            else:
                steps += [(row.place, step) for step in (*row.sides.chosen, *row.sides.rejected)]
        for place, step in steps:
            if step.prompt not in self._texts:
                self._texts[step.prompt] = self._shown(step.prompt, place)
            self._written.want(valid_unicode(step.text))
        self._rendered.want(*self._texts.values())
        for tokens in (self._rendered, self._written, self._plain):
            tokens.read()

    def pair(self, number: int, row: CheckedRow) -> Pair:
        if not isinstance(row.sides, StepSides):
            tokens = self._whole_tokens(row.sides)
            chosen, rejected = self._whole(*(tokens[text] for text in self._wholes[number]))
        else:
            chosen = tuple(map(self._segment, row.sides.chosen))
            rejected = tuple(map(self._segment, row.sides.rejected))
        return Pair(chosen, rejected, row.margin, row.depth, row.group)

    def _segment(self, step: StepText) -> Segment:
        end = self._end() if self._always or step.end == "turn" else ()
        return Segment(self._rendered[self._texts[step.prompt]], self._written[valid_unicode(step.text)] + end)

    def _whole(self, prompt: Ids, chosen: Ids, rejected: Ids) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """TRL's rule: what is scored begins where the prompt and either sequence part."""
        border = min(_common(prompt, chosen), _common(prompt, rejected))
        self.shifted += border < len(prompt)
        return (Segment(prompt[:border], chosen[border:]),), (Segment(prompt[:border], rejected[border:]),)

    def _whole_tokens(self, sides: ChatSides | TextSides) -> _Tokens:
        return self._plain if isinstance(sides, TextSides) else self._rendered

    def _whole_texts(self, place: str, sides: ChatSides | TextSides) -> list[str]:
        """Of the prompt, and of it with either completion."""
        tokenizer = self._chat.tokenizer
        if isinstance(sides, TextSides):
            eos = tokenizer.eos_token
            if eos is None:
                raise ConfigError("the model's tokenizer has no EOS token to end a text with; give lists of messages")
            ends = ["" if side.endswith(eos) else eos for side in (sides.chosen, sides.rejected)]
            texts = (sides.prompt, sides.prompt + sides.chosen + ends[0], sides.prompt + sides.rejected + ends[1])
            return [valid_unicode(text) for text in texts]
        return [
            _render(tokenizer, sides.prompt, sides.template, place, add_generation_prompt=True),
            _render(tokenizer, sides.prompt + sides.chosen, sides.template, place),
            _render(tokenizer, sides.prompt + sides.rejected, sides.template, place),
        ]

    def _shown(self, prompt: Prompt, place: str) -> str:
        try:
            return self._chat.text(prompt)
        except Exception as error:  # templates raise what they like
            raise _refused(place, error) from error


class _Tokens:
    """Distinct texts and their ids, for one way to call the tokenizer."""

    def __init__(self, tokenizer: Any, shared: _Shared, **options: bool) -> None:
        self._tokenizer = tokenizer
        self._share = shared.__getitem__
        self._options = options
        self._wanted: dict[str, None] = {}
        self._ids: dict[str, Ids] = {}

    def want(self, *texts: str) -> None:
        self._wanted.update(dict.fromkeys(texts))

    def read(self) -> None:
        """Tokenise what is wanted."""
        wanted = list(self._wanted)
        for start in range(0, len(wanted), _BATCH):
            part = wanted[start : start + _BATCH]
            # `verbose` warns of texts above the model's context: lengths are our own business, and reported.
            found = self._tokenizer(part, verbose=False, return_attention_mask=False, **self._options)["input_ids"]
            self._ids.update((text, tuple(map(self._share, ids))) for text, ids in zip(part, found, strict=True))

    def __getitem__(self, text: str) -> Ids:
        return self._ids[text]


class _Shared(dict[int, int]):
    """One object an id: a tokenizer makes a new one for every token, which takes four times the memory."""

    def __missing__(self, key: int) -> int:
        self[key] = key
        return key


def _common(first: Ids, second: Ids) -> int:
    """How many ids two sequences begin with in common."""
    if second[: len(first)] == first:
        return len(first)
    return next(i for i, (a, b) in enumerate(zip((*first, None), (*second, None), strict=False)) if a != b)


def _render(tokenizer: Any, messages: Messages, template: Mapping[str, Any], place: str, **options: bool) -> str:
    try:
        shown = tokenizer.apply_chat_template(messages, tokenize=False, **options, **template)
    except Exception as error:  # templates raise what they like
        raise _refused(place, error) from error
    return valid_unicode(str(shown))


def _refused(place: str, error: Exception) -> DataError:
    reason = one_line(str(error))[:120] or type(error).__name__
    return DataError(
        f"{place}: the model's chat template cannot show its messages ({reason}); "
        "change the row, or use a model with another template"
    )


def _check_scored(rows: Sequence[CheckedRow], pairs: Sequence[Pair]) -> None:
    """Nothing to read, or nothing to score, is nothing to learn from."""
    for row, pair in zip(rows, pairs, strict=True):
        for side, segments in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if not all(segment.prompt_ids and segment.completion_ids for segment in segments):
                raise DataError(
                    f"{row.place}: no token of its {side} side can be scored (prompt or completion is empty for this "
                    "model's tokenizer); remove the row"
                )
