"""Low-rank adapters around the layers of a stock model: peft's, and modules of the same form."""

import copy
import warnings

import pytest
import torch
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor

import ndtp
from ndtp import CommMeter, Grid

pytest.importorskip("transformers")
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from architectures import build, inputs
from test_transformers_whole import check_gradients

ONE_LAYER = {"num_hidden_layers": 1, "n_layer": 1}
TARGETS = {
    "LlamaForCausalLM": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "Phi3ForCausalLM": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "GPT2LMHeadModel": ["c_attn", "c_proj", "c_fc"],
}


class LoRA(nn.Module):
    """In peft's form."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        sizes = (base.in_features, base.out_features) if isinstance(base, nn.Linear) else base.weight.shape
        self.lora_A = nn.ModuleDict({"one": nn.Linear(sizes[0], 3, bias=False)})
        self.lora_B = nn.ModuleDict({"one": nn.Linear(3, sizes[1], bias=False)})
        self.double()

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["one"](self.lora_A["one"](x)) * 0.5


def by_hand(model, targets):
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in targets:
            model.set_submodule(name, LoRA(module))
    return model


def by_peft(model, targets, **options):
    import peft

    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, lora_dropout=0.0, **options)
    return peft.get_peft_model(model, config)


def adapted(name, how, **options):
    model = how(build(name, **ONE_LAYER), TARGETS[name], **options)
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if "lora_" in key:  # B is made of zeros
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.1
    return model.eval()


def check_equal(name, how, mesh, scheme, after=False, **options):
    dense = adapted(name, how, **options)
    if after:  # adapters put around layers that are on the grid already
        base = ndtp.parallelize(build(name, **ONE_LAYER), mesh, scheme=scheme)
        model = how(base, TARGETS[name])
        for (key, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            if "lora_" in key:
                mine.data = theirs.data.clone()
        ndtp.parallelize(model, mesh)
        model.eval()
    else:
        model = ndtp.parallelize(adapted(name, how, **options), mesh, scheme=scheme)
    report = model.ndtp_report
    wrapped = sum("lora_" in key for key in report.replaced)
    layers = 2 * len([k for k in dense.state_dict() if "base_layer.weight" in k])
    assert wrapped == layers and report.linears[0] == report.linears[1], str(report)
    given = inputs(name)
    expected = dense(**given).loss
    loss = model(**given).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    expected.backward()
    loss.backward()
    check_gradients(model, dense, f"{name}, {scheme}, adapters")
    assert not report.gathered, report.gathered
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model, dense


def check_form():
    """Separate, fused and Conv1D layers, by hand; an adapter that is no adapter is left whole."""
    for name in TARGETS:
        check_equal(name, by_hand, mesh_of(Grid(x=2, y=2)), "2d")
    model = adapted("LlamaForCausalLM", by_hand)
    up = model.model.layers[0].mlp.up_proj
    up.lora_A["one"] = nn.Sequential(up.lora_A["one"])
    ndtp.parallelize(model, mesh_of(Grid(x=2, y=2)), scheme="2d")
    kept = model.ndtp_report.kept
    assert kept["model.layers.0.mlp"] == "lora_A.one around it is a Sequential, no nn.Linear", kept


def check_peft(folder):
    import peft

    mesh = mesh_of(Grid(x=2))
    model, dense = check_equal("LlamaForCausalLM", by_peft, mesh, "1d-sp")
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(build("LlamaForCausalLM", **ONE_LAYER), folder)
    for key, value in dense.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    check_equal("LlamaForCausalLM", by_peft, mesh, "1d-sp", after=True)
    dense, dora = (adapted("LlamaForCausalLM", by_peft, use_dora=True) for _ in range(2))
    ndtp.parallelize(dora, mesh, scheme="1d")
    assert any("variant of LoRA" in why for why in dora.ndtp_report.kept.values()), str(dora.ndtp_report)
    given = inputs("LlamaForCausalLM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(dora(**given).loss, dense(**given).loss, rtol=1e-6, atol=0.0)


def check_switches():
    """What peft turns on and off is what it turns on and off of the dense model."""
    import peft

    config = peft.LoraConfig(target_modules="all-linear", r=2)
    dense = peft.get_peft_model(build("LlamaForCausalLM", **ONE_LAYER), config)
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
    for each in (model, dense):
        with each.disable_adapter():
            pass
        each.set_adapter("default")
    trains = [{name for name, p in each.named_parameters() if p.requires_grad} for each in (model, dense)]
    assert trains[0] == trains[1] and all("lora_" in name for name in trains[0])


def check_prompts(folder):
    """The prompts of an encoder that is split are computed by all ranks, and written by one."""
    import peft

    for kind in (peft.PromptTuningConfig, peft.PromptEncoderConfig):
        base = build("LlamaForCausalLM", **ONE_LAYER)
        dense = peft.get_peft_model(copy.deepcopy(base), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
        model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2)), scheme="1d")
        model.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base, folder)
        prompts = again.prompt_encoder["default"].embedding.weight  # as they were saved
        torch.testing.assert_close(
            prompts, dense.get_prompt_embedding_to_save("default"), check_dtype=False, check_device=False
        )


class Drawn(str):
    """A name with a hash as Python draws it, another one on each rank."""

    rank = 0

    def __hash__(self):
        return len(self) * (1, 7)[self.rank] % 8


def check_several():
    """Samples of one call may have adapters of their own; what is made of several is made before."""
    import peft

    mesh, given = mesh_of(Grid(x=2)), {"input_ids": torch.arange(24).view(4, 6)}
    for target in ("q_proj", "o_proj"):
        config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
        torch.manual_seed(0)
        dense = peft.get_peft_model(build("LlamaForCausalLM", **ONE_LAYER), config)
        dense.add_adapter("other", config)
        dense = dense.double().eval()
        model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d")
        names = ["default", "other", "__base__", "default"]
        if target == "o_proj":
            with pytest.raises(ndtp.LayoutError, match=r"takes \([12], 6, 32\), and all of its samples are \(4, 6\)"):
                model(**given, adapter_names=names)
        else:
            found, expected = (each(**given, adapter_names=names).logits for each in (model, dense))
            torch.testing.assert_close(found, expected)
            Drawn.rank = mesh.rank
            with pytest.raises(ndtp.MismatchError, match=r"order of a set of names: .*\n  fix: PYTHONHASHSEED=0"):
                model(**given, adapter_names=[*map(Drawn, names)])
    model = ndtp.parallelize(copy.deepcopy(dense), mesh, scheme="1d")
    new, weight = nn.Parameter(torch.zeros(32, 32)), model.get_submodule("base_model.model.lm_head").weight
    new.data = weight.data[:32] * 0.5
    model.get_submodule("base_model.model.model.norm").register_parameter("new", new)
    torch.testing.assert_close(new, nn.Parameter(dense.get_submodule("base_model.model.lm_head").weight[:32] * 0.5))
    torch.testing.assert_close(model(**given).loss, dense(**given).loss)


def check_volume():
    """Where hidden states want gradients: counted to the byte."""
    mesh = mesh_of(Grid(x=2, y=2))
    model = adapted("LlamaForCausalLM", by_hand)
    model.requires_grad_(True)
    ndtp.parallelize(model, mesh, scheme="2d")
    with CommMeter() as meter:
        model(**inputs("LlamaForCausalLM")).loss.backward()
    assert meter.volume == model.ndtp_report.volume(4, 6)


def of_another_dtype(model):
    """As peft makes them by default around layers in 16 bits."""
    model.float()
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = parameter.data.double()
    return model


def check_dtypes():
    """Hidden states are cast for adapters, in front of the projections of attention, too."""
    for name in TARGETS:
        for sizes, scheme in (({"x": 2}, "1d"), ({"y": 2}, "3d")):
            dense, given = of_another_dtype(adapted(name, by_peft)), inputs(name)
            model = ndtp.parallelize(of_another_dtype(adapted(name, by_peft)), mesh_of(Grid(**sizes)), scheme=scheme)
            with CommMeter() as meter:
                loss = model(**given).loss
                loss.backward()
            assert meter.volume == model.ndtp_report.volume(**given), f"{name}, {scheme}"
            expected = dense(**given).loss
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                if theirs.grad is not None:
                    assert mine.grad.dtype == theirs.grad.dtype == torch.float64
                    torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-6)


def test_adapters_of_another_dtype_than_their_layers(ranks):
    pytest.importorskip("peft")
    ranks(2).run(check_dtypes)


def test_adapters_of_the_same_form(ranks):
    ranks(4).run(check_form)
    ranks(4).run(check_volume)


def test_adapters_of_peft(ranks, tmp_path):
    pytest.importorskip("peft")
    ranks(2).run(check_peft, tmp_path)
    ranks(2).run(check_switches)


def test_prompts_of_peft(ranks, tmp_path):
    pytest.importorskip("peft")
    ranks(2).run(check_prompts, tmp_path)


def test_several_adapters_of_peft(ranks):
    pytest.importorskip("peft")
    ranks(2).run(check_several)


def check_a_second_adapter():
    """As trl's DPO adds one for its reference; the model that is wrapped may be given alone, too."""
    mesh, given = mesh_of(Grid(x=2)), inputs("LlamaForCausalLM")
    models = [adapted("LlamaForCausalLM", by_peft) for _ in range(2)]
    models[1] = ndtp.parallelize(models[1], mesh)
    losses = []
    for model in models:
        model.add_adapter("other", model.peft_config["default"])
        for name, p in model.named_parameters():
            if ".other." in name:
                p.data.fill_(0.02)
        if model is models[1]:
            assert (
                ndtp.parallelize(model, ndtp.ProcessGrid(Grid(x=2))) is model
                and ndtp.parallelize(model.get_base_model()) is not None
            )
        model.set_adapter("other")
        losses.append(model(**given).loss)
    torch.testing.assert_close(losses[1], losses[0])


def test_a_second_adapter_after_the_split(ranks):
    ranks(2).run(check_a_second_adapter)


def check_data_of_split_weights():
    model = build("LlamaForCausalLM", **ONE_LAYER)
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    ndtp.parallelize(model, mesh_of(Grid(x=2)))
    split = model.model.layers[0].self_attn.q_proj.weight
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    new.weight.data = split.data.clone()
    torch.testing.assert_close(new.weight, nn.Parameter(weight))
    new.weight.data = (split * 2).detach()
    torch.testing.assert_close(new.weight.sum(), (2 * weight).sum())
    logits = model(**inputs("LlamaForCausalLM", 4, 6)).logits
    kind = type("OfSomebody", (nn.Parameter,), {})
    other = kind(torch.zeros(1), requires_grad=False)
    other.data = split.data
    torch.testing.assert_close(other.sum(), weight.sum())
    kept = torch.zeros(1)
    kept.data = logits.detach()
    assert type(kept) is torch.Tensor
    torch.testing.assert_close(kept, logits.gathered().detach())


def test_a_new_layer_takes_the_data_of_a_split_weight(ranks):
    ranks(2).run(check_data_of_split_weights)


def check_a_filled_cache():
    """As peft's prefixes come: keys and values that the split model has not computed."""
    from transformers import DynamicCache

    model = build("LlamaForCausalLM", **ONE_LAYER)
    config, given = model.config, inputs("LlamaForCausalLM", 4, 6)
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    ndtp.parallelize(model, mesh_of(Grid(y=2)), scheme="2d")
    cache = DynamicCache(config=config)
    cache.update(*(torch.ones(4, heads, 3, width, dtype=torch.float64) for _ in range(2)), 0)
    with pytest.raises(ndtp.LayoutError, match=r"got a cache with keys \(4, .*\n  fix: an empty cache"):
        model(**given, past_key_values=cache)
    model(**given, past_key_values=DynamicCache(config=config))


def test_a_cache_that_others_have_filled_is_refused(ranks):
    ranks(2).run(check_a_filled_cache)
