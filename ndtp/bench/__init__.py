"""What `ndtp bench` measures.  The commands are in `ndtp.cli`; these modules run without it."""
