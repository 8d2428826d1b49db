"""Convert prompts to text and token ids with a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.secrets import excerpt
from reasonrag.core.text import valid_unicode
from reasonrag.core.types import Prompt, Span


class ChatTemplate:
    """A tokenizer of transformers with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a loaded tokenizer.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template, so a chat cannot be shown to it; "
                "use an instruction-tuned model, or put a chat_template.jinja into its folder"
            )
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, path_or_name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ChatTemplate:
        """Load the tokenizer of a folder or a Hub name.

        Raises:
            ConfigError: the folder or model does not exist, or has no chat template.
        """
        from transformers import AutoTokenizer

        check_folder(path_or_name)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path_or_name, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise cannot_load(path_or_name, error) from error
        return cls(tokenizer)

    def text(self, prompt: Prompt) -> str:
        """Return the chat as the model reads it, ending with the open turn so far."""
        return self._chat(prompt) + valid_unicode(prompt.prefix)

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `[P]` ids of the chat, then of each span of the open turn by itself; sampled ids are kept."""
        token_ids = list(self.chat_ids(prompt))
        for span in prompt.turn:
            token_ids += self.span_ids(span)
        return tuple(token_ids)

    def chat_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `[P]` ids of the chat up to the open turn. The template writes the start token, so none is added."""
        return self.encode(self._chat(prompt))

    def span_ids(self, span: Span) -> tuple[int, ...]:
        """Return the sampled ids of a span, or the ids of its text alone."""
        return self.encode(span.text) if span.token_ids is None else span.token_ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without special tokens around it."""
        return tuple(self.tokenizer(valid_unicode(text), add_special_tokens=False)["input_ids"])

    def _chat(self, prompt: Prompt) -> str:
        messages = [{"role": m.role, "content": valid_unicode(m.content)} for m in prompt.messages]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, with its blanks unchanged."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_folder(path_or_name: str) -> None:
    """Raise if a name is plainly a path and does not exist, before the Hub is asked for it.

    Raises:
        ConfigError: the folder does not exist.
    """
    path = Path(path_or_name).expanduser()
    looks_like_path = path.is_absolute() or path_or_name.startswith(("./", "../", "~")) or path_or_name.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ConfigError(f"there is no folder {path_or_name!r} to load a model from")


def cannot_load(path_or_name: str, error: Exception) -> ConfigError:
    """Return the error for a model that transformers refuses to load."""
    reason = excerpt(str(error), 200) or type(error).__name__
    return ConfigError(
        f"model {path_or_name!r} cannot be loaded: {reason} (give a folder saved by save_pretrained, or a Hub name; "
        "a Hub name that is not in the local cache needs a network)"
    )
