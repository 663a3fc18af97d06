"""Models of others, each with inputs, which no test names one by one: see `tests/models/elsewhere.py`."""
