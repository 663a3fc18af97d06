"""How much of a model is split, counted operation by operation: parameters, arithmetic and the sizes of all tensors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from turns import by_turns

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")

import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import ALL, HEADS, build, inputs

from ndtp.measure.volume import fake_group
from ndtp.runtime.arrival import stored_shape

BATCH, LENGTH, HIDDEN = 16, 32, 64
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "vocab_size": 96, "attn_implementation": "eager",
}  # fmt: skip
# What differs: nothing inside of a block is to be larger than hidden states are, or it would not tell these.
SIZES_OF = {
    "GPT2LMHeadModel": {"n_embd": HIDDEN, "n_head": 8, "n_inner": 48, "n_layer": 1, "vocab_size": 96},
    "OPTForCausalLM": SIZES | {"word_embed_proj_dim": HIDDEN},
    "MixtralForCausalLM": SIZES | {"intermediate_size": 24},  # every token has two experts
    "ViTForImageClassification": SIZES | {"image_size": 20},
    "T5ForConditionalGeneration": {"d_model": HIDDEN, "num_heads": 8, "num_layers": 1, "vocab_size": 96},
    "BartForConditionalGeneration": {
        "d_model": HIDDEN, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 96,
        "max_position_embeddings": LENGTH,
    },
}  # fmt: skip


def model_of(name):
    return build(name, **SIZES_OF.get(name, SIZES)).float()


def inputs_of(name):
    """And the bytes of their hidden states."""
    given, tokens = inputs(name, BATCH, LENGTH), BATCH * LENGTH
    if "pixel_values" in given:
        given["pixel_values"], tokens = torch.randn(BATCH, 3, 20, 20), BATCH * (5 * 5 + 1)
    return given, tokens * HIDDEN * 4


class Counted(TorchDispatchMode):
    """Of all operations: their arithmetic, and the most bytes that any of them gave."""

    def __init__(self):
        super().__init__()
        self.flops, self.largest = 0, (0, "nothing")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not x.is_meta:  # which tells a shape, and has no memory
                held = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
                self.largest = max(self.largest, (held, f"{func} gives {tuple(x.shape)}"))
        return result


def counted(model, given):
    with Counted() as found:
        model(**given).loss.backward()
    return found.flops, found.largest


def share_split(mine, whole, ranks):
    """What part is divided among all ranks, where the rest is on each of them."""
    return (1 - mine / whole) * ranks / (ranks - 1)


CUBE = {"z": 2, "x": 2, "y": 2}
GATHERED = {"split of what 'qa_outputs' gave"}  # two numbers a token
SPLIT = 0.99  # of the arithmetic of every model, and of the parameters of all but these:
# Biases and gains lie in halves, which is one part in a hundred of models as small as these that have one of either
# with every product; see below for models of real sizes.
PARAMETERS_SPLIT = {
    "GPT2LMHeadModel": 0.986,  # and every rank has the biases of queries, keys and values in one
    "OPTForCausalLM": 0.989,
    "BertForMaskedLM": 0.987,
    "BertForTokenClassification": 0.989,
    "BertForQuestionAnswering": 0.989,
    "ViTForImageClassification": 0.988,
    "BartForConditionalGeneration": 0.989,
}


def check_nothing_whole(names, mesh, scheme):
    for name in names:
        where = f"{name} on {mesh.grid}"
        model, dense, (given, limit) = model_of(name), model_of(name), inputs_of(name)
        ndtp.parallelize(model, mesh, scheme=scheme)
        flops, (size, what) = counted(model, given)
        assert size < limit, f"{where}: {what}"
        whole_flops, (whole_size, _) = counted(dense, given)
        assert whole_size >= limit, f"{where}: the dense model has such tensors, and they are seen"
        held = model.ndtp_report.parameters[2]
        total = sum(stored_shape(parameter).numel() for parameter in model.parameters())  # what is held has padding
        least = PARAMETERS_SPLIT.get(name, SPLIT)
        for kind, mine, whole, part in (("parameters", held, total, least), ("arithmetic", flops, whole_flops, SPLIT)):
            share = share_split(mine, whole, mesh.grid.num_ranks)
            assert share >= part, f"{where}: of its {kind} {share:.2%} are split"
        assert not set(model.ndtp_report.gathered) - GATHERED, where


@pytest.mark.cpu
def test_nothing_is_whole():
    """On three axes and on two; 1D gathers whole activations, that is what it is."""
    with fake_group(8):  # one rank of eight, and what the others would send is made up
        three, two = (ndtp.ProcessGrid(Grid(sizes), device_type="cpu") for sizes in (CUBE, {"x": 2, "y": 4}))
        check_nothing_whole(by_turns(ALL | HEADS, 3), three, "3d")
        check_nothing_whole(["LlamaForCausalLM"], two, "2d")


# Models as wide as they are published, of one layer, which is like all others; one of each kind of layers.
LAYERS = {"num_hidden_layers": 1}
T5 = {"d_model": 768, "num_layers": 1, "num_heads": 12, "d_ff": 3072}
BART = {
    "encoder_layers": 1, "decoder_layers": 1, "d_model": 768, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
}  # fmt: skip
LLAMA_3 = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
REAL = {
    "BertForMaskedLM": LAYERS, "ViTForImageClassification": {"num_labels": 1000} | LAYERS,
    "T5ForConditionalGeneration": T5, "BartForConditionalGeneration": BART, "GPT2LMHeadModel": {"n_layer": 1},
    "OPTForCausalLM": LAYERS, "GPTNeoXForCausalLM": LAYERS, "LlamaForCausalLM": LLAMA_3 | LAYERS,
    "Qwen3ForCausalLM": LAYERS, "Gemma3ForCausalLM": LAYERS, "Phi3ForCausalLM": LAYERS, "MixtralForCausalLM": LAYERS,
}  # fmt: skip


def test_models_of_real_sizes():
    """Parameters, and those of products alone, which is their arithmetic; but for experts, which stay whole."""
    with fake_group(8):
        mesh = ndtp.ProcessGrid(Grid(z=2, x=2, y=2), device_type="cpu")
        for name in by_turns(REAL, 3):
            kind = getattr(transformers, name)
            with torch.device("meta"):
                model = kind(kind.config_class(**REAL[name]))
            ndtp.parallelize(model, mesh, scheme="3d")
            counts = {"parameters": [0, 0], "arithmetic": [0, 0]}
            for module in model.modules():
                for parameter in module._parameters.values() if "Experts" not in type(module).__name__ else ():
                    if parameter is not None:
                        is_product = parameter.dim() > 1 and not isinstance(module, torch.nn.Embedding)
                        for count in list(counts.values())[: 1 + is_product]:
                            count[0] += parameter._local_tensor.numel()
                            count[1] += parameter.numel()
            for what, (held, total) in counts.items():
                share = share_split(held, total, 8)
                assert share >= SPLIT, f"{name}, {mesh.grid}: of its {what} {share:.2%} are split"
