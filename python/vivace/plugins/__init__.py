"""Vivace inside serving engines. Each plugin imports its engine; this package and what it shares with them import none."""
