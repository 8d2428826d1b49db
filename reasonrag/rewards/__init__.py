"""Trajectory to score."""
