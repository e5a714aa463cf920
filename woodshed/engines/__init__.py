"""Engines: who writes the next tokens, here or on a server."""
