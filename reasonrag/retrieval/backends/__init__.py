"""Search engines outside of this process: databases, APIs, tools, and retrievers of other frameworks."""
