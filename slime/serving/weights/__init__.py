"""Weights on their way from a trainer to engines.

Public: `factory.make_weight_sync`, from flags to a way; `sync.WeightSync`, what it is;
`shared.SharedWeights`, one memory for trainer and engines on one machine. Knows neither trainer nor engine.
"""
