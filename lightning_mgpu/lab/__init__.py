"""Tools to trace, emulate and measure. The template imports none of them; each can be deleted."""
