"""`python -m triptych.cli.job FILE`: one run of a study. `triptych compare` starts it; people do not."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from triptych.cli.process import prepare_training
from triptych.errors import TriptychError
from triptych.training.studies import (
    StudyJob,
    do_job,
)


def main() -> int:
    """Do the job that the file of the command line describes; the exit code."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    prepare_training()
    try:
        return do_job(
            StudyJob.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        )
    except TriptychError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return error.exit_code


def _end_with(parent: int) -> None:
    """Save and end after the study has ended: a killed study sends no signal; the next resumes this run."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
