"""Serve an index over HTTP, in the protocol of Search-R1's retrieval server."""

from reasonrag.retrieval.server.app import RetrievalApp, serve
from reasonrag.retrieval.server.service import RetrievalService
from reasonrag.retrieval.server.settings import ServeSettings

__all__ = ["RetrievalApp", "RetrievalService", "ServeSettings", "serve"]
