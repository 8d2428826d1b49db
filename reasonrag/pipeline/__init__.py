"""The body of `build-tree`: configuration to parts, parts to trees, trees to tables."""
