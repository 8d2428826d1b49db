"""Serve an index over HTTP, in the protocol of Search-R1's retrieval server."""
