"""Everything on disk: Parquet and its tables, the journal, run folders, question files."""
