"""Compile ahead of time, and measure configurations."""
