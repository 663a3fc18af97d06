"""Interpreted cases are run by test_interpreter in processes of their own, and are not collected here."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
