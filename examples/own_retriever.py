"""An own retriever: the BM25 of an Elasticsearch index, through its official client (`pip install elasticsearch`).

    reasonrag build-tree --retriever python:examples.own_retriever:open_retriever --dataset questions.jsonl ...

The server and the index are named by ELASTICSEARCH_URL and ELASTICSEARCH_INDEX; documents have `title` and `text`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from elasticsearch import ApiError, AsyncElasticsearch, TransportError

from reasonrag import Config, Passage, Question, RetrievalError


class ElasticsearchRetriever:
    """Implements `reasonrag.Retriever`. All queries of a call travel in one `_msearch` request."""

    def __init__(self, client: AsyncElasticsearch, index: str) -> None:
        self._client = client
        self._index = index

    @property
    def fingerprint(self) -> str:
        # A run is resumed only with the same fingerprint: give a rebuilt index another name or alias.
        return f"elasticsearch:{self._index}"

    async def search(self, queries: Sequence[str], top_k: int) -> list[tuple[Passage, ...]]:
        searches: list[dict[str, object]] = []
        for query in queries:
            match = {"multi_match": {"query": query, "fields": ["title^2", "text"]}}
            searches += [{"index": self._index}, {"query": match, "size": top_k}]
        try:
            reply = await self._client.msearch(searches=searches)
        except (ApiError, TransportError) as error:
            raise RetrievalError(f"Elasticsearch did not answer: {error}") from error
        return [self._passages(response) for response in reply["responses"]]

    def _passages(self, response: dict[str, dict[str, list[dict[str, dict[str, str]]]]]) -> tuple[Passage, ...]:
        if "error" in response:
            raise RetrievalError(f"Elasticsearch refused a query: {response['error']}")
        passages = []
        for hit in response["hits"]["hits"]:
            source = hit["_source"]
            passages.append(Passage(str(hit["_id"]), f"{source['title']}\n{source['text']}"))
        return tuple(passages)

    async def aclose(self) -> None:
        await self._client.close()


def open_retriever(config: Config, questions: list[Question]) -> ElasticsearchRetriever:
    """Open the retriever; called with the configuration and the questions of the run."""
    client = AsyncElasticsearch(os.environ["ELASTICSEARCH_URL"], request_timeout=config.retrieval.timeout_s)
    return ElasticsearchRetriever(client, os.environ.get("ELASTICSEARCH_INDEX", "passages"))
