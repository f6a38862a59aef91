"""Talks to servers that speak the chat interface of OpenAI: `client` asks, `cache` remembers."""
