"""What the form of a trajectory is worth."""

from __future__ import annotations

from typing import Literal


def search_p1_format(
    well_formed: bool, answered: bool, called: bool, responded: bool, *, strictness: Literal["soft", "strict", "none"]
) -> float | None:
    """R_format of Search-P1: 1 in form, 0.5 with an answer and some search, None where the trajectory is invalid.

    Algorithm 3's 0.1 and 0.05 are these with the weight lf = 0.1 in them already; eq. 4 would weigh them twice.

    Args:
        well_formed: every tag in its place.
        answered: there is a final answer.
        called: there is a tool call.
        responded: there is a tool response.
        strictness: `soft` as above; `strict`: all but 1 is invalid; `none` (the ablation): 0, and nothing is invalid.

    >>> [search_p1_format(form, True, True, True, strictness="soft") for form in (True, False)]
    [1.0, 0.5]
    >>> search_p1_format(False, True, True, True, strictness="strict") is None
    True
    >>> search_p1_format(True, True, False, False, strictness="soft") is None
    True
    """
    if strictness == "none":
        return 0.0
    if well_formed and answered and called:
        return 1.0
    return 0.5 if strictness == "soft" and answered and (called or responded) else None


def when_to_search_format(well_formed: bool) -> float:
    """r_f of "Learning when to search": 1 in form, else -1 (eq. 6).

    >>> when_to_search_format(True), when_to_search_format(False)
    (1.0, -1.0)
    """
    return 1.0 if well_formed else -1.0
