"""What the compiler made of the innermost loops: a sum that rests on the stack between two steps costs a third of a
product's speed, and nothing else shows it: the bits are right. Reads the machine code, so it holds for every table,
not only the one that this CPU runs."""

import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from pinnate import _native

PRODUCT = re.compile(r"vfn?m(add|sub)\d+ps|vdpbf16ps|vpmadd|vpdp|tdp")
LONGEST = 1000  # instructions of such a loop
SLOT = re.compile(r"(-?0x[0-9a-f]+|)\(%r[sb]p\)")


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def parse(disassembly: str) -> list[Instruction]:
    code = []
    for line in disassembly.splitlines():
        address, tab, text = line.partition(":\t")
        if tab:
            name, _, operands = text.partition(" ")
            code.append(Instruction(int(address, 16), name, operands.partition("#")[0].partition("<")[0].strip()))
    return code


def product_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Innermost loops that do little but multiply and add: one of three instructions, and at least four."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    loops = []
    for i, jump in enumerate(code):
        target = re.fullmatch(r"[0-9a-f]+", jump.operands) if jump.name.startswith("j") else None
        begin = at.get(int(target[0], 16), i) if target else i
        body = code[begin:i] if i - begin <= LONGEST else []
        products = sum(PRODUCT.match(x.name) is not None for x in body)
        if products >= max(4, len(body) / 3) and not any(x.name.startswith("j") for x in body):
            loops.append(body)
    return loops


def carried_on_the_stack(loop: list[Instruction]) -> set[str]:
    """Slots of vectors that one step of the loop reads before it writes them: values carried to the next step."""
    written: set[str] = set()
    carried: set[str] = set()
    for x in loop:
        slot = SLOT.search(x.operands)
        if slot is None or "mm" not in x.operands:
            continue
        if x.operands.endswith(")"):  # AT&T order: the destination is last
            written.add(slot[1])
        elif slot[1] not in written:
            carried.add(slot[1])
    return carried & written


SPILLING = """
  10: vmovaps 0x220(%rsp),%ymm4
  18: vfmadd231ps %ymm2,%ymm14,%ymm4
  20: vfmadd231ps %ymm3,%ymm14,%ymm1
  28: vfmadd231ps %ymm3,%ymm14,%ymm5
  30: vpand 0x100(%rsp),%ymm3,%ymm3
  38: vfmadd231ps %ymm3,%ymm14,%ymm6
  40: vmovaps %ymm4,0x220(%rsp)
  48: cmp %r10,%r14
  50: jg 10 <gemm_tile+0x10>
""".replace(": ", ":\t")


def test_a_sum_on_the_stack_is_found() -> None:
    (loop,) = product_loops(parse(SPILLING))
    assert carried_on_the_stack(loop) == {"0x220"}  # a constant that is only read there does no harm


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_products_keep_their_sums_in_registers() -> None:
    out = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _native.__file__], capture_output=True, text=True, check=True
    )
    loops = product_loops(parse(out.stdout))
    if not loops:
        pytest.skip("not built for x86")
    assert len(loops) > 100
    spilling = {f"{loop[0].address:x}": slots for loop in loops if (slots := carried_on_the_stack(loop))}
    assert not spilling, f"loops at these addresses of {_native.__file__} carry sums on the stack"
