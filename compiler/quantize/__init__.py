"""Quantizes a lowered model: its steps are interpreted with calibration tokens, and its weights replaced."""
