"""A LangChain retriever as the search of a run (`pip install langchain-core`).

    reasonrag build-tree --dataset demo --retriever python:examples.langchain_retriever:open_retriever ...

A vector store's `as_retriever()` or a retriever of LlamaIndex is returned in the same way.
"""

from __future__ import annotations

import re

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from contrib.frameworks import as_retriever
from contrib.searching import QueryRetriever
from reasonrag import Config, Question
from reasonrag.demo.world import demo_corpus


class SharedWords(BaseRetriever):
    """Finds the `k` documents that share most words with the query."""

    documents: list[Document]
    k: int

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(re.findall(r"\w+", query.lower()))
        shared = [(len(words & set(re.findall(r"\w+", d.page_content.lower()))), d) for d in self.documents]
        return [document for _, document in sorted(shared, key=lambda pair: -pair[0])[: self.k]]


def open_retriever(config: Config, questions: list[Question]) -> QueryRetriever:
    """Return the retriever, here over the pages of the demo world; called with the configuration of the run."""
    pages = demo_corpus(config.questions.world_seed)
    documents = [Document(page.text, id=page.id, metadata={"title": page.title}) for page in pages]
    return as_retriever(SharedWords(documents=documents, k=config.retrieval.top_k), config)
