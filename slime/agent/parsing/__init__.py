"""Parsers of model outputs."""
