"""How changes get out of the log: one module per kind of target. Nothing is imported here."""
