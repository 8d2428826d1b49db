"""The tiny policy's tokenizer: a word is a token, and so is each fixed phrase of the format.

Whole words make copying a name two tokens long; whole phrases keep prompts near 50 tokens. Blanks between tokens are
not kept but put back by rule, so a word has one token wherever it stands, behind a tag too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
_PIECE = "|".join((*map(re.escape, (*PHRASES, *_TAGS)), r"\n", r"[?!.,:;<>]", r"[^\s?!.,:;<>]+"))

# transformers finds out how tokens join (for `stop_strings`) by decoding each behind this word, which must be known.
_PROBE = "abcdef"

# A turn of the policy is its text and the end token; any other turn is its text on lines of its own.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ '<|assistant|>' + message.content + '<|end|>' }}"
    "{%- else -%}{{ message.content + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def pieces(text: str) -> list[str]:
    """The tokens of a text, as the tokenizer cuts it: blanks are dropped, line ends are kept.

    >>> pieces("So the answer is <answer>Port Kelda</answer>")
    ['So the answer is <answer>', 'Port', 'Kelda', '</answer>']
    """
    return re.findall(_PIECE, text)


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the fixed phrases and every piece of `texts`; any other word is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNKNOWN, ASSISTANT, END, _PROBE]
    found = sorted({piece for text in texts for piece in pieces(text)} - {*PHRASES, *_TAGS})
    vocabulary = {token: place for place, token in enumerate([*special, "\n", *PHRASES, *_TAGS, *found])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="removed", invert=True)
    blanks = [(f"{opening} ", opening) for opening in (*PHRASES[:3], *_TAGS[::2], "\n")]
    blanks += [(f" {closing}", closing) for closing in (*_TAGS[1::2], *"?!.,:;\n")]
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
