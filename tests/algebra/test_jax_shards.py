"""An oracle that ndtp shares nothing with: which block each device holds by JAX's NamedSharding, where JAX is."""

from itertools import permutations

import pytest
from legal import all_dims

from ndtp import Grid, Layout

jax = pytest.importorskip("jax")


@pytest.fixture(scope="module")
def devices():
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        found = jax.devices("cpu")
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"no eight CPU devices: {error}")
    if len(found) < 8:
        pytest.skip("no eight CPU devices")
    return found[:8]


def test_layouts_are_named_shardings(devices):
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    shape = (16, 24)
    for names in permutations("zxy"):
        grid = Grid(dict.fromkeys(names, 2))
        mesh = Mesh(np.array(devices).reshape(grid.shape), names)
        for dims in all_dims(names, 2):
            layout = Layout(grid, *dims)
            blocks = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims))).devices_indices_map(shape)
            for rank, device in enumerate(devices):
                theirs = tuple(range(*s.indices(size)) for s, size in zip(blocks[device], shape, strict=True))
                ours = tuple(range(s.start, s.stop) for s in layout.slices(rank, shape))
                assert ours == theirs, (layout, rank)
