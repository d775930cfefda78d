"""Training backends behind one interface.

Public: `base.Trainer` and `base.StepRow`, `update.train_on_rollouts`, and a trainer in each sub-package.
Nothing is imported here: only the backend that a run names is loaded. Knows nothing of engines or Ray.
"""
