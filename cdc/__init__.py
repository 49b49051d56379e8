"""Keep PostgreSQL tables mirrored in other stores, through one ordered log."""

__version__ = "0.1.0"
