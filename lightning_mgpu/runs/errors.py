"""The exception for a mistake of the user's."""


class UsageError(Exception):
    """Something the user gave is wrong. The message says what was given, what is allowed and what to do."""
