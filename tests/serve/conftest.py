"""Models to serve."""

from small_models import language_model, small_run, translator  # noqa: F401 - fixtures
