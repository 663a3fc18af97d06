"""`ndtp.checkpoint`: training runs and safetensors files, in and out of a model on any grid.

ndtp.checkpoint.save(model, optimizer, "run")            # a training run, to go on with on any other grid
ndtp.checkpoint.load(model, optimizer, "run")            # model: or the stages of a pipeline

model = ndtp.parallelize(model, mesh)                    # made on the meta device, or not
ndtp.checkpoint.load_safetensors(model, "folder")        # reads this rank's parts
ndtp.checkpoint.export_safetensors(model, "other")       # as the dense model would be saved
ndtp.save_pretrained(model, "served", tokenizer)         # what transformers and vLLM load
"""

from __future__ import annotations

from ndtp.checkpoints.dense_files import export_safetensors, load_safetensors
from ndtp.checkpoints.from_meta import initialize
from ndtp.checkpoints.pretrained import save_pretrained
from ndtp.checkpoints.training_state import Saving, load, save, start_save
from ndtp.checkpoints.transfer import transfer, transfer_volume

__all__ = [
    "Saving",
    "export_safetensors",
    "initialize",
    "load",
    "load_safetensors",
    "save",
    "save_pretrained",
    "start_save",
    "transfer",
    "transfer_volume",
]
