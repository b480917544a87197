"""Weights stored packed, unpacked when they are read: one file for every scheme."""
