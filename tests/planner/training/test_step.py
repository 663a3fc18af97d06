"""A training step by hand: what each part of it is, and what hides under what."""

from dataclasses import replace

import numpy as np
import pytest

from ndtp.algebra.wire import Wire
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.model_config import Mixture
from ndtp.planner.training.choose import Question, choose
from ndtp.planner.training.practice import Practice
from ndtp.planner.training.reasons import limits, why
from ndtp.planner.training.splits import RANK_ORDERS, Splits
from ndtp.planner.training.step import TrainingJob
from ndtp.planner.training.transformer import Transformer

MACHINE = Hardware(
    "test", 8, Link(100.0, 0.0, 0.0), Link(10.0, 0.0, 0.0), {"bfloat16": 100.0, "float8": 200.0}, gemm_half=0.0,
    memory_gbs=1e6, launch_us=0.0, attention_tflops={"flash2": 50.0},
)  # fmt: skip
MODEL = Transformer(4, 256, 1024, 4, 1024, 512)
PLAIN = Practice(attention="flash2", shard_optimizer=False)


def step(practice=PLAIN, batch=32, model=MODEL, machine=MACHINE, order=RANK_ORDERS[0], **splits):
    return TrainingJob(model, batch, machine, practice).step(Splits(**splits), order)


def test_products_are_six_flops_a_parameter_and_token():
    time = step()
    tokens, parameters = 32 * 512, 4 * 12 * 256**2 + 1024 * 256
    assert float(time.products) == pytest.approx(6 * tokens * parameters / 100e12, rel=1e-6)
    assert float(time.bubble) == float(time.tensor) == float(time.weights) == float(time.data) == 0


def test_attention_is_causal_and_its_backward_makes_scores_again():
    model = replace(MODEL, sequence=2**20)
    flops = 4 * 4 * 2**20 * 2**19 * 256  # layers, two products, pairs of tokens, features
    cores = float(step(model=replace(model, heads=2), batch=1).cores)  # heads of 128: the rate as it is
    assert cores == pytest.approx(3.5 * flops / 50e12, rel=2e-3)


def test_float8_halves_the_products_of_layers_alone():
    head = 6 * 32 * 512 * 1024 * 256 / 100e12
    whole, half = float(step().products), float(step(replace(PLAIN, dtype="float8")).products)
    assert half == pytest.approx(head + (whole - head) / 2)


@pytest.mark.parametrize("again, more", [("layer", 2 / 3), ("full", 1.0), ("layers", 1 / 3), ("products", 0.5)])
def test_recomputation_costs_a_forward_or_a_part_of_it(again, more):
    """Products alone, to which the machine's memory and attention add nothing here."""
    machine = replace(MACHINE, attention_tflops={"flash2": 1e9})
    head = 6 * 32 * 512 * 1024 * 256 / 100e12
    forward = (float(step(machine=machine).products) - head) / 3
    time = step(replace(PLAIN, recompute=again), machine=machine)
    # 16 of 24 h^2 come before a layer's last product.
    assert float(time.again) == pytest.approx(forward * more, rel=1e-2)


def test_bubble_is_a_stage_for_each_one_before_it_and_shrinks_by_turns():
    one, two = step(pp=4, micro=1), step(pp=4, micro=1, virtual=2)
    assert float(two.bubble) == pytest.approx(float(one.bubble) / 2)
    head = 6 * 512 * 1024 * 256 / 100e12
    layer = (float(one.products + one.cores + one.moved) - 32 * head) / 32
    assert float(one.bubble) == pytest.approx(3 * layer, rel=0.05)


def test_uneven_stages_are_as_slow_as_the_fullest():
    model = replace(MODEL, layers=5, vocabulary=128)
    four, eight = step(model=model, pp=4), step(model=replace(model, layers=8), pp=4)
    assert float(four.cores) == float(eight.cores)


def test_tensor_parallel_waits_hide_in_chunks():
    alone, chunked = step(y=4), step(replace(PLAIN, tensor_chunks=4), y=4)
    rows = 32 * 512 * 256 * 2 * 3 / 4
    # Two blocks of two collectives, forward and backward, and the embedding's and the head's.
    assert float(alone.tensor) >= 4 * 8 * rows / 4 / 100e9
    assert float(chunked.tensor) < float(alone.tensor)
    contended = step(replace(PLAIN, tensor_chunks=4), y=4, machine=replace(MACHINE, contention=1.0))
    assert float(contended.tensor) == pytest.approx(float(alone.tensor))


def test_gathers_of_weights_hide_under_layers_until_these_are_short():
    long, short = step(z=8, micro=4), step(z=8, micro=1, batch=8)
    assert float(long.weights) == 0 < float(short.weights)
    waited = step(replace(PLAIN, overlap_weights=False), z=8, micro=4)
    assert float(waited.weights) > 0


def test_sums_over_replicas_leave_the_node_where_the_order_says_so():
    near = step(replace(PLAIN, overlap_data=False), dp=8)
    far = step(replace(PLAIN, overlap_data=False), dp=8, machine=replace(MACHINE, ranks_per_node=1))
    parameters = 4 * 12 * 256**2 + 2 * 1024 * 256
    assert float(near.data) == pytest.approx(2 * 7 / 8 * parameters * 4 / 100e9, rel=0.01)
    assert float(far.data) == pytest.approx(10 * float(near.data), rel=0.15)


def test_the_fullest_rank_of_experts_is_waited_for():
    model = replace(MODEL, mixture=Mixture(4, 8, 2, 512))
    even = step(model=model, e=8)
    odd = step(replace(PLAIN, imbalance=2.0), model=model, e=8)
    assert float(even.experts) > 0
    assert float(odd.products) > 1.5 * float(even.products)


def test_many_splits_at_once_are_each_as_alone():
    columns = {"pp": [1, 2], "dp": [1, 2], "y": [4, 1], "z": [2, 2]}
    names = Splits().as_dict()
    many = Splits(**{name: np.array(columns.get(name, [1, 1])) for name in names})
    together = TrainingJob(MODEL, 32, MACHINE, PLAIN).step(many, RANK_ORDERS[0]).total
    alone = [float(step(**many.one(i).as_dict()).total) for i in range(2)]
    assert list(together) == pytest.approx(alone)


MIXED = replace(MODEL, mixture=Mixture(4, 16, 2, 512))


def test_the_host_waits_for_the_counts_of_rows_and_graphs_of_a_step_do_not():
    machine = replace(MACHINE, launch_us=5.0)
    eager, layers, step_ = (
        float(step(replace(PLAIN, graphs=graphs), model=MIXED, machine=machine, e=2).host)
        for graphs in ("none", "layers", "step")
    )
    assert eager > layers > step_ == 0
    kernels = 60 + 100 + 6 * 8  # of a layer, its router, and the eight experts of a rank
    micros, each = 16, 25e-6
    device = step(model=MIXED, e=2)
    assert eager == pytest.approx(micros * 4 * kernels * each - float(device.total - device.optimizer), rel=0.05)
    assert float(step(replace(PLAIN, dtype="float8"), model=MIXED, machine=machine, e=2).host) > eager


def test_experts_on_tensor_parallel_ranks_are_sent_rows_and_need_no_sums():
    """Each of two ranks has half of the experts, and the rows of its own part of the sequences go to all four."""
    parts, whole = step(model=MIXED, e=2, y=2), step(replace(PLAIN, fold_experts=True), model=MIXED, e=2, y=2)
    assert float(whole.tensor) < float(parts.tensor)
    odd = replace(MIXED, mixture=Mixture(4, 2, 2, 512))  # no number of experts for four ranks
    assert step(model=odd, e=2, y=2) == step(replace(PLAIN, fold_experts=True), model=odd, e=2, y=2)


def test_tokens_go_to_as_many_nodes_as_their_router_may_choose():
    def received(**features):
        return float(step(replace(PLAIN, once_per_node=True, **features), model=MIXED, e=16, batch=64).experts)

    assert received(expert_nodes=1) == pytest.approx(received() / 1.5, rel=0.01)  # two experts, on two nodes of eight
    assert received(expert_nodes=2) == received()


def test_rows_of_experts_hide_under_another_micro_batch():
    machine, beside = replace(MACHINE, contention=0.5), replace(PLAIN, overlap_experts=True)
    alone = float(step(model=MIXED, machine=machine, e=2).experts)
    assert float(step(beside, model=MIXED, machine=machine, e=2).experts) == pytest.approx(alone / 2)


def test_gradients_are_added_to_those_of_earlier_micro_batches():
    slow = replace(MACHINE, memory_gbs=1.0)
    each = [float(step(machine=slow, batch=batch).moved) for batch in (1, 2)]
    parameters = 4 * 12 * 256**2
    assert each[1] - 2 * each[0] == pytest.approx(2 * 2 * 4 * parameters / 1e9)  # twice read and written, in fp32


def test_latent_vectors_make_projections_narrow():
    latent = replace(MODEL, latent=96, head_size=64, value_size=32)
    block = latent.attention(1)
    assert block.parameters == 256 * 96 + 4 * 32 * 256 and latent.attention(1).bounds[1] == (1, 4 * 32, 256)
    assert float(step(model=latent).products) < float(step().products)


def test_a_step_that_starts_kernels_most_of_its_time_says_so_and_splits_no_layers():
    """Each collective is one more kernel to start: a small model is not split as if that were free."""
    machine = replace(MACHINE, launch_us=50.0)
    best = choose(Question(MODEL, 8, 4, machine, PLAIN, context=False), 1)[0]
    assert limits(best) == "starting kernels" and "to starting kernels" in why(best)
    assert best.splits.x == best.splits.y == 1 and best.practice.recompute == "none"
    assert float(step(machine=machine, y=4, batch=8).total) > float(step(machine=machine, dp=4, batch=8).total)


def test_each_stage_of_a_pipeline_has_a_layer():
    given = Question(replace(MODEL, layers=3), 8, 4, MACHINE, PLAIN, context=False, fixed={"pp": 2})
    assert {each.splits.virtual for each in choose(given, 20)} == {1}
    with pytest.raises(ValueError, match="pp=4 cannot split 3 layers; each stage has one"):
        choose(replace(given, fixed={"pp": 4}), 1)


def test_keys_travel_round_a_ring_by_the_wire_and_sums_of_their_gradients_as_they_are():
    """Of bf16 fp8 has half the bytes, and a scale of 4 bytes for each head of 64 numbers."""
    alone = {"overlap_weights": False}
    ring, gathered = (
        [
            float(step(replace(PLAIN, gather_context=of, wire=wire, **alone), cp=4).context)
            for wire in (None, Wire.of("fp8"))
        ]
        for of in (False, True)
    )
    share = (64 + 4) / 128
    assert ring[1] == pytest.approx(ring[0] * (2 * share + 1) / 3)
    assert gathered[1] == pytest.approx(gathered[0] * share)
