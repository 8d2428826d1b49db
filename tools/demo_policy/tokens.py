"""The tiny policies' tokenizers: each word is one token, and so is each tag and fixed phrase of a format.

With whole words a name is two tokens to copy; with whole phrases a prompt has about 50 tokens. Blanks between tokens
are dropped and restored by rule, so a word has the same token everywhere, also behind a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, ASSISTANT, END = "<|pad|>", "<|unknown|>", "<|assistant|>", "<|end|>"

# What the format writes around queries, evidence and answers: each is one token.
PHRASES = (
    "So the next query is <query>",
    "Based on the query, the relevant evidence is <evidence>",
    "So the answer is <answer>",
    "Previous Thoughts:",
    "Question:",
    "Documents:",
    "None found.",
    "Reason.",
    "Ground.",
    "Answer.",
)
_TAGS = ("<query>", "</query>", "<evidence>", "</evidence>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class Alphabet:
    """The fixed tokens of a format, besides words, line ends and punctuation.

    Decoding puts no blank behind an `opening` token and none before a `closing` one.
    """

    fixed: tuple[str, ...]
    opening: tuple[str, ...]
    closing: tuple[str, ...]

    def pattern(self) -> str:
        """Return a regular expression that matches one token."""
        return "|".join((*map(re.escape, self.fixed), r"\n", r"[?!.,:;<>]", r"[^\s?!.,:;<>]+"))

    def pieces(self, text: str) -> list[str]:
        """Return the tokens of a text; blanks are dropped, line ends are kept."""
        return _compiled(self).findall(text)


@cache
def _compiled(alphabet: Alphabet) -> re.Pattern[str]:
    return re.compile(alphabet.pattern())


# For the policy of ReasonRAG's format.
REASONRAG = Alphabet((*PHRASES, *_TAGS), (*PHRASES[:3], *_TAGS[::2]), _TAGS[1::2])

_NAMES = (
    *("think", "step", "reasoning", "search", "context", "conclusion"),
    *("information", "reflect", "tool_call", "tool_response", "answer"),
)
_MARKS = tuple(mark for name in _NAMES for mark in (f"<{name}>", f"</{name}>"))
# The instructions of the `brief` prompts, and the numbers of a plan.
_TITLES = ("Search R1.", "Steps.", "Plan.", "Reflect.", "Know.", "Question:", "None found.", "1.", "2.", "3.")

# For the policy of the formats of one growing turn.
STREAM = Alphabet((*_TITLES, *_MARKS), _MARKS, _MARKS)

# For `stop_strings`, transformers decodes each token behind this word, so the vocabulary must have it.
_PROBE = "abcdef"

# A turn of the policy is its text and the end token; any other turn is its text and a line end.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ '<|assistant|>' + message.content + '<|end|>' }}"
    "{%- else -%}{{ message.content + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def make_tokenizer(texts: Iterable[str], alphabet: Alphabet = REASONRAG) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the alphabet and every piece of `texts`; any other word is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNKNOWN, ASSISTANT, END, _PROBE]
    found = sorted({piece for text in texts for piece in alphabet.pieces(text)} - {*alphabet.fixed})
    vocabulary = {token: place for place, token in enumerate([*special, "\n", *alphabet.fixed, *found])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(alphabet.pattern()), behavior="removed", invert=True)
    blanks = [(f"{opening} ", opening) for opening in (*alphabet.opening, "\n")]
    blanks += [(f" {closing}", closing) for closing in (*alphabet.closing, *"?!.,:;\n")]
    core.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            *(decoders.Replace(written, meant) for written, meant in blanks),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )
