"""A process reward model: labels from trees, its training, how good it is, and the scorer that other rooms ask."""
