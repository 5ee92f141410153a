"""Calibration of a (target, draft) pair: profile heads, search, tune, check, report."""
