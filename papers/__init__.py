"""The papers' comparisons, in the demo world and of a real model, and what they compare with; run from a checkout."""

from papers.comparison import Paper, load

PAPERS: dict[str, Paper] = load()
