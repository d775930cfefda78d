"""Stock SGLang as the engine: its command line, its process, what each version of it can do.

Nothing here imports sglang: it runs in the environment of ``--sglang-python``.
"""
