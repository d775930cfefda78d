"""The arithmetic of training, free of backends: from rewards and log-probs to losses, weights and steps.

Public: `batch.TrainSample`, `normalise.group_advantages`, `schedule.split_steps`, `aggregate.row_weights`,
`packing.pack_rows` and `pack_tokens`, `tree.build_forest`, `policy_loss.policy_losses`, `kl.kl_estimate`,
`mismatch.gap_terms`. Nothing is imported here, as half of them need torch. Knows tensors, not models.
"""
