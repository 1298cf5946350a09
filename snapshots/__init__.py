"""Snapshots of working configurations, kept in git."""
