"""Loops and waits, read from listings small enough to see by eye."""

import pytest
from ndtp_kernels.tools.sass import Code


def listing(*lines):
    """Instructions 0x10 apart, as cuobjdump prints them; "@P0 BRA 3" branches to the fourth line."""
    text = ["	code for sm_90a", "		Function : kernel"]
    for number, line in enumerate(lines):
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        if rest.startswith("BRA"):
            *branch, line = rest.split()
            rest = f"{' '.join(branch)} {int(line) * 16:#x}"
        text.append(f"        /*{number * 16:04x}*/      {predicate:>10} {rest} ;      /* 0x0123456789abcdef */")
        text.append("                                                        /* 0x000fe20000000800 */")
    return Code("\n".join(text))


WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"


def test_a_persistent_kernel():
    """Tiles from 1, K from 2: the wait behind the inner loop is the epilogue's, and is no fault."""
    code = listing(
        "S2R R0, SR_CTAID.X",  # 0
        "MOV R1, R2",  # 1: next tile
        PRODUCT,  # 2: next step of K
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "@P0 BRA 2",
        WAIT,  # 5
        "STG.E [R2], R24",
        "@!P1 BRA 1",
        "EXIT",
    )
    assert code.main_loop.head == 0x20 and code.length(code.main_loop.blocks) == 3
    assert code.waits_in_main_loop == 0
    assert code.epilogue == 4  # 1, 5, 6, 7


@pytest.mark.parametrize("slow,waits", [(WAIT, 1), ("WARPGROUP.DEPBAR.LE gsb0, 0x2", 0)])
def test_a_flattened_kernel(slow, waits):
    """One loop over tiles and K; only what no step can skip counts as a wait in each of them."""
    code = listing(
        "S2R R0, SR_CTAID.X",
        PRODUCT,  # 1: next step
        slow,
        "@P0 BRA 6",  # not the last of its tile
        WAIT,  # 4: the epilogue
        "STG.E [R2], R24",
        "@P1 BRA 1",  # 6
        "EXIT",
    )
    assert code.waits_in_main_loop == waits
    assert code.epilogue == 2


def test_a_spin_out_of_line_is_no_loop_of_products():
    """Where a barrier is not there yet, the code spins at its end and comes back."""
    code = listing(
        "S2R R0, SR_CTAID.X",
        "@!P0 BRA 6",  # 1: next step, which may have to spin
        PRODUCT,
        "@P1 BRA 1",
        "STG.E [R2], R24",
        "EXIT",
        "@!P0 BRA 6",
        "BRA 2",
    )
    assert code.main_loop.head == 0x10
    assert code.length(code.main_loop.blocks) == 5
    assert code.length(code.every_iteration) == 3
    assert code.epilogue == 2


def test_loads_that_are_not_pipelined():
    steps = (
        "S2R R0, SR_CTAID.X",
        "LDGSTS.E.128 [R1], [R2.64]",
        "LDG.E.U16 R3, [R4.64]",
        "HMMA.16816.F32 R0, R1, R2, R0",
    )
    code = listing(*steps, "@P0 BRA 1", "LDG.E R3, [R4.64]", "EXIT")
    assert code.plain_loads_in_main_loop == 1


def test_a_branch_on_a_uniform_predicate_may_go_on():
    """Its condition is an operand: taken for a jump, it would hide all that follows."""
    code = listing(
        "S2R R0, SR_CTAID.X", "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "BRA.U UP0, 1", "STG.E [R2]", "EXIT"
    )
    assert code.main_loop.head == 0x10
    assert code.epilogue == 2


def test_warps_with_roles_of_their_own_are_found_behind_a_table():
    """An indirect branch leads to what nothing else leads to, and not to subroutines."""
    code = listing(
        "BRX R2 -0x170",
        "STG.E [R2], R24",  # 1: the warps that store
        "EXIT",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]",  # 3: those that multiply
        "BRA.U !UP0, 3",
        "CALL.REL.NOINC 0x70",
        "EXIT",
        "RET.REL.NODEC R2 0x0",  # 7
    )
    assert code.main_loop.head == 0x30
    assert set(code.dominators) == {0x00, 0x10, 0x30, 0x50, 0x60}
    assert code.epilogue == 2


def test_an_epilogue_of_multiply_adds_is_no_loop_of_products():
    """A polynomial has more of them than the loop over K has products; without tensor cores they are the products."""
    polynomial = ["FFMA R4, R5, R6, R7"] * 4

    def kernel(product):
        return listing(
            "BRX R2 -0x170",
            product,  # 1: the warps that multiply
            "@P0 BRA 1",
            "EXIT",
            *polynomial,  # 4: those that store, tile after tile
            "STG.E [R2], R4",
            "@P0 BRA 4",
            "EXIT",
        )

    code = kernel("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]")
    assert code.main_loop.head == 0x10 and code.products(code.blocks) == 1 and code.epilogue == 1
    assert kernel("FADD R0, R1, R2").main_loop.head == 0x40


@pytest.mark.parametrize("last,call,epilogue", [("NOP", "@!P4 ", 3), ("@P0 BRA 1", "", 4)])
def test_a_call_of_what_never_returns_is_a_jump(last, call, epilogue):
    """A loop is left by a call: what follows its target is the epilogue; a subroutine is no part of it."""
    code = listing(
        "S2R R0, SR_CTAID.X",
        "HMMA.16816.F32 R0, R1, R2, R0",  # 1
        last,
        f"{call}CALL.REL.NOINC 0x60",
        "BRA 1",
        "RET.REL.NODEC R2 0x0",  # 5
        "STG.E [R2], R24",  # 6
        "CALL.REL.NOINC 0x50",
        "EXIT",
    )
    assert code.main_loop.head == 0x10
    assert code.epilogue == epilogue


def test_no_listing_is_no_kernel():
    with pytest.raises(ValueError, match="fix: the output of cuobjdump"):
        Code("nothing")
