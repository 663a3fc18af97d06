"""Stock models whose layers are of several dtypes, as `from_pretrained` leaves T5's `wo` in 32 bits."""

import copy

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")


def t5(dtype):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config).to(dtype)
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    return model


def check_wide_layers(axes, scheme, dtype):
    torch.manual_seed(0)
    dense, ids = t5(dtype), torch.randint(1, 64, (4, 6))
    exact, model = (
        copy.deepcopy(dense).double(),
        ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(**axes)), scheme=scheme),
    )
    losses = [net(input_ids=ids, labels=ids).loss for net in (exact, dense, model)]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == losses[2].dtype
    torch.testing.assert_close(losses[2], losses[1], rtol=2e-2, atol=0)

    def error(grad, of):  # as a share of the norm
        return ((grad.double() - of).norm() / of.norm()).item()

    for (name, p), q, r in zip(model.named_parameters(), dense.parameters(), exact.parameters(), strict=True):
        assert p.dtype == q.dtype, name
        if q.grad is not None:
            assert error(p.grad.full_tensor(), r.grad) < 2 * error(q.grad, r.grad) + 1e-3, name
    with torch.no_grad():
        states = [net.encoder(ids[:, :2]).last_hidden_state for net in (dense, model)]  # few rows, which are whole
    assert states[0].dtype == states[1].dtype
    torch.testing.assert_close(states[1] + 0, states[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("axes", "scheme"), [({"x": 2}, "1d-sp"), ({"z": 2}, "3d")], ids=str)
def test_layers_that_stay_wide(ranks, axes, scheme, dtype):
    ranks(2).run(check_wide_layers, axes, scheme, dtype)
