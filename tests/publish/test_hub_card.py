"""What is merged into a card that others wrote in, and what can be in ours."""

from __future__ import annotations

import re

import pytest
import yaml
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard

from reasonrag.core.errors import ConfigError
from reasonrag.publish.hub_card import escaped, fenced, merge_card
from tests.report.hostile import HOSTILE

CONFIGS = [{"config_name": "all", "data_files": "pairs/a/train-*", "default": True}]
INFO = [{"config_name": "all", "splits": [{"name": "train", "num_examples": 3}]}]
OURS = {"license": "unknown", "pretty_name": "P", "tags": ["dpo", "trl"], "configs": CONFIGS, "dataset_info": INFO}


def data_of(card: str) -> dict[str, object]:
    return DatasetCard(card).data.to_dict()


def test_the_same_input_gives_the_same_bytes_and_a_card_of_ours_is_not_changed():
    card = merge_card(None, OURS, "Body.")
    assert card == merge_card(None, OURS, "Body.") == merge_card(card, OURS, "Body.")
    assert data_of(card) == OURS


def test_text_around_ours_and_values_set_by_hand_stay_while_ours_are_written_anew():
    first = merge_card(None, OURS, "Old body.")
    edited = (
        first.replace("license: unknown", "license: mit")
        .replace("pretty_name: P\n", "extra_gated_prompt: Ask me.\n")  # one taken out, one put in
        .replace("- trl\n", "- mine\n")
        .replace("configs:\n", "configs:\n- config_name: mine\n  data_files: mine.csv\n")
        .replace("\n<!-- reasonrag:begin", "\n# By hand\n\n<!-- reasonrag:begin")
    ) + "\nAfter it.\n"
    new_info = [{"config_name": "all", "splits": [{"name": "train", "num_examples": 5}]}]
    card = merge_card(edited, OURS | {"pretty_name": "Q", "dataset_info": new_info}, "New body.")
    assert "# By hand" in card and "After it." in card and "New body." in card and "Old body." not in card
    data = data_of(card)
    assert data["license"] == "mit"
    assert data["extra_gated_prompt"] == "Ask me."
    assert "pretty_name" not in data
    assert data["tags"] == ["dpo", "mine", "trl"]
    assert [config["config_name"] for config in data["configs"]] == ["mine", "all"]
    assert data["dataset_info"] == new_info


def test_a_value_that_nobody_changed_since_follows_the_data():
    first = merge_card(None, OURS, "Body.")
    assert data_of(merge_card(first, OURS | {"license": "mit"}, "Body."))["license"] == "mit"
    assert "license" not in data_of(merge_card(first, {k: v for k, v in OURS.items() if k != "license"}, "Body."))


def test_what_is_asked_for_now_is_taken_whatever_the_old_card_says():
    old = merge_card(None, OURS, "Body.").replace("license: unknown", "license: mit")
    card = merge_card(old, OURS | {"license": "cc0-1.0"}, "Body.", overrides=("license",))
    assert data_of(card)["license"] == "cc0-1.0"
    assert merge_card(card, OURS | {"license": "cc0-1.0"}, "Body.", overrides=("license",)) == card


def test_a_card_without_our_part_keeps_all_of_its_text():
    card = merge_card("Just words, no YAML.\n", OURS, "Body.")
    assert DatasetCard(card).text.startswith("Just words, no YAML.\n\n<!-- reasonrag:begin")


def test_configurations_whose_files_are_gone_go_and_a_default_chosen_by_hand_stays():
    old = {
        "configs": [
            {"config_name": "gone", "data_files": [{"split": "train", "path": ["pairs/gone/train-*"]}]},
            {"config_name": "mine", "data_files": "mine/*", "default": True},
        ],
        "dataset_info": [{"config_name": "gone"}, {"config_name": "mine"}],
    }
    card = merge_card(
        f"---\n{yaml.safe_dump(old)}---\n", OURS, "Body.", is_gone=lambda path: path == "pairs/gone/train-*"
    )
    data = data_of(card)
    assert [(c["config_name"], c.get("default")) for c in data["configs"]] == [("mine", True), ("all", None)]
    assert [info["config_name"] for info in data["dataset_info"]] == ["mine", "all"]


def test_a_configuration_that_is_called_default_is_the_only_default():
    card = merge_card("---\nconfigs:\n- config_name: default\n  data_files: data/*\n---\n", OURS, "Body.")
    found = DatasetCard(card).data
    assert MetadataConfigs.from_dataset_card_data(found).get_default_config_name() == "default"
    assert [config["config_name"] for config in found.configs] == ["default", "all"]


def test_what_yaml_means_to_the_hub_and_its_comments_stay():
    old = "---\n# see the specification\nlanguage: no\ngated: true\n# and this\ndataset_info:\n- features: []\n---\nT\n"
    card = merge_card(old, OURS, "Body.")
    assert card.startswith("---\n# see the specification\n# and this\nlanguage: 'no'\ngated: true\n")
    assert [info["config_name"] for info in DatasetCard(card).data.dataset_info] == ["default", "all"]
    assert merge_card(card, OURS, "Body.") == card


BILLION = "a: &a [x,x]\n" + "".join(
    f"{c}: &{c} [*{p},*{p},*{p}]\n" for p, c in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    "old",
    [
        f"---\n{BILLION}tags: *l\n---\n",
        "---\nlicense: [\n---\n",
        "---\nlicense: mit\nlicense: apache-2.0\n---\n",
        "---\n- a list\n---\n",
        "---\nconfigs: 3\n---\n",
        "---\nconfigs: [a]\n---\n",
        "---\nconfigs: [{data_files: x}]\n---\n",
        "---\nx: !!python/object/apply:os.system ['true']\n---\n",
        "---\n? [a, b]\n: c\nconfigs: [{config_name: [x]}]\n---\n",
        "<!-- reasonrag:begin -->\nno end",
        "<!-- reasonrag:end --> <!-- reasonrag:begin -->",
        "<!-- reasonrag:begin --><!-- reasonrag:end -->\n" * 2,
    ],
)
def test_a_card_that_cannot_be_read_is_refused_in_one_line(old):
    with pytest.raises(ConfigError, match="mend it on the Hub first") as error:
        merge_card(old, OURS, "Body.")
    assert "\n" not in str(error.value)


def test_text_from_outside_cannot_leave_its_line_its_cell_or_its_fence():
    line = escaped(HOSTILE + "|[x](http://evil.example)`*\n# no heading <!-- reasonrag:end --> www.evil.example")
    assert "<" not in line and "\n" not in line and "\x1b" not in line and "\u202e" not in line
    assert not re.search(r"(?<!\\)[|`*\[\]:]|www\.", line)
    block = str(fenced(f"{HOSTILE}\n```\n<!-- reasonrag:end -->\n````\n# out"))
    assert "<" not in block and "\x1b" not in block and "\u202e" not in block
    fence = block.partition("\n")[0]
    assert block.count(fence) == 2 and block.endswith(fence)
