"""Stages of a run, one file each."""
