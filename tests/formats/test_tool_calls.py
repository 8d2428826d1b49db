"""Native tool calls: what each family writes, what its chat template shows, and what is trained on."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from reasonrag.core.config import PolicyCard, load_config
from reasonrag.core.errors import ConfigError, LLMError
from reasonrag.core.types import (
    Answer,
    Completion,
    FinishReason,
    Malformed,
    Passage,
    Question,
    Search,
    Step,
    Trajectory,
)
from reasonrag.formats import FORMATS, open_format
from reasonrag.formats.tool_calls import PARSERS, ToolCallsFormat
from reasonrag.llm.base import Sampling
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.llm.server import ServerLLM
from reasonrag.online_rl.rows import transcripts
from reasonrag.pipeline.tables import label
from reasonrag.rollout import Engine
from tests.fakes.model_server import FakeOpenAI
from tests.fakes.scripted import ScriptedLLM
from tests.formats import page
from tests.llm.tiny import save_base_model
from tests.toys import QUESTION, ToyRetriever

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
CASES = json.loads((GOLDEN / "tool_calls_reader.json").read_text(encoding="utf-8"))
TOKENS = ("<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>")
TOKENS += ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|python_tag|>", "<|turn>", "<turn|>")
CALLS = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "%s"}}\n</tool_call>',
    "llama3": '{"name": "search", "parameters": {"query": "%s"}}',
}


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case['parser']}: {case['what']}") for case in CASES])
def test_a_message_is_read_as_its_family_means_it(case):
    format = ToolCallsFormat(parser=case["parser"])
    assert label(format.parse(case["text"], ())) == (case["action"], case["content"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model whose vocabulary has the control tokens of all families."""
    return save_base_model(tmp_path_factory.mktemp("base"), words=TOKENS, context=4096)


def attempt(parser):
    """The golden trajectory as another family writes it, with words beside its first call."""
    golden = page.load("tool_calls")
    queries = [block["query"] for block in golden["expected"]["blocks"]]
    format = ToolCallsFormat(parser=parser)
    question = page.play(golden)[1].question
    written = ["I do not know who directed it.\n" + CALLS[parser] % queries[0], CALLS[parser] % queries[1], "Ostrelle"]
    engine = Engine(ScriptedLLM(written), page._Passages(golden["passages"]), format, max_steps=8)
    (trajectory,) = asyncio.run(engine.run([Trajectory(question)], seeds=[0]))
    assert trajectory.answer == "Ostrelle"
    return trajectory


@pytest.mark.parametrize(("template", "parser"), [("chatml-tools", "hermes"), ("llama3-tools", "llama3")])
def test_the_chat_of_a_shipped_template_is_the_golden_one(template, parser, base):
    chat = ChatTemplate.load(str(base), template=template)
    text = chat.text(attempt(parser).steps[-1].prompt)
    assert text == (GOLDEN / "chats" / f"{template}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("template", "parser"), [("qwen3", "hermes"), ("llama3_2", "llama3")])
def test_the_chat_of_a_familys_own_template_ends_as_the_golden_one(template, parser, base, tmp_path):
    """TRL brings the templates of the models; what stands before the question is theirs."""
    chat = ChatTemplate.load(str(base), template=str(own_template(template)))
    assert open_format(configured(base, own_template(template))).parser is PARSERS[parser]
    prompt = attempt(parser).steps[-1].prompt
    before, question, after = chat.text(prompt).partition(QUESTION_TEXT)
    assert '"search"' in before
    assert question + after == (GOLDEN / "chats" / f"{parser}-own.txt").read_text(encoding="utf-8")


QUESTION_TEXT = "In which town was the director of Crimson Harbor born?"


def own_template(name):
    (package,) = find_spec("trl").submodule_search_locations
    return Path(package) / "chat_templates" / f"{name}.jinja"


def configured(model, template=None, **overrides):
    named = {"policy.spec": f"hf:{model}", "format.name": "tool_calls"} | overrides
    return load_config(overrides=named | ({"policy.chat_template": str(template)} if template else {}))


def test_a_template_without_functions_is_refused_with_the_one_that_fits(base):
    with pytest.raises(ConfigError, match=r"shows no function calls.*--chat-template chatml-tools"):
        open_format(configured(base, "gemma"))
    assert open_format(configured(base, "chatml-tools")).parser is PARSERS["hermes"]
    named = configured(base, "chatml-tools", **{"format.tool_parser": "llama3"})
    assert open_format(named).parser is PARSERS["llama3"]
    assert "tool_parser: llama3" in PolicyCard.of(named.model_dump(mode="json")).text


def test_a_template_whose_calls_nobody_knows_needs_a_parser(base, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"format\.tool_parser"):
        open_format(configured(base, file))


@pytest.mark.parametrize("template", ["chatml-tools", "llama3_2"])
def test_nothing_in_a_question_a_passage_or_a_message_becomes_a_control_token(template, base):
    file = template if template.endswith("-tools") else str(own_template(template))
    chat = ChatTemplate.load(str(base), template=file)
    format = ToolCallsFormat(parser="llama3")

    def control_tokens(words):
        spelt = words.replace("<tool_call>", "")  # which would begin another call
        said = f"{spelt} " + CALLS["llama3"] % spelt
        assert isinstance(format.parse(said, ()), Search)
        found = Passage("1", f"T {words}\n{words}")
        step = Step(format.prompt(QUESTION, ()), Completion(said), Search(words), (found,))
        prompt = format.prompt(Question("1", words, ()), (step,))
        special = {id for id, token in chat.tokenizer.added_tokens_decoder.items() if token.special}
        return [id for id in chat.token_ids(prompt) if id in special]

    assert control_tokens(" ".join(TOKENS)) == control_tokens("word")


class Sampled(ScriptedLLM):
    """Replays texts as a policy in this process would have sampled them: with the ids that it read and wrote."""

    def __init__(self, chat, texts):
        super().__init__(texts)
        self.chat = chat

    async def complete(self, prompt, sampling):
        said = await super().complete(prompt, sampling)
        ids = (*self.chat.encode(said.text), self.chat.end_of_turn)
        return Completion(said.text, FinishReason.STOP, ids, (-1.0,) * len(ids), self.chat.token_ids(prompt))


def test_each_message_is_trained_on_as_it_was_sampled_after_what_was_read(base):
    chat = ChatTemplate.load(str(base), template="chatml-tools")
    # Other blanks than the template writes: encoded again, the history has other ids than were sampled.
    texts = ['<tool_call>{"name":"search","arguments":{"query":"director of Jaws"}}</tool_call>', "Steven Spielberg"]
    engine = Engine(Sampled(chat, texts), ToyRetriever(), FORMATS["tool_calls"](), max_steps=4)
    (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    rows = transcripts(trajectory, chat)
    assert [(row.prompt_ids, row.completion_ids) for row in rows] == [
        (step.completion.prompt_token_ids, step.completion.token_ids) for step in trajectory.steps
    ]
    assert all(set(row.mask) == {1} for row in rows)
    assert rows[0].completion_ids[-1] == chat.end_of_turn


def test_the_forced_answer_is_asked_without_a_function():
    format = FORMATS["tool_calls"]()
    call = CALLS["hermes"] % "Jaws"
    engine = Engine(ScriptedLLM([call, "Spielberg"]), ToyRetriever(), format, max_steps=2)
    (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    asked = trajectory.steps[-1].prompt
    assert trajectory.steps[-1].action == Answer("Spielberg", forced=True)
    assert [message.role for message in asked.messages] == ["system", "user", "call", "tool"]
    assert format.parse(call, trajectory.steps[:1], final=True) == Malformed("unexpected_call")


def test_a_message_that_was_cut_off_is_no_answer():
    class Cut(ScriptedLLM):
        async def complete(self, prompt, sampling):
            said = await super().complete(prompt, sampling)
            return Completion(said.text, FinishReason.LENGTH)

    engine = Engine(Cut(["It was"] * 2), ToyRetriever(), FORMATS["tool_calls"](), max_steps=2)
    (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    assert [step.action for step in trajectory.steps] == [Malformed("cut_off")] * 2
    assert trajectory.answer is None


def parsed(request, answer):
    """Do what a server's parser of calls does: take Hermes' calls out of the text."""
    for choice in answer["choices"]:
        before, mark, body = choice["message"]["content"].partition("<tool_call>")
        if mark and request.get("tools"):
            call = json.loads(body.removesuffix("</tool_call>"))
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            choice["message"] |= {"content": before or None, "reasoning_content": "hm"}
            choice["message"]["tool_calls"] = [{"id": "x", "type": "function", "function": function}]
            choice["finish_reason"] = "tool_calls"


def test_a_server_gets_tools_and_its_calls_are_searches():
    def reply(request):
        said = [message["role"] for message in request["messages"]]
        return ["I ask.\n" + CALLS["hermes"] % "Jaws", CALLS["hermes"] % "</tool_call> film", "Spielberg"][
            said.count("tool")
        ]

    format = FORMATS["tool_calls"]()
    with FakeOpenAI(reply, edit=parsed) as server:
        engine = Engine(ServerLLM(server.base_url, "fake", vllm=True), ToyRetriever(), format, max_steps=3)
        (trajectory,) = asyncio.run(engine.run([Trajectory(QUESTION)], seeds=[0]))
    assert [label(step.action) for step in trajectory.steps] == [
        ("query", "Jaws"),
        ("query", "</tool_call> film"),
        ("answer", "Spielberg"),
    ]
    first, second, forced = server.requests
    assert first["tools"] == second["tools"] == json.loads(format.tools)
    assert "tools" not in forced and "stop" not in first
    # vLLM's parsers keep special tokens in the text, and the end token would be part of the answer.
    assert "include_stop_str_in_output" not in first
    call = {"id": "call00004", "type": "function"}
    call["function"] = {"name": "search", "arguments": '{"query": "Jaws"}'}
    result = format.documents(trajectory.steps[0].passages)
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00004", "name": "search", "content": result},
    ]
    assert [message["role"] for message in forced["messages"]] == ["system", "user", *["assistant", "tool"] * 2]


@pytest.mark.parametrize("calls", [[{}], [1], 5, [{"function": {"name": "search"}}]])
def test_calls_that_are_none_are_a_bad_reply(calls):
    def broken(request, answer):
        answer["choices"][0]["message"]["tool_calls"] = calls

    with FakeOpenAI(edit=broken) as server:
        llm = ServerLLM(server.base_url, "fake", max_retries=0)
        with pytest.raises(LLMError, match="calls that are not as OpenAI writes them") as caught:
            asyncio.run(llm.complete(FORMATS["tool_calls"]().prompt(QUESTION, ()), Sampling()))
    assert caught.value.cause == "bad_reply"
