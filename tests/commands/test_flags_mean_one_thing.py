"""A flag has one type and one meaning over all commands: the first sentence of its help is the same everywhere."""

from __future__ import annotations

from collections import defaultdict

import pytest

from docs.reference.commands import commands, flags, meaning
from reasonrag.cli import cli

# Flags whose choices depend on the command, and why.
DIFFERENT_CHOICES = {
    "--preset": "each kind of settings has its own presets",
    "--loss-type": "DPO and GRPO have different losses; TRL calls both loss_type",
}
OPTIONS = defaultdict(list)
for path, command in commands(cli, ()):
    for option in flags(command):
        OPTIONS[option.opts[0]].append((" ".join(path), option))


@pytest.mark.parametrize("flag", sorted(OPTIONS))
def test_a_flag_means_one_thing(flag):
    meanings = {meaning(option): command for command, option in OPTIONS[flag]}
    assert "" not in meanings and len(meanings) == 1
    types = {(option.type.name, tuple(getattr(option.type, "choices", ()))) for _, option in OPTIONS[flag]}
    assert len(types) == 1 or flag in DIFFERENT_CHOICES


def test_the_allowed_differences_are_needed():
    for flag in DIFFERENT_CHOICES:
        assert len({tuple(getattr(option.type, "choices", ())) for _, option in OPTIONS[flag]}) > 1


def test_every_flag_of_the_table_names_its_commands():
    assert {"build-tree", "eval", "rl train", "rl plan", "index recall"} <= {path for path, _ in OPTIONS["--dataset"]}
    assert {path for path, _ in OPTIONS["--model"]} == {
        *("dpo train", "sft train", "prm train", "rl train", "env serve", "improve")
    }
