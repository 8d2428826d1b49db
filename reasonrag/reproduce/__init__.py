"""The papers' comparisons at laptop scale, in the demo world: every one a list of commands that anybody can repeat."""
