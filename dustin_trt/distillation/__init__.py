"""A shallow draft model for any target: cut from its own layers, trained on its distribution."""
