"""reasonrag: process rewards for agentic RAG, from questions to a trained policy.

Importing the package is cheap: torch, trl, datasets, faiss and vllm are imported inside the functions that need them.
"""

__version__ = "0.1.0"
