"""Only a name: nothing is drawn."""
