"""Studies: variants of a recipe, trained over several seeds and compared with chance.

A `Study` (`study.py`, TOML) becomes jobs (`study_job.py`), run in parallel and resumable
(`parallel_runs.py`); `comparing.py` and `statistics.py` make tests and intervals of their results,
`tables.py` and `study_pages.py` show them; `compute_budget.py` keeps variants at equal size. Start with
`study.py`.
"""

from triptych.training.studies.comparing import Outcome as Outcome
from triptych.training.studies.comparing import compare_study as compare_study
from triptych.training.studies.parallel_runs import StudyProgress as StudyProgress
from triptych.training.studies.parallel_runs import (
    StudyStoppedError as StudyStoppedError,
)
from triptych.training.studies.study import Study as Study
from triptych.training.studies.study import read_study as read_study
from triptych.training.studies.study_job import StudyJob as StudyJob
from triptych.training.studies.study_job import do_job as do_job
from triptych.training.studies.study_pages import write_study_page as write_study_page
from triptych.training.studies.study_pages import (
    write_study_pictures as write_study_pictures,
)
