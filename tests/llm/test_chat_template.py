from __future__ import annotations

import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.llm.chat_template import ChatTemplate

PROMPT = Prompt((Message("system", "Be brief."), Message("user", "Who?")), turn=(Span("<query>"),))


def test_a_prompt_is_rendered_by_the_models_own_template(tiny_model):
    text = ChatTemplate.load(str(tiny_model)).text(PROMPT)
    assert text == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWho?<|end|>\n<|start|>assistant\n<query>"


def test_token_ids_are_those_of_the_text_and_nothing_more(tiny_model):
    chat = ChatTemplate.load(str(tiny_model))
    ids = chat.token_ids(PROMPT)
    assert chat.tokenizer.decode(ids) == chat.text(PROMPT)


def test_blanks_before_punctuation_survive_decoding(tiny_model):
    chat = ChatTemplate.load(str(tiny_model))
    text = "U.S. Navy , 3.5 million . It 's"
    assert chat.decode(chat.tokenizer(text)["input_ids"]) == text


def test_a_path_that_leads_nowhere_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        ChatTemplate.load(str(tmp_path / "nothing"))
