"""A finished run as static pages that a person can look at: no server, no network, every foreign text inert."""

from reasonrag.report.pages import write_report

__all__ = ["write_report"]
