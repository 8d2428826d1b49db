"""The papers whose ablations can be repeated, by the name of their command."""

from __future__ import annotations

from reasonrag.reproduce import hiprag, outcome, search_p1, when_to_search
from reasonrag.reproduce.ablation import Paper

PAPERS: dict[str, Paper] = {
    paper.name: paper for paper in (outcome.PAPER, hiprag.PAPER, search_p1.PAPER, when_to_search.PAPER)
}
