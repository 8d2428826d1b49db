"""Agents of LlamaIndex through `contrib.record`; `build-tree --recording` branches them."""

from tests.peers.check_agents import AGENTS, main

if __name__ == "__main__":
    main(name for name in AGENTS if "llama" in name)
