"""The choice of a configuration for a problem: the table, the roof model, the chips. It needs no device."""
