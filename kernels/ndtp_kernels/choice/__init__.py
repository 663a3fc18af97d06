"""Which configuration a problem gets: the table, the roof model, the chips.  Needs no device."""
