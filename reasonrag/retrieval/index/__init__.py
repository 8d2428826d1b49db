"""Index folders: passages, words and vectors of a corpus, built once, resumable, checked, memory-mapped."""
