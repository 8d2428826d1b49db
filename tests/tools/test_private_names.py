"""The private names of libraries that the package uses are listed, and are there."""

from __future__ import annotations

from tools.private_names import LISTED, gone, used


def test_every_private_name_in_use_is_listed_with_its_reason_and_no_other():
    assert used() == {library: set(names) for library, names in LISTED.items()}


def test_the_installed_libraries_have_every_listed_name():
    assert gone() == []
