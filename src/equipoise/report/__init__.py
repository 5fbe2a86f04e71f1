"""Reports: from run folders to one self-contained HTML file, with CSV and LaTeX tables."""

from equipoise.report.page import write_report
from equipoise.report.record import RunRecord, read_run
from equipoise.report.tables import headline, to_csv, to_latex

__all__ = ["RunRecord", "headline", "read_run", "to_csv", "to_latex", "write_report"]
