"""Question to tree."""

from reasonrag.mcts.search import Evaluation, Evaluator, SearchSettings, TreeSearch
from reasonrag.mcts.selection import Selection
from reasonrag.mcts.tree import Node, Origin, Tree

__all__ = ["Evaluation", "Evaluator", "Node", "Origin", "SearchSettings", "Selection", "Tree", "TreeSearch"]
