"""A norm of a stock model is taken for what it does, whatever its attributes say."""

import pytest
import torch
from products import mesh_of

import ndtp
from ndtp import Grid

transformers = pytest.importorskip("transformers")


def falcon_mamba():
    """Its norms have no parameters, and name a size that is that of hidden states; what they get is another's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "time_step_rank": 2, "state_size": 8}
    return transformers.FalconMambaForCausalLM(
        transformers.FalconMambaConfig(**sizes, num_hidden_layers=1, use_associative_scan=False)
    ).eval()


def check_norms():
    ids = torch.randint(32, (1, 4))
    dense, model = falcon_mamba(), falcon_mamba()
    ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d-sp")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    torch.testing.assert_close(model(ids).logits * 1.0, dense(ids).logits)


@pytest.mark.filterwarnings("ignore")
def test_a_norm_of_other_features_than_it_says(ranks):
    ranks(2).run(check_norms)
