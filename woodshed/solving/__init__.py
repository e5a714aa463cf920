"""Requests of a person at a repository of their own: the policy works on a copy, and the person decides."""
