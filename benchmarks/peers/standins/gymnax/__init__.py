"""Only a name."""
