"""The exception for a mistake of the user's."""


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""
