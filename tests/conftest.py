"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("slime", deadline=None)
settings.load_profile("slime")
