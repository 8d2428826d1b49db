"""Tree search: a question in, a tree of valued trajectories out."""

from reasonrag.core.config import SearchConfig
from reasonrag.mcts.search import Evaluation, Evaluator, TreeSearch
from reasonrag.mcts.tree import Node, Origin, Tree

__all__ = ["Evaluation", "Evaluator", "Node", "Origin", "SearchConfig", "Tree", "TreeSearch"]
