"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("slime", deadline=None)
settings.load_profile("slime")

LONG = ("e2e", "sglang", "clients", "examples", "train")
"""Folders of the files that take longest."""


def pytest_collection_modifyitems(items):
    """They come first: a file is one worker's work, and what begins last should end soon."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)
