"""An index served to others, in the protocol that Search-R1 made common."""

from reasonrag.retrieval.server.app import retrieval_app
from reasonrag.retrieval.server.run import serve
from reasonrag.retrieval.server.settings import ServeSettings

__all__ = ["ServeSettings", "retrieval_app", "serve"]
