"""A small router before several engines: the REST interface of sglang-router, in Python.

It is for machines without sglang-router, and for embedded engines. Unlike that it passes every body on as it
is. `python -m slime.serving.embedded_router SETTINGS_JSON` runs one.
"""
