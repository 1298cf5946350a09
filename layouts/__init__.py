"""Parallelism layouts: presets, fit and evidence."""
