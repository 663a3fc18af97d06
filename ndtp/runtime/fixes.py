"""`FIXES`: what a user changes where ranks disagree, by the beginning of the topic on which they do."""

from __future__ import annotations

FIXES = (
    ("input", "the same rows on all ranks, but for those of another {axes}: a DistributedSampler takes "
     "num_replicas= and rank= of {axes} alone, and is left out where the grid has no such axis; "
     "what code draws of rows or of sizes comes from one seed, those of random and NumPy included"),
    ("sampled tokens", "torch.manual_seed with one seed on all of these ranks, and nothing drawn on one alone"),
    ("random numbers of NumPy", "np.random.seed with one seed on all of these, and nothing drawn on one alone"),
    ("random numbers of Python", "random.seed with one seed on all of these, and nothing drawn on one alone"),
    ("random", "torch.manual_seed with one seed on all of these ranks, and nothing drawn on one of them alone"),
    ("training", "model.train() or model.eval() on every rank"),
    ("optimizer", "the same optimizer with the same settings on every rank"),
    ("gradient of", "optimizer.zero_grad() on every rank, or on none"),
    ("requires_grad", "freeze the same parameters on every rank"),
    ("weight", "change weights on every rank alike, and load the same checkpoint everywhere"),
    ("all of the writes", "change weights on every rank alike"),
    ("buffer", "the same buffers on every rank: load the same checkpoint, and change them alike"),
    ("factor", "scale and clip gradients alike on every rank"),
    ("changed gradient", "scale, clip and remove gradients alike on every rank"),
    ("number", "the same probabilities, epsilons and flags of modules on every rank"),
    ("setting", "the same config of the model on every rank"),
    ("how it was split", "parallelize with the same arguments on every rank"),
    ("backward", "the same calls in the same order on every rank"),
    ("accumulating", "mesh.accumulate() around the same calls on every rank"),
    ("grad mode", "torch.no_grad() and torch.inference_mode() around the same calls on every rank"),
    ("inference mode", "torch.no_grad() and torch.inference_mode() around the same calls on every rank"),
    ("autocast", "torch.autocast around the same calls on every rank"),
    ("version of", "the same versions of Python and of its packages on every rank"),
    ("code ", "the same files, patches and wrappers of a forward (autocast, accelerate's) on every rank"),
    ("values of the batch", "the same rows in the same order on every rank, which takes its own of them: one data set, "
     "one seed"),
    ("module", "the same modules in the same order on every rank"),
    ("uses of", "the same layers in the same order on every rank; one that has no rows for a layer calls it without "
     "any, layer(x[mask])"),
    ("hooks", "the same hooks on every rank"),
    ("leaf that wants", "x.requires_grad_() of an input on every rank, or on none"),
    ("read", "the same sums, norms and prints of split tensors in the same order on every rank: over "
     "model.named_parameters(), not over a set, whose order each process draws"),
    ("all of the inputs", "the same keys in the same order on every rank, in dicts of inputs and in arguments that "
     "forward takes as **kwargs"),
    ("order of a set", "PYTHONHASHSEED=0 in the environment of every rank"),
    ("what", "the same calls in the same order on every rank"),
)  # fmt: skip
ELSEWHERE = (
    "the same calls in the same order on every rank.  What reads, prints, adds up or pickles a split tensor (logits, "
    "hidden states, weights, torch.save of a state) is a collective: call it on every rank, and print what it "
    "gives, or write the file (os.devnull on the others), on one"
)
