"""From a Python function to the typed tile IR."""
