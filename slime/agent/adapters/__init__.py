"""Adapters: HTTP applications that speak a model provider's protocol and record what is sampled."""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
