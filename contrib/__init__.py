"""Plug-ins that few users need, each about a page, to run from a checkout. They use the public surface alone."""
