"""Run policies on questions and report how good they are, how often they search, and how certain that is."""
