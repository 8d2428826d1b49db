"""The papers' comparisons at laptop scale in the demo world, and one of a real model, by the name of the command."""

from reasonrag.reproduce.online import HIPRAG, OUTCOME, SEARCH_P1, WHEN_TO_SEARCH
from reasonrag.reproduce.paper import Paper
from reasonrag.reproduce.real import REAL
from reasonrag.reproduce.reasonrag import ONLINE, REASONRAG

PAPERS: dict[str, Paper] = {
    paper.name: paper for paper in (REASONRAG, ONLINE, OUTCOME, HIPRAG, SEARCH_P1, WHEN_TO_SEARCH, REAL)
}
