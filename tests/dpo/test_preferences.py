"""Rows of preference data as they come, read as what they mean."""

from __future__ import annotations

import pytest

from reasonrag.core.errors import DataError
from reasonrag.core.types import Message, Prompt, Span
from reasonrag.dpo.preferences import checked_rows
from reasonrag.dpo.token_rows import encode
from reasonrag.llm.chat_template import ChatTemplate
from reasonrag.storage.parquet import RowProblems
from tests.llm.tiny import save_tiny_model

ASKED = [{"role": "user", "content": "Who directed Jaws?"}]
OPEN = {"role": "assistant", "content": "<think>a film</think>\n"}


def says(text):
    return [{"role": "assistant", "content": text}]


def read(*raw):
    return list(checked_rows("toy", enumerate(raw, 1), RowProblems("toy")))


def test_a_step_of_a_growing_turn_is_trained_where_the_turn_stood(tmp_path):
    chat = ChatTemplate.load(str(save_tiny_model(tmp_path)))
    sides = {"chosen": says("<search>Jaws</search>"), "rejected": says("<answer>x</answer>")}
    ends = {"chosen_end": "stop", "rejected_end": "stop"}
    ((pair,), _) = encode(read({"prompt": [*ASKED, OPEN], **sides, **ends}), chat)
    asked = Prompt((Message("user", "Who directed Jaws?"),), turn=(Span(OPEN["content"]),))
    assert pair.chosen[0].prompt_ids == pair.rejected[0].prompt_ids == chat.token_ids(asked)
    assert chat.decode(pair.chosen[0].completion_ids) == "<search>Jaws</search>"


def test_an_open_turn_alone_asks_nothing():
    sides = {"chosen": says("a"), "rejected": says("b"), "chosen_end": "stop", "rejected_end": "stop"}
    with pytest.raises(DataError, match="prompt is an open turn and nothing else in 1 row"):
        read({"prompt": [OPEN], **sides})
