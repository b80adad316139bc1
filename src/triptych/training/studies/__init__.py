"""Studies: variants of a recipe, trained over several seeds and compared with chance.

A `Study` (`study.py`, TOML) becomes jobs (`study_job.py`), run side by side and resumable
(`parallel_runs.py`); `comparing.py` and `statistics.py` make tests and intervals of their results,
`tables.py` and `study_pages.py` show them; `compute_budget.py` keeps variants at equal size. Start with
`study.py`.
"""

from triptych.training.studies.comparing import Outcome, compare_study
from triptych.training.studies.parallel_runs import StudyProgress, StudyStoppedError
from triptych.training.studies.study import Study, read_study
from triptych.training.studies.study_pages import write_study_page, write_study_pictures

__all__ = [
    "Outcome",
    "Study",
    "StudyProgress",
    "StudyStoppedError",
    "compare_study",
    "read_study",
    "write_study_page",
    "write_study_pictures",
]
