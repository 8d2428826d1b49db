"""What each family of text encoders wants in front of a text, and how it makes one vector of many tokens.

A wrong prefix or pooling raises no error: it only finds less. Each entry names the model card it was taken from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from reasonrag.core.errors import ConfigError

Pooling = Literal["mean", "cls", "lasttoken"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one family were trained to read; all of them compare by cosine.

    Args:
        names: pattern that names of its models match, in lower case.
        pooling: how one vector is made of the vectors of all tokens.
        query_prefix: in front of a query.
        passage_prefix: in front of a passage.
        max_tokens: the longest text they were trained on; what goes beyond is cut.
    """

    names: str
    pooling: Pooling
    query_prefix: str = ""
    passage_prefix: str = ""
    max_tokens: int = 512


# The first match counts: special cases stand above general ones.
FAMILIES: Mapping[str, Family] = {
    # huggingface.co/intfloat/e5-mistral-7b-instruct: last token, instruction for queries only
    "e5-mistral": Family(r"e5-mistral", "lasttoken", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery: ", max_tokens=4096),
    # huggingface.co/intfloat/multilingual-e5-large-instruct: instruction for queries, nothing for passages
    "e5-instruct": Family(r"e5-.*instruct", "mean", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery: "),
    # huggingface.co/intfloat/e5-base-v2, multilingual-e5-base: "Each input text should start with query: or passage: "
    "e5": Family(r"\be5-", "mean", query_prefix="query: ", passage_prefix="passage: "),
    # huggingface.co/BAAI/bge-m3: CLS, "you no longer need to add instruction to the queries"
    "bge-m3": Family(r"\bbge-m3", "cls", max_tokens=8192),
    # huggingface.co/BAAI/bge-base-en-v1.5: CLS, an instruction for short queries that look for long passages
    "bge-en": Family(
        r"\bbge-(small|base|large)-en", "cls", query_prefix="Represent this sentence for searching relevant passages: "
    ),
    # huggingface.co/Alibaba-NLP/gte-base-en-v1.5, gte-multilingual-base: CLS, nothing in front
    "gte-v1.5": Family(r"\bgte-(\w+-en-v1\.5|multilingual-base)", "cls", max_tokens=8192),
    # huggingface.co/thenlper/gte-base: mean, nothing in front
    "gte": Family(r"\bgte-(small|base|large)", "mean"),
    # huggingface.co/Qwen/Qwen3-Embedding-0.6B: last token, instruction for queries only, no blank behind "Query:"
    "qwen3-embedding": Family(
        r"qwen3-embedding", "lasttoken", query_prefix=f"Instruct: {_WEB_SEARCH}\nQuery:", max_tokens=32768
    ),
    # huggingface.co/sentence-transformers/all-MiniLM-L6-v2: mean, nothing in front, cut at 256 word pieces
    "minilm": Family(r"\ball-minilm-l\d+", "mean", max_tokens=256),
    # huggingface.co/sentence-transformers/all-mpnet-base-v2: mean, nothing in front, cut at 384 word pieces
    "mpnet": Family(r"\ball-mpnet-base", "mean", max_tokens=384),
}


def find_family(family: str, *names: str) -> tuple[str, Family | None]:
    """The family called so, or for `auto` the first that one of the model's names matches; ("own", None) for neither.

    Args:
        family: a key of FAMILIES, `auto`, or `own` for a model that is to be read as its own files say.
        names: Hub id, name of the folder, name that the model's config gives.

    Raises:
        ConfigError: there is no such family.

    >>> find_family("auto", "intfloat/e5-base-v2")[0], find_family("auto", "model", "BAAI/bge-m3")[0]
    ('e5', 'bge-m3')
    >>> find_family("auto", "my-encoder")
    ('own', None)
    """
    if family in FAMILIES:
        return family, FAMILIES[family]
    if family not in ("auto", "own"):
        raise ConfigError(f"there is no encoder family {family!r}; choose auto, own, {', '.join(FAMILIES)}")
    if family == "auto":
        for name in names:
            for key, entry in FAMILIES.items():
                if re.search(entry.names, name.lower()):
                    return key, entry
    return "own", None
