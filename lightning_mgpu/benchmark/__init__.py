"""Measurements on your own machine."""
