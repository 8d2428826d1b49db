from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from docs.reference import PAGES, ROOT, schema
from reasonrag.core.settings import Section
from reasonrag.storage import tables


@pytest.mark.parametrize("name", list(PAGES))
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), "write it anew: python -m docs.reference"


@pytest.mark.parametrize("table", [*(table for *_, table in schema.TABLES), *schema.NESTED.values()])
def test_every_column_has_a_meaning_and_every_struct_a_name(table: tables.Described) -> None:
    for name, type, meaning in table.columns:
        assert meaning.strip() and "\n" not in meaning, name
        assert "struct<" not in schema.arrow(type), name


def models(below: type[Section] = Section) -> Iterator[type[Section]]:
    for model in below.__subclasses__():
        if model.__module__.startswith("reasonrag."):
            yield model
        yield from models(model)


def test_every_setting_of_every_model_says_what_it_is() -> None:
    files = [file for file in (ROOT / "reasonrag").rglob("*.py") if "(Section):" in file.read_text(encoding="utf-8")]
    for file in files:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    assert {model.__module__ for model in models()} >= {"reasonrag.core.config", "reasonrag.retrieval.server"}
    bare = [
        f"{model.__name__}.{name}"
        for model in models()
        for name, field in model.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
        and not (field.description or "").strip()
    ]
    assert bare == []
