from __future__ import annotations

import click
import pytest

from reasonrag.cli import cli
from reasonrag.commands import evaluate
from reasonrag.commands.options import sources
from reasonrag.core.errors import ConfigError
from reasonrag.core.models import demo_folder


def configs(*policies, assignments=(), formats=(), chat_templates=(), cards=(), **flags):
    asked = sources({"file": None, "assignments": assignments, "questions__dataset": "demo", **flags})
    by_name = {"format.name": formats, "policy.chat_template": chat_templates, "policy.card": cards}
    return evaluate.policy_configs(policies, asked, by_name)


def formats(found):
    return {name: config.format.name for name, config in found.items()}


def test_each_policy_keeps_the_format_of_its_own_folder():
    found = configs("base=demo:hiprag", "rr=demo", "big=http://h/v1#m")
    assert formats(found) == {"base": "hiprag", "rr": "reasonrag", "big": "reasonrag"}


def test_a_format_is_given_to_all_policies_or_to_one_by_name():
    policies = ("a=http://h/v1#m", "b=http://h/v1#n")
    assert formats(configs(*policies, formats=("hiprag",))) == {"a": "hiprag", "b": "hiprag"}
    assert formats(configs(*policies, formats=("b=search_r1",))) == {"a": "reasonrag", "b": "search_r1"}
    assert formats(configs(*policies, formats=("a=search_r1", "hiprag"))) == {"a": "search_r1", "b": "hiprag"}


def test_a_chat_template_is_given_to_the_base_model_alone():
    found = configs("base=hf:base", "sft=hf:sft", chat_templates=("base=gemma",))
    assert {name: config.policy.chat_template for name, config in found.items()} == {"base": "gemma", "sft": None}
    with pytest.raises(ConfigError, match=r"--chat-template is given for dpo, but the policies are base"):
        configs("base=hf:base", chat_templates=("dpo=gemma",))


def test_a_card_is_that_of_one_policy_or_of_all():
    card, policies = str(demo_folder()), ("big=http://h/v1#m", "small=http://h/v1#n")
    found = configs(*policies, cards=(f"big={card}",))
    assert {name: config.format.prompts for name, config in found.items()} == {"big": "brief", "small": "default"}
    both = configs(*policies, cards=(card,), assignments=("retrieval.top_k=2",)).values()
    assert {(config.policy.max_tokens, config.retrieval.top_k) for config in both} == {(48, 2)}


def test_a_name_that_looks_like_a_secret_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        configs("sk-proj-canaryCANARY1234567890abcdefghij=demo")
    assert "canary" not in str(caught.value)


def test_a_format_of_a_policy_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"--format is given for dpo, but the policies are base"):
        configs("base=http://h/v1#m", formats=("dpo=hiprag",))


def test_the_judge_is_sampled_as_configured():
    flags = {"judge__spec": "http://j/v1", "judge__model": "org/judge"}
    (found,) = configs("demo", assignments=("judge.max_tokens=9",), **flags).values()
    assert (found.judge.spec, found.judge.model, found.judge.max_tokens) == ("http://j/v1", "org/judge", 9)
    assert evaluate.judged_metrics(None, {"judge.spec": "http://j/v1"}, found) == ("lasj", "osr", "usr")
    assert evaluate.judged_metrics(None, {}, found) == (), "a file may name the judge of its trees"


def test_what_is_asked_of_a_judge_needs_one():
    config = configs("demo")["demo"]
    assert evaluate.judged_metrics(None, {}, config) == ()
    for overrides, judged in (({"judge.model": "m"}, None), ({}, ("osr",))):
        with pytest.raises(ConfigError, match="name one with --judge"):
            evaluate.judged_metrics(judged, overrides, config)


def test_a_password_in_the_judges_address_is_refused():
    with pytest.raises(ConfigError, match="password") as caught:
        configs("demo", judge__spec="http://me:secret@h/v1", judge__model="m")
    assert "secret" not in str(caught.value)


def test_metrics_are_named_with_commas_between_them(tmp_path):
    command = cli.get_command(click.Context(cli), "eval")
    given = ["--policy", "demo", "--out", str(tmp_path)]
    assert command.make_context("eval", [*given, "--judged", "usr, OSR"]).params["judged"] == ("usr", "osr")
    assert command.make_context("eval", given).params["judged"] is None
