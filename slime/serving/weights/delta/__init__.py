"""Deltas on disk: the bytes of a model that changed since the version before, and how a folder takes them.

Public: `apply.pull`, which brings a local folder to a published version; `publisher.DeltaPublisher`. A
folder is always one whole version. Knows bytes and files; knows no trainer and no engine.
"""
