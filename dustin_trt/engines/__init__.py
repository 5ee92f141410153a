"""Backends behind one small interface."""
