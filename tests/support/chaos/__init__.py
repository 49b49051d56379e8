"""Chaos on a whole real pipeline: a load, faults, and witnesses who say what must never be seen."""
