"""Compile every shipped configuration for every target, without a device, and look at what came out.

    python -m ndtp_kernels.tools.aot [--json FILE] [--target sm_90]     FILE - is stdout; exit status 1 when one fails
    python -m ndtp_kernels.tools.aot --page docs/kernels.md             writes the table of all of them into the page
    python -m ndtp_kernels.tools.aot --compare docs/kernels.md          fails where the page says anything else

The JSON is {"configurations": [{"kernel", "target", "config", "registers", "shared_bytes", "spills", "scratch_bytes",
"epilogue", "instructions", "warnings"}]}; of a configuration that does not compile the numbers are null.  `epilogue` is
the instructions that each warp that multiplies issues between two tiles; occupancy is in the printed table.

A configuration fails when it does not compile, spills registers, needs more shared memory than a block may have or than
the bound that launches are chosen by (`roof.shared_bytes`), has too many registers for a block on an SM, or lacks the
instruction that makes it worth having: wgmma and TMA on sm_90, tcgen05 on sm_100, mma on sm_80, mfma on gfx942,
setmaxnreg where it claims warp specialization.  It also fails when ptxas expects it to be slow (C7510 to C7519:
wgmma that wait for each other), when its loop over K waits until every wgmma is done, or loads without pipelining.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndtp_kernels.choice import roof
from ndtp_kernels.launch import Launch
from ndtp_kernels.tools import page
from ndtp_kernels.tools.cases import TARGETS, CompiledCase, cases, launch_of, name_of, problem_of, quick_cases, shown
from ndtp_kernels.tools.sass import Code

NUMBERS = ("registers", "shared_bytes", "spills", "scratch_bytes", "epilogue")
REPORTED = ("kernel", "target", "config", *NUMBERS, "instructions", "warnings")
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync",
    "mfma": r"\bv_mfma",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "cp.async": r"\bcp\.async\.c[ag]",
    "setmaxnreg": r"\bsetmaxnreg",
    "fma": r"\b(fma\.rn\.f32|v_(pk_)?fma(c)?_f32|v_(pk_)?fmac_f32)",
}


POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}


def compile_launch(launch: Launch, target: str) -> Any:
    """Compile what `launch` would run, specialized as Triton's own launcher does it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        if name in launch.constants:
            signature[name] = "constexpr"
        elif launch.kernel.params[position].do_not_specialize:
            signature[name] = "i32"
        elif value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=gpu, options=launch.options)


def compile_and_log(launch: Launch, target: str) -> tuple[Any, str]:
    """The compiled kernel, and what ptxas said of it."""
    from triton import knobs

    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile_launch(launch, target)
    log = printed.getvalue()
    if target.startswith("sm_") and "ptxas info" not in log:  # it came from Triton's cache
        ptxas = knobs.nvidia.ptxas_blackwell if int(target[3:]) >= 100 else knobs.nvidia.ptxas
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            architecture = re.findall(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)[0]
            command = [ptxas.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={architecture}", file.name]
            log = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True).stderr
    return compiled, log


def warnings_of(log: str) -> list[str]:
    """Return ptxas' warnings about wgmma: C7510 to C7519."""
    return sorted(set(re.findall(r"\((C751\d)\)", log)))


def disassembled(compiled: Any) -> str:
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-sass", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def numbers(compiled: Any, target: str) -> tuple[dict[str, int], Code | None]:
    """Registers a thread, bytes (on gfx: registers) spilled, shared and scratch memory, length of the epilogue."""
    common = {"shared_bytes": compiled.metadata.shared}
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        body = [line for line in text.splitlines() if re.match(r"\s+[a-z]+_\w+", line)]
        last = max((at for at, line in enumerate(body) if "v_mfma" in line), default=-1)
        return {
            **common,
            "registers": int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1]),
            # Scalar registers spill into lanes of vector registers, not into memory.
            "spills": sum(int(x) for x in re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)),
            "scratch_bytes": 0,
            "epilogue": len(body) - 1 - last,
        }, None
    listing = disassembled(compiled)
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {listing[:500]}")
    code = Code(listing)
    return {
        **common,
        "registers": int(found[1]),
        "spills": int(found[2]),
        "scratch_bytes": compiled.metadata.global_scratch_size,  # a program's tensor descriptors
        "epilogue": code.epilogue,
    }, code


def expected(case: CompiledCase) -> tuple[str, ...]:
    """The instructions that prove the fast path."""
    if case.is_pass:
        return ()
    if case.dtype == "float32":  # exact fp32 has no matrix unit on NVIDIA's chips
        return ("mfma",) if case.target == "gfx942" else ("fma", "cp.async")
    if case.target == "gfx942":
        return ("mfma",)
    matrix_unit = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(case.target, "mma")
    # Tiles under 64 rows are too small for wgmma and tcgen05.
    if matrix_unit != "mma" and (case.config.block_m < 64 or case.config.num_warps % 4):
        matrix_unit = "mma"
    loads = ("cp.async",) if case.config.kernel == "pointer" else ("tma",)
    return (matrix_unit, *loads, *(("setmaxnreg",) if case.config.warp_specialize else ()))


def examine(case: CompiledCase, **constants: Any) -> dict[str, Any]:
    """Compile one case and report it; "failures" is empty when all is well.

    Args:
        constants: instead of the kernel's own.
    """
    launch = launch_of(case)
    launch.constants.update(constants)
    row: dict[str, Any] = {
        "kernel": name_of(case),
        "target": case.target,
        "config": shown(case),
    }
    try:
        compiled, log = compile_and_log(launch, case.target)
    except Exception as error:
        none = dict.fromkeys((*NUMBERS, "occupancy"))
        failures = [f"does not compile: {str(error)[:300]}"]
        return {**row, **none, "instructions": [], "warnings": [], "failures": failures}
    text = compiled.asm["amdgcn" if case.target == "gfx942" else "ptx"]
    row["instructions"] = [name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, text)]
    row["warnings"] = warnings_of(log)
    found, code = numbers(compiled, case.target)
    row |= found
    failures = [f"lacks {name}" for name in expected(case) if name not in row["instructions"]]
    failures += [f"ptxas expects it to be slow: {warning}" for warning in row["warnings"]]
    if code is not None and not case.is_pass:
        failures += code.faults()
    if row["spills"]:
        failures.append(f"spills {row['spills']}")
    if row["shared_bytes"] > case.chip.shared_bytes:
        failures.append(f"shared memory {row['shared_bytes']} > {case.chip.shared_bytes}")
    threads = case.config.num_warps * (64 if case.target == "gfx942" else 32)
    fit = occupancy(row["registers"], threads, row["shared_bytes"], case.target)
    if row["shared_bytes"] > (bound := shared_bound(case)):
        failures.append(f"shared memory {row['shared_bytes']} > {bound}, the bound that launches are chosen by")
    if not fit and row["shared_bytes"] <= case.chip.shared_bytes:
        failures.append(f"no block of {threads} threads with {row['registers']} registers fits on an SM")
    return {**row, "occupancy": fit, "failures": failures}


def shared_bound(case: CompiledCase) -> int:
    """Return the shared memory that `fits` assumes for a program."""
    if case.is_pass:  # is not chosen: it has none to speak of
        return case.chip.shared_bytes
    problem = problem_of(case)
    if case.kind == "split":  # fp32 sums, stored without staging
        problem = replace(problem, out_bytes=4)
    return roof.shared_bytes(problem, case.config, case.chip)


def occupancy(registers: int, threads: int, shared: int, target: str) -> int:
    """Blocks that fit on one SM at once, by registers x threads and by shared memory."""
    if target == "gfx942":  # 512 registers a lane and SIMD, four SIMDs
        return max(1, min(4 * max(1, 512 // max(registers, 1)) * 64 // threads, 65536 // max(shared, 1)))
    per_sm = {"sm_80": 167936, "sm_89": 102400}.get(target, 233472)
    return min(65536 // (max(registers, 1) * threads), per_sm // (shared + 1024), 2048 // threads)


def report(of: Sequence[CompiledCase], workers: int | None = None) -> list[dict[str, Any]]:
    """Examine cases in processes side by side; by default one for each core."""
    # A server that has imported everything once, and has no threads: the parent may hold torch's.
    context = multiprocessing.get_context("forkserver")
    kinds = (f"triton_code.{kind}" for kind in ("gemm", "grouped", "pairs", "reduce"))
    context.set_forkserver_preload([f"ndtp_kernels.{name}" for name in ("tools.aot", *kinds)])
    with ProcessPoolExecutor(workers or len(os.sched_getaffinity(0)), mp_context=context) as pool:
        return list(pool.map(examine, of))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ndtp_kernels.tools.aot", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--json", metavar="FILE", help="write a JSON report; - for stdout")
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="only some of them: see quick_cases")
    parser.add_argument("--page", metavar="FILE", help="write the table into this page, between its marks")
    parser.add_argument("--compare", metavar="FILE", help="fail where this page, if this Triton made it, differs")
    parser.add_argument("--workers", type=int, help="processes; default: one for each core")
    chosen = parser.parse_args(arguments)
    choose = quick_cases if chosen.quick else cases
    rows = report(list(choose(tuple(chosen.target or TARGETS))), chosen.workers)
    if chosen.compare:
        for row in page.other(Path(chosen.compare), rows):
            row["failures"].append(f"{chosen.compare} says otherwise; fix: --page {chosen.compare}")
    failed = [row for row in rows if row["failures"]]
    text = json.dumps({"configurations": [{key: row[key] for key in REPORTED} for row in rows]}, indent=1)
    if chosen.json == "-":
        print(text)
    else:
        if chosen.json:
            Path(chosen.json).write_text(text + "\n")
        for row in rows:
            mark = "; ".join(row["failures"]) or "ok"
            print(
                f"{row['target']:7} {row['kernel']:28} {row['config']:48} "
                f"regs {row['registers']!s:>4} shared {row['shared_bytes']!s:>7} per SM {row['occupancy']!s:>2} "
                f"epilogue {row['epilogue']!s:>5}  "
                f"{' '.join(row['instructions']):30} {mark}"
            )
    if chosen.page:
        page.write(Path(chosen.page), rows)
    for row in failed:
        print(f"FAILED {row['target']} {row['kernel']} {row['config']}: {row['failures']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
