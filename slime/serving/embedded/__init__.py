"""The embedded engine: a Hugging Face model behind SGLang's native HTTP protocol, for laptops and tests.

Public: `engine.Engine`, `server.EngineServer`, `process.EngineProcess`, `core.EngineCore`. Nothing is
imported here: the HTTP face needs no torch. Knows nothing of training.
"""
