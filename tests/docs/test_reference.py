from __future__ import annotations

import pyarrow as pa
import pytest

from tests.docs import reference


@pytest.mark.parametrize("name", list(reference.PAGES))
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "write it anew: python -m tests.docs.reference"


@pytest.mark.parametrize("table", [*(table for *_, table in reference.TABLES), *reference.NESTED.values()])
def test_every_column_has_a_meaning_and_every_struct_a_name(table: reference.tables.Described) -> None:
    for name, type, meaning in table.columns:
        assert meaning.strip() and "\n" not in meaning, name
        inner = type.value_type if pa.types.is_list(type) else type
        assert not pa.types.is_struct(inner) or reference.arrow(type).startswith("list&lt;"), name
        assert "struct<" not in reference.arrow(type), name


def test_every_setting_has_a_meaning() -> None:
    flags = reference.flags()
    bare = [
        f"{title}: {name}"
        for title, model, _ in reference.SETTINGS
        for name, field in reference.fields(model)
        if not (field.description or flags.get((title, name), ("", ""))[1] or reference.meaning(name))
    ]
    assert bare == []


def test_no_meaning_is_given_twice() -> None:
    """The table of meanings is for settings that nothing else describes."""
    flags, used = reference.flags(), set()
    for title, model, _ in reference.SETTINGS:
        for name, field in reference.fields(model):
            if not (field.description or flags.get((title, name), ("", ""))[1]):
                used.add(reference.meaning(name))
    assert [name for name, text in reference.MEANINGS.items() if text not in used] == []
