"""The papers' comparisons at laptop scale in the demo world, and one of a real model, by the name of the command."""

from papers.comparison import Paper
from papers.real import REAL
from papers.rewards import HIPRAG, OUTCOME, SEARCH_P1, WHEN_TO_SEARCH
from papers.table3 import ONLINE, REASONRAG

PAPERS: dict[str, Paper] = {
    paper.name: paper for paper in (REASONRAG, ONLINE, OUTCOME, HIPRAG, SEARCH_P1, WHEN_TO_SEARCH, REAL)
}
