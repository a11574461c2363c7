"""Tools to look and to measure. The template never imports them, and each can be deleted."""
