"""Convert prompts to text and token ids with a model's tokenizer and chat template.

A base model has no chat template: it gets a shipped one by name, or one of a file, and learns it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from reasonrag.core.errors import ConfigError, LLMError, ReasonRAGError, is_out_of_memory
from reasonrag.core.plugins import trusted
from reasonrag.core.settings import CHAT_TEMPLATES, named_path
from reasonrag.core.text import OPENINGS, excerpt, inert, map_texts, one_line, valid_unicode
from reasonrag.core.types import Message, Prompt, Span

_SHIPPED = Path(__file__).parent / "templates"
_PROBE = "reasonrag"
# A template gets so much for a short chat; real ones take milliseconds.
_TEMPLATE_S, _TEMPLATE_MIB, _TEMPLATE_CHARS = 2, 512, 1 << 19
_CHILD_S = 120
_QUESTION = Message("user", "?")
_TRIED = (
    (_QUESTION, Message("assistant", "?"), _QUESTION),
    (Message("system", "?"), _QUESTION),
    (Message("system", "?"), Message("tools", "[]"), _QUESTION, Message("call", '{"name": "f", "arguments": {}}')),
)


class ChatTemplate:
    """A tokenizer of transformers with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a loaded tokenizer; raise ConfigError if it has no chat template."""
        if not tokenizer.chat_template:
            flag = f"--chat-template {_fitting(tokenizer) or 'FILE'}"
            raise ConfigError(
                "the model's tokenizer has no chat template, as base models have none, so a chat cannot be shown to "
                f"it; add {flag}, whose end of a turn has to be in its vocabulary, or use an instruction-tuned model",
                add=flag,
            )
        self.tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)  # in Rust, if it has one

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
            ConfigError: the folder or model does not exist, or has no chat template; or `template` cannot
                be read, or ends a turn with a token that the model does not have.
        """
        from transformers import AutoTokenizer

        with loading(path_or_name):
            tokenizer = AutoTokenizer.from_pretrained(
                path_or_name, revision=revision, trust_remote_code=trust_remote_code and trusted(path_or_name, True)
            )
        if template is not None:
            tokenizer.chat_template = _read_template(template)
        chat = cls(tokenizer)
        chat._check(path_or_name if template is None else template)
        end = one_line(chat._behind_a_turn())
        if template is not None and end and chat._special(end) is None:
            fitting = _fitting(tokenizer)
            advice = f"--chat-template {fitting} fits it" if fitting else "write a FILE that ends turns with its EOS"
            raise ConfigError(
                f"chat template {template} ends a turn with {excerpt(end, 40)!r}, which is no special token of the "
                f"model's vocabulary, so a policy could not learn to stop there; {advice}"
            )
        return chat

    def _check(self, named: str) -> None:
        """Raise if the template shows no chat, or takes more time or memory than a short one is worth.

        Jinja's sandbox keeps a template from the machine, but
        limits neither, so a child process tries it first.
        """
        # A child by fork has the tokenizer already; a new process would load it, in seconds.
        child = os.fork()
        if not child:
            try:
                _limit_process()
                os._exit(self._longest_chat() > _TEMPLATE_CHARS)
            finally:  # also if memory has run out
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise ConfigError(
                f"the chat template of {named} takes more than {_TEMPLATE_S} s or {_TEMPLATE_MIB} MiB to show a chat "
                "of a few words; it is damaged or hostile: take another one (--chat-template)"
            )
        try:
            self._chat(Prompt((_QUESTION,)))
        except Exception as error:  # templates may raise anything
            raise ConfigError(f"the chat template of {named} cannot show a chat", quoting=error) from error

    def check_fits(self, model: Any) -> None:
        """Raise ConfigError if a chat holds a token that the model has no embedding of."""
        highest, known = max(self.token_ids(Prompt((_QUESTION,)))), len(model.get_input_embeddings().weight)
        if highest >= known:
            raise ConfigError(
                f"the tokenizer writes token {highest} in each chat, and the model knows {known}: call "
                "model.resize_token_embeddings(len(tokenizer)), and save both again"
            )

    def _longest_chat(self) -> int:
        longest = 0
        for messages in _TRIED:
            try:
                longest = max(longest, len(self._chat(Prompt(messages))))
            except MemoryError:
                raise
            except Exception:  # templates may refuse a chat, for example one with functions
                continue
        return longest

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the policy ends its turn: the first special one that the template writes after it.

        In some models that is not the EOS token (`<end_of_turn>`
        and `<eos>`); it is EOS if the template writes none.

        Raises:
            ConfigError: the template writes none and the tokenizer has no EOS token.
        """
        if (token := self._special(self._behind_a_turn())) is None:
            token = self.tokenizer.eos_token_id
        if token is None:
            raise ConfigError("the model's tokenizer has no EOS token, and its chat template writes no end of a turn")
        return int(token)

    def _special(self, text: str) -> int | None:
        """Return the first special token in a text, or None."""
        added = self.tokenizer.added_tokens_decoder
        return next((token for token in self.encode(text) if token in added and added[token].special), None)

    def _behind_a_turn(self) -> str:
        """Return the text that the template writes after an assistant's words; "" if it cannot show such a chat."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False)).partition(_PROBE)[2]
        except Exception:  # templates may raise anything, for example about a chat without a system prompt
            return ""

    def text(self, prompt: Prompt) -> str:
        """Return the chat as the model reads it, ending with the open turn so far."""
        return self._chat(prompt) + "".join(map(self.span_text, prompt.turn))

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `[P]` ids of the chat, then of each span of the open turn by itself; sampled ids are kept."""
        return sum(map(self.span_ids, prompt.turn), self.chat_ids(prompt))

    def chat_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return `[P]` ids of the chat up to the open turn. The template writes the start token, so none is added."""
        return self.encode(self._chat(prompt))

    def span_ids(self, span: Span) -> tuple[int, ...]:
        """Return the sampled ids of a span, or the ids of its text alone."""
        return self.encode(self.span_text(span)) if span.token_ids is None else span.token_ids

    def span_text(self, span: Span) -> str:
        """Return the text of a span: the policy's words as they are, inserted text through `without_tokens`."""
        return valid_unicode(span.text) if span.by_policy else self.without_tokens(valid_unicode(span.text))

    def without_tokens(self, text: str) -> str:
        """Return a text of a format, without any characters that this tokenizer reads as one of its added tokens.

        Tags stay: `inert` removed them from texts from outside, so the tags here are the format's own,
        and a policy may have tokens for them.
        """
        finder, contents, normalises = self._added
        while normalises or any(content in text for content in contents):
            # Again after each change: what is left of two tokens may be a third one.
            encoding = finder.encode(text, add_special_tokens=False)
            chars = list(text)
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                token = text[start:end].lstrip()
                # Id 0 is text without a token. A tag of the
                # format would be changed by `inert`, and stays.
                if id and token and inert(token) == token:
                    first = unicodedata.normalize("NFKC", token[0])
                    chars[end - len(token)] = OPENINGS.get(first, " ")
            text, before = "".join(chars), text
            if text == before:
                break
        return text

    @cached_property
    def _added(self) -> tuple[Any, list[str], bool]:
        """A tokenizer of the added tokens that may stand in texts from outside alone, these, and whether it normalises.

        It finds the same tokens as the whole tokenizer, also forms that become
        a token when they are normalised. Blanks, words and signs stay unless
        they are special tokens: a vocabulary may have been extended by them.
        """
        from tokenizers import Tokenizer, models

        normalizer = self._fast and self._fast.normalizer
        tokens = [
            token
            for token in self.tokenizer.added_tokens_decoder.values()
            if (re.search(r"[<>\[\]{}|\uff5c].", token.content) or (token.special and token.content.strip()))
            and (inert(token.content) == token.content or (token.normalized and normalizer))
        ]
        finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if normalises := bool(normalizer) and any(token.normalized for token in tokens):
            finder.normalizer = normalizer
        finder.add_tokens(tokens)
        return finder, [token.content for token in tokens], normalises

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without special tokens around it."""
        text = valid_unicode(text)
        # `truncation` and `padding` stay set from an earlier
        # call of the tokenizer; only a full call resets them.
        fast = self._fast
        if fast is None or fast.truncation or fast.padding or fast.encode_special_tokens:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        try:
            # Without the offset of each token, which takes a third of the time and is not used here.
            (encoding,) = fast.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust: a pattern of the tokenizer took too long
                raise
            raise LLMError("the model's tokenizer cannot read a text", quoting=error, cause="refused") from None
        return tuple(encoding.ids)

    def _chat(self, prompt: Prompt) -> str:
        chat = chat_with_tools(prompt.messages)
        messages = chat.pop("messages")
        for message in messages:
            message["content"] = self.without_tokens(message["content"])
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = map_texts(call["function"]["arguments"], self.without_tokens)
        return str(self.tokenizer.apply_chat_template(messages, **chat, tokenize=False, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, with its blanks unchanged."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_chat_template(path_or_name: str, template: str | None = None) -> None:
    """Raise ConfigError if a model's folder or a named template does not exist, without loading a tokenizer."""
    check_folder(path_or_name)
    if template is not None:
        _read_template(template)


def template_identity(template: str | None) -> str:
    """Return the suffix that a template adds to a model's name: "", or its name with a checksum of its text."""
    if template is None:
        return ""
    return f"+{Path(template).stem}@{hashlib.sha256(_read_template(template).encode()).hexdigest()[:8]}"


def _read_template(template: str) -> str:
    file = _SHIPPED / f"{template}.jinja" if template in CHAT_TEMPLATES else named_path(template)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {template!r} is neither {', '.join(CHAT_TEMPLATES)} nor a file that can be read "
            f"({type(error).__name__}); give one of these names, or the path of a Jinja file"
        ) from error


def _fitting(tokenizer: Any) -> str | None:
    """Return the first shipped template whose end of a turn is in a tokenizer's vocabulary, or None."""
    vocabulary = tokenizer.get_vocab()
    return next((name for name, end in CHAT_TEMPLATES.items() if end in vocabulary), None)


def _limit_process() -> None:
    """Bound the CPU time and memory of this process, which tries a template."""
    import resource

    signal.alarm(_CHILD_S)  # for a child that waits: another thread may have held a lock when it was forked
    limits = {resource.RLIMIT_CPU: _TEMPLATE_S, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError):  # not on Linux
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        # The address space that this process has already counts.
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + (_TEMPLATE_MIB << 20)
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def chat_with_tools(messages: Sequence[Message], *, as_sent: bool = False) -> dict[str, Any]:
    """Return `messages` and, if functions may be called, `tools`, as a chat template takes them.

    With `as_sent` they are as a server takes them: the arguments of a call are a text.

    >>> messages = [Message("user", "Who?"), Message("call", '{"name": "search", "arguments": {"query": "a"}}')]
    >>> called = chat_with_tools([*messages, Message("tool", "Spielberg.")])["messages"]
    >>> [message["role"] for message in called], called[1]["tool_calls"][0]["function"]["arguments"]
    (['user', 'assistant', 'tool'], {'query': 'a'})
    """
    chat: list[dict[str, Any]] = []
    tools: dict[str, Any] = {}
    # Calls without a result, which come in the order of the calls.
    waiting: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content = valid_unicode(message.content)
        if message.role == "tools":
            tools = {"tools": json.loads(content)}
        elif message.role == "call":
            function = json.loads(content)
            if as_sent:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            if not chat or chat[-1]["role"] != "assistant":
                chat.append({"role": "assistant", "content": ""})
            # Mistral's template asks for ids of nine characters.
            waiting.append({"id": f"call{number:05}", "type": "function", "function": function})
            chat[-1].setdefault("tool_calls", []).append(waiting[-1])
        elif message.role == "tool":
            call = waiting.pop(0)
            answered = {"tool_call_id": call["id"], "name": call["function"]["name"]}
            chat.append({"role": "tool", **answered, "content": content})
        else:
            chat.append({"role": message.role, "content": content})
    return {"messages": chat, **tools}


def check_folder(path_or_name: str) -> None:
    """Raise ConfigError if a name is plainly a path and does not exist, before the Hub is asked, or holds a pipe."""
    path = named_path(path_or_name)
    looks_like_path = path.is_absolute() or path_or_name.startswith(("./", "../", "~")) or path_or_name.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ConfigError(f"there is no folder {path_or_name!r} to load a model from")
    for file in path.iterdir() if path.is_dir() else ():
        if file.exists() and not (file.is_file() or file.is_dir()):  # reading it would wait for ever
            raise ConfigError(f"{file} is a pipe or a device, where a file of a model should be; delete it")


def load_causal(path_or_name: str, **options: Any) -> Any:
    """Return a causal language model of transformers; raise ConfigError if it cannot be loaded, or lacks weights."""
    from transformers import AutoModelForCausalLM

    options = {"use_safetensors": True, **options, "output_loading_info": True}
    with loading(path_or_name):
        model, found = AutoModelForCausalLM.from_pretrained(path_or_name, **options)
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise ConfigError(
            f"model {path_or_name!r} lacks {len(missing)} of its weights ({', '.join(missing[:3])}); copy it again"
        )
    # Unused parts, such as a vision tower, are fine; more layers than the configuration counts are not.
    used = {re.sub(r"\d+", "", name) for name in model.state_dict()}
    if further := sorted(name for name in found["unexpected_keys"] if re.sub(r"\d+", "", name) in used):
        raise ConfigError(
            f"model {path_or_name!r} has {len(further)} weights of layers that its config.json does not count "
            f"({', '.join(further[:3])}); put the config.json of these weights there"
        )
    return model


@contextlib.contextmanager
def loading(path_or_name: str) -> Iterator[None]:
    """Raise a ConfigError if a model's folder does not exist, or for whatever transformers raises about its files."""
    check_folder(path_or_name)
    try:
        yield
    except Exception as error:  # of damaged files nearly anything, RecursionError and MemoryError too
        if isinstance(error, ReasonRAGError) or is_out_of_memory(error):
            raise  # ours, or not about the files
        reason = excerpt(re.split(r"\W*(?:Please c|C)heck your", str(error))[0], 200) or type(error).__name__
        reason += "" if named_path(path_or_name).is_dir() else "; nor is there a folder of that name"
        raise ConfigError(
            f"model {path_or_name!r} cannot be loaded: {reason} (give a folder saved by save_pretrained, or a Hub "
            "name; a Hub name that is not in the local cache needs a network)"
        ) from error
