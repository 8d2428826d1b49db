from __future__ import annotations

import pytest

from reasonrag.core.errors import DataError
from reasonrag.dpo.token_rows import Pair, Segment, fit
from reasonrag.training.settings import PairSettings


def segment(prompt, completion):
    return Segment(tuple(range(prompt)), tuple(range(completion)))


def pair(prompt, chosen=2, rejected=1, depth=0):
    return Pair((segment(prompt, chosen),), (segment(prompt, rejected),), None, depth, ("toy", str(prompt)))


def fitted(train, test=(), *, max_length=None, context=None, max_dropped=0.0, **further):
    settings = PairSettings(data="toy.jsonl", max_length=max_length, max_dropped=max_dropped)
    return fit({"train": list(train), "test": list(test)}, settings, context=context, **further)


def test_the_longest_sequence_of_a_pair_is_what_counts():
    trajectory = Pair((segment(5, 1), segment(9, 2)), (segment(5, 5),), None, 0, ("toy", "q"))
    assert (trajectory.tokens, pair(3, 1, 4).tokens) == (11, 7)


def test_without_a_setting_the_longest_pair_is_the_limit():
    kept, report = fitted([pair(10), pair(30)], [pair(40)], context=100)
    assert (report["max_length"], report["longest"]) == (42, 42)
    assert (len(kept["train"]), len(kept["test"])) == (2, 1)


@pytest.mark.parametrize(
    ("max_length", "context", "used"), [(20, 100, 20), (20, 16, 16), (None, 16, 16), (20, None, 20)]
)
def test_the_models_context_is_never_exceeded(max_length, context, used):
    _, report = fitted([pair(8), pair(30)], max_length=max_length, context=context, max_dropped=0.5)
    assert report["max_length"] == used


@pytest.mark.fault(
    "21", "pairs that are too long", "left out whole and counted by depth, never cut; refused above a share"
)
def test_long_pairs_are_left_out_whole_and_counted_by_split_and_depth(figure):
    short, deep = pair(10), pair(90, depth=3)
    lines: list[str] = []
    train = [short, deep, pair(91), short]
    kept, report = fitted(train, [short, deep], max_length=20, max_dropped=0.5, log=lines.append)
    figure(lines[-2])
    assert kept == {"train": [short, short], "test": [short]}
    assert report["left_out"] == {"train": {"0": 1, "3": 1}, "test": {"3": 1}}
    assert "2 of 4 train pairs left out as too long (50.0%: 1 at depth 0, 1 at depth 3)" in lines


def test_too_many_in_any_split_are_refused_with_what_to_do():
    train = [pair(10)] * 99
    with pytest.raises(DataError) as caught:
        fitted([*train, pair(500)], [pair(10), pair(600)], max_length=20, max_dropped=0.01)
    assert str(caught.value) == (
        "toy.jsonl: 1 of 2 test pairs are longer than 20 tokens, the longest has 602 (context of the model: unknown), "
        "and nothing is ever cut: raise --max-length up to that context, or allow it with --max-dropped 0.5"
    )


def test_the_advised_share_is_enough():
    pairs = [*[pair(10)] * 2, pair(500)]
    with pytest.raises(DataError, match=r"--max-dropped 0\.334"):
        fitted(pairs, max_length=20)
    assert len(fitted(pairs, max_length=20, max_dropped=0.334)[0]["train"]) == 2


def test_nothing_left_to_train_on_is_refused_whatever_may_be_dropped():
    with pytest.raises(DataError, match="nothing is left to train on"):
        fitted([pair(500)], max_length=20, max_dropped=1.0)
