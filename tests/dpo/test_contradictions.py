from __future__ import annotations

import pytest

from reasonrag.dpo.preferences import PairRules, read_row

A, B = "So <answer>Kelda</answer>", "<answer>Port</answer>"


def says(text):
    return [{"role": "assistant", "content": text}]


def row(chosen, rejected, prompt="Who?", **more):
    asked = [{"role": "user", "content": prompt}]
    return {"prompt": asked, "chosen": says(chosen), "rejected": says(rejected)} | more


def ruled(*rows):
    rules = PairRules()
    for number, raw in enumerate(rows, 1):
        rules.add_row("train", read_row(f"row {number}", raw))
    return rules


def counted(*rows):
    rules = ruled(*rows)
    return rules.same_text, rules.same_content, rules.named


def test_pairs_that_stand_beside_their_reverse_are_counted_on_both_sides_and_named():
    rows = [row(A, B), row(A, B), row(B, A), row(A, B, "When?"), row(B, A, "Where?"), row(B, A), row(A, "so")]
    assert counted(*rows) == (4, 4, [("row 1", "row 3"), ("row 1", "row 6")])
    assert counted(*rows[3:5]) == (0, 0, [])


def test_rows_that_repeat_another_word_for_word_are_counted():
    assert ruled(row(A, B), row(A, B), row(B, A), row(A, B, "When?"), row(A, B)).repeats == 2
    assert ruled(row("Kelda", "Port"), row("kelda", "port"), row("Kelda", "Port!")).repeats == 0


def test_contents_are_compared_without_case_and_by_type():
    again = "Thus <answer> the KELDA! </answer>"
    assert counted(row(A, B), row(B, again)) == (0, 2, [("row 1", "row 2")])
    assert counted(row(A, B), row(B, "<query>Kelda</query>")) == (0, 0, [])
    # A step that could not be parsed is what it says as a whole, whatever tags are in it.
    types = {"chosen_type": "answer", "rejected_type": "malformed"}
    assert counted(row(B, f"<query>x</query> {A}", **types), row(A, B)) == (0, 0, [])


@pytest.mark.parametrize("layout", ["steps", "trajectories", "texts"])
def test_every_layout_is_compared(layout):
    def pair(chosen, rejected):
        if layout == "steps":
            return row(chosen, rejected, chosen_end="stop", rejected_end="turn")
        if layout == "texts":
            return {"prompt": "Who?", "chosen": chosen, "rejected": rejected}
        steps = ([{"prompt": says("Who?"), "prefix": "", "text": text, "end": "stop"}] for text in (chosen, rejected))
        return dict(zip(("chosen_steps", "rejected_steps"), steps, strict=True))

    assert counted(pair(A, B), pair(B, A)) == (2, 2, [("row 1", "row 2")])
