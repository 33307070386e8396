"""A page about a run: what was logged, what the time was used for, and what the run is."""

from millstream.report._page import write_report as write_report
