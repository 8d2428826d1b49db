"""The commands, one module per group: each holds the options and bodies of its commands.

`reasonrag.cli` imports a module when one of its commands runs or shows help. Everything slow is imported
inside the functions, so that `--help` needs click and `options.json` alone.
"""
