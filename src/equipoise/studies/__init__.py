"""Studies: grids of runs that end in tables, with statistics and the papers' numbers beside ours."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.studies.study_file import StudyConfig, load_study, study_names

__all__ = ["StudyConfig", "load_study", "study_names"]

__getattr__ = on_demand(__name__, __all__, "study_file")
