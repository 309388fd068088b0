"""Settings of every suite."""

from hypothesis import settings

# A shared machine is no reason for a law to fail: time is bounded per test, not per example.
settings.register_profile("trueup", deadline=None)
settings.load_profile("trueup")
