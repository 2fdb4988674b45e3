"""Measuring this machine for plans, and holding plans against runs."""
