"""The papers' comparisons at laptop scale in the demo world, by the name of their command."""

from reasonrag.reproduce import hiprag, outcome, reasonrag, search_p1, when_to_search
from reasonrag.reproduce.paper import Paper

PAPERS: dict[str, Paper] = {
    paper.name: paper for paper in (reasonrag.PAPER, outcome.PAPER, hiprag.PAPER, search_p1.PAPER, when_to_search.PAPER)
}
