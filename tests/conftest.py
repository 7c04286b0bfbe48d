"""What holds for all tests: on a shared machine how long an example takes says nothing about the test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
