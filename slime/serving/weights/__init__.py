"""Weights on their way from a trainer to engines.

Public: `shared.SharedWeights`, one memory for both on one machine. Knows neither trainer nor engine.
"""
