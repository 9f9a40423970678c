"""What every test runs under."""

from hypothesis import HealthCheck, settings

# Tests make no statement about time, and a busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
