"""Studies: grids of runs that end in tables, with statistics and the papers' numbers beside ours."""

from equipoise.study.config import StudyConfig, load_study, study_names

__all__ = ["StudyConfig", "load_study", "study_names"]
