"""Tokens: renderers, call formats and kinds of tokens."""
