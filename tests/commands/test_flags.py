from __future__ import annotations

import click
import pytest

from reasonrag.cli import COMMANDS, cli
from reasonrag.commands.evaluate import policy_configs
from reasonrag.commands.options import sources
from reasonrag.core.errors import ConfigError


def configs(*policies, preset="demo", file=None, assignments=(), **given):
    return policy_configs(policies, sources({**given, "preset": preset, "file": file, "assignments": assignments}))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_sub_command_says_what_it_does_in_one_whole_line(name):
    command = cli.get_command(click.Context(cli), name)
    for sub in getattr(command, "commands", {}).values():
        assert not sub.get_short_help_str(80 - 2 - 6 - max(map(len, command.commands))).endswith("...")


def test_policies_are_named_by_hand_or_by_the_last_part_of_their_place():
    found = configs("base=demo", "hf:runs/mine/dpo/", "http://127.0.0.1:8000/v1#org/Big-7B", preset=None)
    assert list(found) == ["base", "dpo", "Big-7B"]
    assert found["Big-7B"].policy.spec == "http://127.0.0.1:8000/v1"
    assert found["Big-7B"].policy.model == "org/Big-7B"


def test_an_address_with_an_equals_sign_is_no_name():
    assert configs("http://127.0.0.1:8000/v1?a=b#m", preset=None)["m"].policy.spec == "http://127.0.0.1:8000/v1?a=b"


def test_two_policies_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two policies are called 'dpo'"):
        configs("hf:a/dpo", "hf:b/dpo")


@pytest.mark.parametrize(
    ("dataset", "held_out"),
    [
        ("demo", "demo:test"),
        ("hotpotqa", "hotpotqa:dev"),
        ("nq", "nq:test"),
        ("mine.jsonl", "mine.jsonl"),
        ("popqa, hotpotqa:train", "popqa:test,hotpotqa:train"),
    ],
)
def test_without_a_split_held_out_questions_are_taken(dataset, held_out):
    asked = configs("demo", preset=None, questions__dataset=dataset)["demo"].questions
    assert (asked.dataset, asked.split) == (held_out, None)


def test_a_split_that_is_asked_for_is_taken_wherever_it_was_asked_for(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("questions: {split: dev}\n")
    assert configs("demo", questions__split="train")["demo"].questions.split == "train"
    assert configs("demo", assignments=("questions.split=dev",))["demo"].questions.split == "dev"
    assert configs("demo", file=file)["demo"].questions.split == "dev"
    assert configs("demo")["demo"].questions.dataset == "demo:test"  # the preset's own is that of training


def test_the_split_of_a_file_made_for_training_is_not_evaluated(tmp_path):
    file = tmp_path / "c.yaml"
    for split in ("train", "null"):
        file.write_text(f"questions: {{dataset: demo, split: {split}}}\n")
        assert configs("demo", preset=None, file=file)["demo"].questions.dataset == "demo:test"
    assert configs("demo", assignments=("questions.split=null",))["demo"].questions.dataset == "demo:test"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--dataset", "a", "--dataset", "b"], "--dataset is given 2 times, and only the last one would count"),
        (["--corpus", ""], "retrieval.corpus is given as an empty text, as an unset variable of a shell is"),
        (["--completer-model", "m"], "a completer's model is named, and not where it is; add --completer"),
        (["--search-function", "look"], "functions of a recorded agent are named, and no recording"),
        (["--retriever", "bm25", "--retriever-url", "http://a"], "leave --retriever bm25 out"),
    ],
)
def test_what_would_have_no_effect_is_refused(given, said):
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        cli.main(["build-tree", "--preset", "demo", "--dry-run", *given], standalone_mode=False)
    assert said in (caught.value.message if isinstance(caught.value, click.UsageError) else str(caught.value))


def test_the_folder_of_a_policy_may_have_any_sign():
    assert configs("hf:/tmp/p#q/pol", preset=None)["pol"].policy.spec == "hf:/tmp/p#q/pol"
