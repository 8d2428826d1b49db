"""A finished run for people and other tools: its trees drawn and as graphs, its data set in figures."""
