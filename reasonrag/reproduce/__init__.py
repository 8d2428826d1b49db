"""The papers' comparisons at laptop scale in the demo world, by the name of their command."""

from reasonrag.reproduce.online import HIPRAG, OUTCOME, SEARCH_P1, WHEN_TO_SEARCH
from reasonrag.reproduce.paper import Paper
from reasonrag.reproduce.reasonrag import REASONRAG

PAPERS: dict[str, Paper] = {paper.name: paper for paper in (REASONRAG, OUTCOME, HIPRAG, SEARCH_P1, WHEN_TO_SEARCH)}
