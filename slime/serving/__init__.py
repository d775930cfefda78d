"""Engines, and how weights come to them.

Public: the sub-packages `embedded` and `weights`; `scripted.start_scripted_server`, a deterministic engine
for tests and demos, with `script.ScriptedAnswer` and `script.ScriptedCall`. Nothing is imported here.
"""
