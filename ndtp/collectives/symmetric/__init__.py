"""Collectives by symmetric memory: every rank reads its peers' memory, by copy engines, with a signal per part."""
