"""Public helpers that hooks import by module.

Public modules: `types`, `misc`, `http_utils`, `processing_utils`, `data`, `eval_config`.
Nothing is imported here, so that each of them costs only itself. Knows nothing of engines or training.
"""
