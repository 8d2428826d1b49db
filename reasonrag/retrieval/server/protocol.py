"""Search-R1's `POST /retrieve`, read and written as its server does (`search_r1/search/retrieval_server.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from reasonrag.core.text import one_line
from reasonrag.core.types import Passage

_SHOWN_PROBLEMS = 3


class Refusal(Exception):
    """A request that is not answered: the HTTP status, and one line that says why."""

    def __init__(self, status: int, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, where that helps."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class RetrieveRequest(BaseModel):
    """The body of a request; fields that are not named here are ignored.

    `topk` is the server's default where it is absent, null or 0.
    """

    queries: list[str]
    topk: Annotated[int, Field(ge=0)] | None = None
    return_scores: bool = False

    @classmethod
    def read(cls, body: bytes) -> RetrieveRequest:
        """A request from JSON.

        Raises:
            Refusal: 422 with what is wrong; nothing of the request is repeated.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            problems = error.errors(include_input=False, include_url=False, include_context=False)
            shown = [": ".join([*map(str, problem["loc"]), problem["msg"]]) for problem in problems[:_SHOWN_PROBLEMS]]
            hint = 'expected {"queries": ["..."], "topk": 3, "return_scores": true}'
            raise Refusal(422, one_line(f"{'; '.join(shown)}; {hint}")) from None


def reply(rankings: Sequence[Sequence[Passage]], *, scores: bool) -> bytes:
    """The body of an answer: `{"result": [ranking, ...]}`, one ranking per query, best passage first.

    A passage is `{"document": {"id", "contents"}, "score"}` with scores, and the document alone without.
    """
    item = _scored if scores else _document
    result = [[item(passage) for passage in ranking] for ranking in rankings]
    return json.dumps({"result": result}, ensure_ascii=False, allow_nan=False).encode(errors="replace")


def _document(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "contents": passage.contents}


def _scored(passage: Passage) -> dict[str, Any]:
    return {"document": _document(passage), "score": passage.score}
