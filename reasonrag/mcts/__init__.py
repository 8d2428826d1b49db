"""Question to tree: Monte Carlo tree search over the steps of a policy."""

from reasonrag.mcts.search import Evaluation, Evaluator, Node, Origin, Tree, TreeSearch

__all__ = ["Evaluation", "Evaluator", "Node", "Origin", "Tree", "TreeSearch"]
