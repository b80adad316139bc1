"""Studies: variants of a recipe, trained over several seeds and compared with chance.

A `Study` (`study.py`, TOML) becomes jobs (`job.py`), run side by side and resumable (`running.py`);
`comparing.py` and `statistics.py` make tests and intervals of their results, `tables.py` and `pages.py`
show them; `budget.py` keeps variants at equal size. Start with `study.py`.
"""

from triptych.studies.comparing import Outcome, compare_study
from triptych.studies.pages import write_study_page, write_study_pictures
from triptych.studies.running import StudyProgress, StudyStoppedError
from triptych.studies.study import Study, read_study

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
