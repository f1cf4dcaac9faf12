"""Executors, one file a device."""
