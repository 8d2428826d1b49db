"""Query to ranked passages: BM25 in this process, or a server over HTTP, with lookups shared between tasks."""
