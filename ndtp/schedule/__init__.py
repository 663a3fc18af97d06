"""A plan as overlapped tasks on chunks of rows, and those tasks on two clocks.  Pure."""
