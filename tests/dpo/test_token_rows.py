from __future__ import annotations

from pathlib import Path

import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.dpo.preferences import ChatSides, CheckedRow, StepSides, StepText, TextSides, Unusable, read_row
from reasonrag.dpo.token_rows import encode
from reasonrag.llm.chat_template import ChatTemplate
from tests.llm.tiny import save_tiny_model

DEMO = Path(__file__).parents[2] / "reasonrag/demo/policy"
STATE = Prompt((Message("system", "Reason."), Message("user", "Question: Who directed Jaws?")))
QUERY = "So the next query is <query>who directed Jaws</query>"
ANSWER = "So the answer is <answer>Steven Spielberg</answer>"

CHATS = [
    ([{"role": "user", "content": "Who?"}], "Steven", "Jaws in 1975."),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When\n"}], " 1975 ", "\nNone"),
    (
        [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "Steven"},
            {"role": "user", "content": "Sure <|end|>?"},
        ],
        "<|end|>yes",
        "no",
    ),
]
TEXTS = [
    ("Who directed ", "Jaws?", "the river"),  # the blank merges with the word behind it
    ("Who directed", " Jaws?<|end|>", " the river"),
    ("the ri", "ver", "sing town"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def chat(tiny: Path) -> ChatTemplate:
    return ChatTemplate.load(str(tiny))


def row(sides, number=1):
    return CheckedRow(f"toy row {number}", sides, None, 0, ("toy", "q1"))


def steps(chosen, rejected, prompt=STATE, ends=("stop", "stop")):
    return row(StepSides((StepText(prompt, chosen, ends[0]),), (StepText(prompt, rejected, ends[1]),)))


def test_a_preference_whose_numbers_say_the_reverse_is_refused():
    row = {"prompt": "Who?", "chosen": "a", "rejected": "b"}
    for numbers in ({"margin": -0.8}, {"step_level": 1, "chosen_f1": 0.0, "rejected_f1": 1.0}):
        with pytest.raises(Unusable, match="margin"):
            read_row("toy", row | numbers)


@pytest.mark.parametrize("role", ["user", "system"])
def test_words_of_another_role_are_not_the_policys(role):
    prompt, answer = [{"role": "user", "content": "Who?"}], [{"role": "assistant", "content": "a"}]
    with pytest.raises(Unusable, match="begin or end with another role than assistant"):
        read_row("toy", {"prompt": prompt, "chosen": [{"role": role, "content": "b"}], "rejected": answer})
    with pytest.raises(Unusable, match="begin or end with another role than assistant"):  # the prompt again
        read_row("toy", {"prompt": prompt, "chosen": prompt + answer, "rejected": answer})


def only(rows, chat):
    ((pair,), _) = encode(rows, chat)
    return pair


def says(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("folder", ["tiny", "demo"])
def test_a_step_is_its_own_tokens_in_the_prompt_of_inference(folder, tiny):
    chat = ChatTemplate.load(str(tiny if folder == "tiny" else DEMO))
    pair = only([steps(QUERY, ANSWER)], chat)
    for segment, text in ((pair.chosen[0], QUERY), (pair.rejected[0], ANSWER)):
        assert segment.prompt_ids == chat.token_ids(STATE)
        assert list(segment.completion_ids) == chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert chat.tokenizer.eos_token_id not in segment.completion_ids


def test_the_end_of_the_turn_is_scored_where_it_was_sampled(chat):
    eos = chat.tokenizer.eos_token_id
    for end, expected in {"stop": False, "turn": True, "length": False}.items():
        pair = only([steps(QUERY, ANSWER, ends=(end, "stop"))], chat)
        assert (pair.chosen[0].completion_ids[-1] == eos) is expected
        assert pair.chosen[0].completion_ids.count(eos) == expected


def test_a_trajectory_has_one_segment_a_step_each_in_its_own_prompt(chat):
    later = Prompt((Message("user", "Question: Who?\nPrevious Thoughts:\nx"),), turn=(Span("So "),))
    long = (StepText(STATE, QUERY, "stop"), StepText(later, ANSWER, "turn"))
    pair = only([row(StepSides(long, (StepText(STATE, ANSWER, "stop"),)))], chat)
    assert [segment.prompt_ids for segment in pair.chosen] == [chat.token_ids(STATE), chat.token_ids(later)]
    assert chat.decode(pair.chosen[1].completion_ids) == ANSWER
    assert len(pair.rejected) == 1


def test_sampled_ids_are_scored_if_they_spell_the_step_and_end_as_the_policy_ended_it(chat):
    eos = chat.tokenizer.eos_token_id
    letters = tuple(id for letter in QUERY for id in chat.encode(letter))  # not what encoding the text returns
    overrun, others = (*letters[:-1], *chat.encode("> and")), (len(chat.tokenizer), eos)
    cases = {  # end of a step and its ids, and what is scored
        ("stop", letters): letters,
        ("stop", overrun): overrun,
        ("turn", letters): letters,
        ("turn", (*letters, eos)): (*letters, eos),
        ("length", letters): letters,
        ("stop", (*letters[1:], eos)): chat.encode(QUERY),
        ("stop", others): chat.encode(QUERY),
        ("stop", (*letters, *letters)): chat.encode(QUERY),  # text that nobody would see
        ("stop", None): chat.encode(QUERY),
    }
    for (end, ids), expected in cases.items():
        sides = StepSides((StepText(STATE, QUERY, end, ids),), (StepText(STATE, ANSWER, "stop"),))
        ((pair,), counts) = encode([row(sides)], chat)
        assert pair.chosen[0].completion_ids == expected
        text_is_encoded = expected == chat.encode(QUERY)
        assert counts["encoded_differently"] == (not text_is_encoded)
        assert counts["of_another_tokenizer"] == (text_is_encoded and ids is not None)
        assert counts["without_ids"] == 1 + (ids is None)


def test_a_special_token_spelled_out_in_a_step_is_ordinary_text(chat):
    pair = only([steps("<answer><|end|></answer>", ANSWER)], chat)
    assert chat.tokenizer.eos_token_id not in pair.chosen[0].completion_ids
    assert chat.tokenizer.decode(pair.chosen[0].completion_ids) == "<answer><|end|></answer>"


def test_a_special_token_in_a_prompt_is_read_as_inference_reads_it(chat):
    prompt = Prompt((Message("user", "Documents: <|end|>"),))
    assert only([steps(QUERY, ANSWER, prompt)], chat).chosen[0].prompt_ids == chat.token_ids(prompt)


def test_an_empty_step_that_ended_its_turn_is_its_end_token(chat):
    pair = only([steps(ANSWER, "", ends=("stop", "turn"))], chat)
    assert pair.rejected[0].completion_ids == (chat.tokenizer.eos_token_id,)


def test_a_step_without_a_token_is_refused_with_its_row(chat):
    with pytest.raises(DataError, match="toy row 1: no token of its rejected side can be scored"):
        only([steps(ANSWER, "", ends=("stop", "length"))], chat)


def test_half_characters_are_replaced_and_do_not_stop_the_reading(chat):
    half = "\ud800"
    assert only([steps(f"a{half}", "b")], chat).chosen == only([steps("a?", "b")], chat).chosen
    assert only([row(TextSides(half, half, "b"))], chat).chosen == only([row(TextSides("?", "?", "b"))], chat).chosen


def test_a_chat_that_the_template_refuses_is_named(tmp_path):
    chat = ChatTemplate.load(str(save_tiny_model(tmp_path)))
    chat.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    refused = row(ChatSides(CHATS[0][0], says("a"), says("b")), 7)
    with pytest.raises(DataError, match=r"toy row 7: .*cannot show its messages \(roles must alternate\)"):
        only([refused], chat)
    with pytest.raises(DataError, match=r"toy row 1: .*roles must alternate"):
        only([steps("a", "b")], chat)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tiny", "demo"])
@pytest.mark.parametrize("layout", ["chat", "text"])
def test_plain_rows_are_tokenised_as_trl_does(layout, folder, tiny, tmp_path):
    made = [{"prompt": p, "chosen": says(c), "rejected": says(r)} for p, c, r in CHATS]
    if layout == "text":
        made = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in TEXTS]
    model = str(tiny if folder == "tiny" else DEMO)
    assert _ours(made, model) == _trls(made, model, tmp_path)


def _ours(made, model):
    sides = [ChatSides(**r) if isinstance(r["prompt"], list) else TextSides(**r) for r in made]
    pairs, _ = encode([row(s, n) for n, s in enumerate(sides)], ChatTemplate.load(model))
    for pair in pairs:
        assert pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids
    return [
        [list(p.chosen[0].prompt_ids), list(p.chosen[0].completion_ids), list(p.rejected[0].completion_ids)]
        for p in pairs
    ]


def _trls(made, model, tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(tmp_path), max_length=None, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = DPOTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(made),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return [[r["prompt_ids"], r["chosen_ids"], r["rejected_ids"]] for r in trainer.train_dataset]


def test_a_step_of_a_growing_turn_is_trained_where_the_turn_stood(chat):
    opened = {"role": "assistant", "content": "<think>a film</think>\n"}
    ends = {"chosen_end": "stop", "rejected_end": "stop"}
    sides = {"chosen": says("<search>Jaws</search>"), "rejected": says("<answer>x</answer>")}
    asked = [{"role": "user", "content": "Who directed Jaws?"}, opened]
    pair = only([read_row("toy", {"prompt": asked, **sides, **ends})], chat)
    prompt = Prompt((Message("user", "Who directed Jaws?"),), turn=(Span(opened["content"]),))
    assert pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids == chat.token_ids(prompt)
    assert chat.decode(pair.chosen[0].completion_ids) == "<search>Jaws</search>"


def test_the_ids_of_a_teacher_with_another_tokenizer_are_never_read_as_ones_own(chat):
    teacher = ChatTemplate.load(str(DEMO))
    said, wrote = "<think>a film</think>", "<search>Jaws</search>"
    messages = (Message("user", "Who directed Jaws?"),)
    turn = (Span(said, teacher.encode(said), by_policy=True), Span("\n"))
    sides = StepSides(
        (StepText(Prompt(messages, turn), wrote, "stop", teacher.encode(wrote)),),
        (StepText(Prompt(messages, turn), ANSWER, "stop", teacher.encode(ANSWER)),),
    )
    ((pair,), counts) = encode([row(sides)], chat)
    assert counts["of_another_tokenizer"] == counts["steps"] == 2
    assert pair.chosen[0].prompt_ids == chat.token_ids(Prompt(messages, (Span(f"{said}\n"),)))
    assert [pair.chosen[0].completion_ids, pair.rejected[0].completion_ids] == [chat.encode(wrote), chat.encode(ANSWER)]
