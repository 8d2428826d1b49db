"""What every trainer scores are the ids that a model sampled, after those that it read, whatever its tokenizer.

A random model samples ids that its tokenizer would never produce by encoding their text.
"""

from __future__ import annotations

import asyncio
import json
from importlib.resources import files

import pytest

from benchmarks.token_ids import AnyReasonRAG, AnySearchR1, AnyToolCalls, Recorded, score
from reasonrag.llm.base import Sampling
from reasonrag.storage.parquet import read_shards
from reasonrag.storage.tables import pair_schema, tree_schema
from tests.llm.tiny import SENTENCES, save_random_model

# It shows calls and their results, too.
TEMPLATE = (files("reasonrag") / "llm/templates/chatml-tools.jinja").read_text(encoding="utf-8")
STOPS = ("wn", "e", "er")  # some tokens hold more than the stop string that they complete


class ShortReasonRAG(AnyReasonRAG):
    stops = STOPS


class ShortSearchR1(AnySearchR1):
    stops = STOPS


class ShortToolCalls(AnyToolCalls):
    stops = STOPS


def train_tokenizer(kind):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options = {"vocab_size": 380, "special_tokens": ["<|start|>", "<|end|>"], "show_progress": False}
    if kind == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<|start|>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**options, unk_token="<|start|>")
    tokenizer.train_from_iterator([*SENTENCES, "</search>\n<information> </query>\n"], trainer)
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("byte-level BPE", ShortSearchR1),
        ("WordPiece", ShortSearchR1),
        ("Unigram", ShortReasonRAG),
        ("byte-level BPE", ShortToolCalls),
    ],
)
def test_the_ids_that_are_scored_are_those_that_were_read_and_sampled(kind, format, tmp_path):
    folder = save_random_model(tmp_path / "model", train_tokenizer(kind), chat_template=TEMPLATE, context=2048)
    settings = folder / "generation_config.json"  # many tokens end a turn, so that some steps end theirs
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [1, *range(40, 70)]}))
    policy, shape = Recorded(folder), format()
    found = score(policy, shape, tmp_path / "run", questions=4, sampling=Sampling(temperature=2.0, max_tokens=8))
    asyncio.run(policy.aclose())
    for trainer, steps in found.scored.items():
        assert len(steps) >= 4 and found.exact(trainer) == 1.0

    # The model samples what the test is about: ids that no text is encoded to, stop strings, and ends of its turn.
    counts = found.examples.encoded
    assert counts["encoded_differently"] / counts["steps"] > 0.5
    assert not counts["without_ids"] and not counts["of_another_tokenizer"]
    rows = list(read_shards(tmp_path / "run/pairs", "train", pair_schema()))
    assert {row[f"{side}_end"] for row in rows for side in ("chosen", "rejected")} >= {"stop", "turn"}
    nodes = [node for node in read_shards(tmp_path / "run/trees", "nodes", tree_schema()) if node["token_ids"]]
    assert any(not policy.chat.decode(node["token_ids"]).endswith(node["text"]) for node in nodes)
    assert shape.append_only == any(row["turn"] for row in rows)
