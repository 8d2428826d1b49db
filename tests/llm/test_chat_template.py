from __future__ import annotations

import os

import pytest

from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.settings import CHAT_TEMPLATES
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.llm.chat_template import ChatTemplate, check_folder
from reasonrag.llm.local import end_token_ids
from tests.llm.tiny import save_base_model, save_tiny_model

PROMPT = Prompt((Message("system", "Be brief."), Message("user", "Who?")), turn=(Span("<query>"),))


def test_a_prompt_is_rendered_by_the_models_own_template(tiny_model):
    text = ChatTemplate.load(str(tiny_model)).text(PROMPT)
    assert text == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWho?<|end|>\n<|start|>assistant\n<query>"


def test_blanks_before_punctuation_survive_decoding(tiny_model):
    chat = ChatTemplate.load(str(tiny_model))
    text = "U.S. Navy , 3.5 million . It 's"
    assert chat.decode(chat.tokenizer(text)["input_ids"]) == text


SHOWN = {
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\nWho?<end_of_turn>\n<start_of_turn>model\n<query>",
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<query>"
    ),
    "llama3": (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<query>"
    ),
}
ALL_WORDS = ("<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model whose vocabulary has the tokens of all shipped templates."""
    return save_base_model(tmp_path_factory.mktemp("base"), words=ALL_WORDS)


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_a_base_model_gets_a_shipped_template_and_its_end_of_turn(template, base, tmp_path):
    chat = ChatTemplate.load(str(base), template=template)
    assert chat.text(PROMPT) == SHOWN[template.removesuffix("-tools")]
    assert chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn) == CHAT_TEMPLATES[template]
    assert chat.tokenizer.eos_token == "<eos>"
    chat.tokenizer.save_pretrained(tmp_path)
    again = ChatTemplate.load(str(tmp_path))
    assert (again.text(PROMPT), again.end_of_turn) == (chat.text(PROMPT), chat.end_of_turn)


def test_a_template_of_a_file_may_end_turns_with_the_end_of_text(base, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    chat = ChatTemplate.load(str(base), template=str(file))
    assert chat.end_of_turn == chat.tokenizer.eos_token_id


def refusal(folder, template=None):
    with pytest.raises(ConfigError) as caught:
        ChatTemplate.load(str(folder), template=template)
    return caught.value


def test_a_model_without_a_template_is_refused_with_the_one_that_fits(base, tmp_path):
    error = refusal(base)
    assert error.add == "--chat-template gemma"
    assert "no chat template" in str(error)
    unknown = refusal(save_base_model(tmp_path, words=()))
    assert unknown.add == "--chat-template FILE"


def test_a_template_that_the_model_cannot_end_a_turn_of_is_refused(tmp_path):
    folder = save_base_model(tmp_path)
    assert "'<|im_end|>', which is no special token" in str(refusal(folder, "chatml"))
    assert "--chat-template gemma fits it" in str(refusal(folder, "chatml"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "neither gemma, chatml, llama3, chatml-tools, llama3-tools nor a file"),
        ("{% for %}", "cannot show a chat"),
    ],
)
def test_a_template_that_is_none_is_refused(text, match, base, tmp_path):
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    assert match in str(refusal(base, str(file)))


def test_generation_stops_at_the_templates_end_of_a_turn(base):
    from transformers import AutoModelForCausalLM

    chat, model = ChatTemplate.load(str(base), template="gemma"), AutoModelForCausalLM.from_pretrained(base)
    ends = {chat.tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<end_of_turn>")}
    assert end_token_ids(model, chat) == ends


def test_the_end_of_a_turn_is_the_templates_not_the_tokenizers(tmp_path):
    chat = ChatTemplate.load(str(save_tiny_model(tmp_path)))
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.content }} <|start|>\n{% endfor %}"
    start = chat.tokenizer.convert_tokens_to_ids("<|start|>")
    assert (chat.end_of_turn, chat.tokenizer.eos_token_id) == (start, start + 1)


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}\n{% endfor %}", "{{ raise_exception('a system prompt') }}"]
)
def test_the_end_of_a_turn_is_eos_where_the_template_shows_none(template, tmp_path):
    chat = ChatTemplate.load(str(save_tiny_model(tmp_path)))
    chat.tokenizer.chat_template = template
    assert chat.end_of_turn == chat.tokenizer.eos_token_id
    chat.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no EOS token"):
        _ = ChatTemplate(chat.tokenizer).end_of_turn


def test_a_pipe_in_a_models_folder_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is a pipe or a device"):
        check_folder(str(tmp_path))


def test_a_pattern_of_the_tokenizer_that_takes_too_long_fails_a_text_and_not_the_run(tiny_model):
    from tokenizers import Regex, pre_tokenizers

    chat = ChatTemplate.load(str(tiny_model))
    chat.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(LLMError, match="tokenizer cannot read a text: Onig"):
        chat.encode("a" * 64 + "!")
    assert chat.encode("a")
