"""The rollout side: data sources, scheduling, hooks, rewards, filters, evaluation.

Public modules: `sglang_rollout` (the default rollout function and its pieces), `base_types`, `data_source`,
`sample_hooks`, `filter_hub`, `rm_hub`. Nothing is imported here: a hook that needs one pays for one.
Knows engines by HTTP only, and nothing of training.
"""
