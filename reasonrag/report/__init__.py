"""A finished run, training or evaluation as static pages: no server, no network, every foreign text inert."""

from reasonrag.report.pages import write_report

__all__ = ["write_report"]
