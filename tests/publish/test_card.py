"""Merging a card with one that people edited, and text from outside in ours."""

from __future__ import annotations

import pytest
from huggingface_hub import DatasetCard

from reasonrag.core.errors import ConfigError
from reasonrag.publish.card import merge_card

CONFIGS = [{"config_name": "pairs", "data_files": "pairs/train-*", "default": True}]
OURS = {"license": "unknown", "pretty_name": "P", "tags": ["dpo", "trl"], "configs": CONFIGS}


def data_of(card: str) -> dict[str, object]:
    return DatasetCard(card).data.to_dict()


def test_the_same_input_gives_the_same_bytes_and_a_card_of_ours_is_not_changed():
    card = merge_card(None, OURS, "Body.")
    assert card == merge_card(None, OURS, "Body.") == merge_card(card, OURS, "Body.")
    assert data_of(card) == OURS


def test_text_around_ours_and_values_under_other_names_stay_while_ours_are_written_anew():
    first = merge_card(None, OURS, "Old body.")
    edited = (
        first.replace("license: unknown", "license: mit")
        .replace("pretty_name: P\n", "pretty_name: mine\nextra_gated_prompt: Ask me.\nlanguage: no\n")
        .replace("- trl\n", "- mine\n")
        .replace("\n<!-- reasonrag:begin", "\n# By hand\n\n<!-- reasonrag:begin")
    ) + "\nAfter it.\n"
    card = merge_card(edited, OURS, "New body.")
    assert "# By hand" in card and "After it." in card and "New body." in card and "Old body." not in card
    assert data_of(card) == OURS | {
        "license": "mit",  # ours is unknown
        "tags": ["dpo", "mine", "trl"],
        "extra_gated_prompt": "Ask me.",
        "language": "no",  # no boolean, as the Hub reads YAML
    }
    assert data_of(merge_card(edited, OURS | {"license": "cc0-1.0"}, "Body."))["license"] == "cc0-1.0"


def test_a_card_without_our_part_keeps_all_of_its_text():
    card = merge_card("Just words, no YAML.\n", OURS, "Body.")
    assert DatasetCard(card).text.startswith("Just words, no YAML.\n\n<!-- reasonrag:begin")


@pytest.mark.parametrize(
    "old",
    [
        "---\nlicense: [\n---\n",
        "---\nlicense: mit\nlicense: apache-2.0\n---\n",
        "---\n- a list\n---\n",
        "---\nx: !!python/object/apply:os.system ['true']\n---\n",
        "<!-- reasonrag:begin -->\nno end",
        "<!-- reasonrag:begin --><!-- reasonrag:end -->\n" * 2,
    ],
)
def test_a_card_that_cannot_be_read_is_refused_in_one_line(old):
    with pytest.raises(ConfigError, match="mend it on the Hub first") as error:
        merge_card(old, OURS, "Body.")
    assert "\n" not in str(error.value)
