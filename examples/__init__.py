"""Examples of parts of your own; docs/extend.md explains them, and the test suite runs each."""
