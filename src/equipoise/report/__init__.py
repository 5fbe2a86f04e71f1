"""Reports: from run folders to one self-contained HTML file, with CSV and LaTeX tables."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.report.page import write_report
    from equipoise.report.record import RunRecord, read_run
    from equipoise.report.run_facts import selection_note
    from equipoise.report.run_tables import headline, to_csv, to_latex

__all__ = ["RunRecord", "headline", "read_run", "selection_note", "to_csv", "to_latex", "write_report"]

__getattr__ = on_demand(__name__, __all__, "record", "run_tables", "run_facts", "page")
