"""Agents: token sessions, adapters, parsers, harnesses and sandboxes."""
