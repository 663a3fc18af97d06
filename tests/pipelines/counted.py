"""Traffic of a pipeline's step, without what torch's schedules send once for themselves."""


def of_ndtp(volume):
    """The entries of ndtp: torch 2.15 asks all ranks of a group for a vote first, and connects each pair of them."""
    return [entry for entry in volume if not entry.axes[0].endswith("_ranks")]
