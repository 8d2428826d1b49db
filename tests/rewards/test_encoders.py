from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec

import pytest

from reasonrag.demo import policy_folder
from reasonrag.errors import ConfigError
from reasonrag.retrieval.encoders import LexicalEncoder, open_encoder
from reasonrag.rewards.retrieval_cost import cosine_similarity


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
    began = time.monotonic()
    vectors = asyncio.run(LexicalEncoder().encode(texts))
    assert time.monotonic() - began < 2, "seconds, while the event loop waits"
    assert [sum(vector) for vector in vectors] == [7.0] * 1500


@pytest.mark.skipif(find_spec("sentence_transformers") is not None, reason="sentence-transformers is installed")
def test_a_model_without_its_library_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"pip install 'reasonrag\[dense\]', or take the encoder lexical"):
        open_encoder("intfloat/e5-base-v2")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
def test_a_model_in_a_folder_encodes():
    encoder = open_encoder(str(policy_folder()))
    one, other, same = asyncio.run(encoder.encode(["Crimson Harbor director", "Crimson Harbor mayor"] * 2))[:3]
    assert cosine_similarity(one, same) == pytest.approx(1.0)
    assert cosine_similarity(one, other) < 0.999
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_encoder("/no/such/model")
