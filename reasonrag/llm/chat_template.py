"""Convert prompts to text and token ids with a model's tokenizer and chat template.

A base model has no chat template: it gets a shipped one by name, or one of a file, and learns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError
from reasonrag.core.secrets import excerpt
from reasonrag.core.settings import CHAT_TEMPLATES
from reasonrag.core.text import one_line, valid_unicode
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.llm.openai_wire import chat_with_tools

_SHIPPED = Path(__file__).parent / "templates"
_PROBE = "reasonrag"


class ChatTemplate:
    """A tokenizer of transformers with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a loaded tokenizer; raise ConfigError if it has no chat template."""
        if not tokenizer.chat_template:
            raise _no_template("the model's tokenizer", str(tokenizer.get_vocab().keys()))
        self.tokenizer = tokenizer

    @classmethod
    def load(
        cls,
        path_or_name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        template: str | None = None,
    ) -> ChatTemplate:
        """Load the tokenizer of a folder or a Hub name.

        Args:
            path_or_name: the folder, or the name.
            revision: revision of a Hub model.
            trust_remote_code: whether to run code that comes with the model.
            template: chat template instead of the model's own: a name of `CHAT_TEMPLATES`, or a file.

        Raises:
            ConfigError: the folder or model does not exist, or has no chat template; or `template` cannot be read, or
                ends a turn with a token that the model does not have.
        """
        check_chat_template(path_or_name, template)
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path_or_name, revision=revision, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise cannot_load(path_or_name, error) from error
        if template is None:
            return cls(tokenizer)
        tokenizer.chat_template = _read_template(template)
        chat = cls(tokenizer)
        chat._check_end_of_turn(template)
        return chat

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the policy ends its turn: the first special one that the template writes behind it.

        In some models that is not the EOS token (`<end_of_turn>` and `<eos>`); it is EOS if the template writes none.

        Raises:
            ConfigError: there is neither.
        """
        added = self.tokenizer.added_tokens_decoder
        for token in self.encode(self._behind_a_turn()):
            if token in added and added[token].special:
                return token
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the model's tokenizer has no EOS token, and its chat template writes no end of a turn")
        return int(self.tokenizer.eos_token_id)

    def _behind_a_turn(self) -> str:
        """Return what the template writes behind the words of an assistant; "" if it cannot show such a chat."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False)).partition(_PROBE)[2]
        except Exception:  # templates may raise anything, for example about a chat without a system prompt
            return ""

    def _check_end_of_turn(self, template: str) -> None:
        """Raise if the template's end of a turn is not one special token: a policy could not learn to stop there."""
        try:
            self._chat(Prompt((Message("system", "?"), Message("user", "?"))))
        except Exception as error:  # templates may raise anything
            raise ConfigError(
                f"chat template {template} cannot show a chat with a system message", quoting=error
            ) from error
        end = one_line(self._behind_a_turn())
        added = self.tokenizer.added_tokens_decoder
        if end and not any(token in added and added[token].special for token in self.encode(end)):
            raise _no_end(template, end, str(self.tokenizer.get_vocab().keys()))

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
        text = valid_unicode(text)
        fast = self.tokenizer.backend_tokenizer if getattr(self.tokenizer, "is_fast", False) else None
        # A call of the tokenizer sets what the one before it has left.
        if fast is None or fast.truncation or fast.padding or fast.encode_special_tokens:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # Where in the text each token stands takes a third of the time, and nobody asks.
        (encoding,) = fast.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)

    def _chat(self, prompt: Prompt) -> str:
        chat = chat_with_tools(prompt.messages)
        messages = chat.pop("messages")
        return str(self.tokenizer.apply_chat_template(messages, **chat, tokenize=False, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, with its blanks unchanged."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_chat_template(path_or_name: str, template: str | None = None) -> None:
    """Raise if a model's folder does not exist or a chat cannot be shown to the model, without loading its tokenizer.

    Of a Hub name nothing is known before its tokenizer is loaded.

    Raises:
        ConfigError: there is no such folder; it has no chat template and `template` is None; or there is no such
            template.
    """
    check_folder(path_or_name)
    if template is not None:
        _read_template(template)
    folder = Path(path_or_name)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return
    vocabulary, configured = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    if template is None:
        own = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
        if not own and '"chat_template"' not in configured and '"auto_map"' not in configured:
            raise _no_template(path_or_name, vocabulary)
    elif (end := CHAT_TEMPLATES.get(template)) and end not in vocabulary:
        raise _no_end(template, end, vocabulary)


def template_identity(template: str | None) -> str:
    """Return what a template adds to a model's name: "", or its name with a checksum of its text."""
    if template is None:
        return ""
    return f"+{Path(template).stem}@{hashlib.sha256(_read_template(template).encode()).hexdigest()[:8]}"


def _read_template(template: str) -> str:
    file = _SHIPPED / f"{template}.jinja" if template in CHAT_TEMPLATES else Path(template).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {template!r} is neither {', '.join(CHAT_TEMPLATES)} nor a file that can be read "
            f"({type(error).__name__}); give one of these names, or the path of a Jinja file"
        ) from error


def _fitting(vocabulary: str) -> list[str]:
    """Return the shipped templates whose end of a turn is in the text of a vocabulary."""
    return [name for name, end in CHAT_TEMPLATES.items() if end in vocabulary]


def _no_template(model: str, vocabulary: str) -> ConfigError:
    fitting = _fitting(vocabulary)
    known = f"whose {CHAT_TEMPLATES[fitting[0]]} is in its vocabulary" if fitting else "or one of a FILE"
    flag = f"--chat-template {fitting[0] if fitting else 'FILE'}"
    return ConfigError(
        f"{model} has no chat template, as base models have none, so a chat cannot be shown to it; add {flag}, "
        f"{known}, or use an instruction-tuned model",
        add=flag,
    )


def _no_end(template: str, end: str, vocabulary: str) -> ConfigError:
    fitting = _fitting(vocabulary)
    advice = f"--chat-template {fitting[0]} fits it" if fitting else "write a FILE that ends turns with its EOS"
    return ConfigError(
        f"chat template {template} ends a turn with {excerpt(end, 40)!r}, which is no special token of the model's "
        f"vocabulary; {advice}"
    )


def check_folder(path_or_name: str) -> None:
    """Raise ConfigError if a name is plainly a path and does not exist, before the Hub is asked for it."""
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
