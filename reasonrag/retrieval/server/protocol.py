"""Search-R1's `POST /retrieve`, parsed and written as its server does (`search_r1/search/retrieval_server.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from reasonrag.core.serving import Refusal, describe_problems
from reasonrag.core.types import Passage

_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # json.dumps makes an encoder for each reply


class RetrieveRequest(BaseModel):
    """The body of a request; other fields are ignored. If `topk` is absent, null or 0, the server's default counts."""

    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None
    return_scores: bool = False

    @classmethod
    def read(cls, body: bytes) -> RetrieveRequest:
        """Parse a request from JSON.

        Raises:
            Refusal: 422 with the problems; no value of the request is repeated.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            hint = 'expected {"queries": ["..."], "topk": 3, "return_scores": true}'
            raise Refusal(422, f"{describe_problems(error)}; {hint}") from None


def reply(rankings: Sequence[Sequence[Passage]], *, scores: bool) -> bytes:
    """Write the body of an answer: `{"result": [ranking, ...]}`, one ranking per query, best passage first.

    A passage is `{"document": {"id", "contents"}, "score"}` with scores, and the document alone without.
    """
    result = [[_item(passage, scores) for passage in ranking] for ranking in rankings]
    return _as_json({"result": result}).encode(errors="replace")


def _item(passage: Passage, scores: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if scores else document
