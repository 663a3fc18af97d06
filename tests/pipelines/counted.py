"""Traffic of a pipeline's step, without what torch's schedules send once for themselves."""

from torch.distributed.pipelining import schedules

VOTES = hasattr(schedules, "_preconnect_shared_p2p_edges")  # torch 2.15, which also connects each pair of ranks


def of_ndtp(volume):
    """The entries of ndtp: on torch 2.15 a schedule asks all ranks of its group for a vote first."""
    return [entry for entry in volume if not (VOTES and entry.axes[0].endswith("_ranks"))]
