"""Vectors in a real Postgres with pgvector, which the package pgserver ships."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina

from reasonrag.core.errors import RetrievalError
from reasonrag.retrieval.open import open_backend
from tests.retrieval.test_backends import ENCODER, SEA, WordEncoder, asked, settings

psycopg = pytest.importorskip("psycopg")
pgserver = pytest.importorskip("pgserver")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("postgres")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # the server runs as another user, if this one is root
    server = pgserver.get_server(folder / "data", cleanup_mode="stop")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE sea (id text, title text, body text, embedding vector(64))")
        vectors = WordEncoder().encode_queries([p.contents for p in SEA]).tolist()
        rows = [(p.id, p.title, p.text, str(vector)) for p, vector in zip(SEA, vectors, strict=True)]
        connection.cursor().executemany("INSERT INTO sea VALUES (%s, %s, %s, %s)", rows)
    yield server.get_uri()
    server.cleanup()


def test_the_closest_rows_are_found_and_sql_of_ones_own_needs_no_encoder(database: str) -> None:
    config = settings("pgvector", url=database, collection="sea", text="body", encoder=ENCODER)
    (found,) = asked(open_backend(config), SEA[3].contents)
    assert (found[0].id, found[0].contents, len(found)) == (SEA[3].id, SEA[3].contents, 2)
    assert found[0].score == pytest.approx(1.0)
    sql = "SELECT id, title, body, 1 FROM sea WHERE strpos(body, %(query)s) > 0 ORDER BY id LIMIT %(top_k)s"
    (found,) = asked(open_backend(settings("pgvector", url=database, sql=sql)), "Benna Ruvik", top_k=9)
    assert {p.title for p in found} == {"Benna Ruvik", "Orlandis"}


def test_a_table_that_is_not_there_is_refused_and_a_database_that_is_not_there_is_waited_for(database: str) -> None:
    config = settings("pgvector", url=database, collection="lake", encoder=ENCODER)
    with pytest.raises(RetrievalError, match="pgvector refuses: UndefinedTable") as failed:
        asked(open_backend(config), "x")
    assert failed.value.cause == "refused"
    away = config.model_copy(update={"url": ("postgresql://postgres@127.0.0.1:9/sea",)})
    with pytest.raises(RetrievalError, match="no answer from pgvector: OperationalError"):
        asked(open_backend(away), "x")
    with stamina.set_testing(True, attempts=20), pytest.raises(RetrievalError, match="no answer in 20 attempts"):
        asyncio.run(open_backend(away).search(["x"], 1))
