"""Index folders: a corpus and what is searched in it, built once, resumable, checked, memory-mapped."""
