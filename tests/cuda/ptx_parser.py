"""The PTX of a kernel as a list of instructions. Forms that the interpreter does not know are refused."""

import re
from dataclasses import dataclass


class PtxError(AssertionError):
    """PTX does what it may not, or something that the interpreter does not know."""


@dataclass(frozen=True)
class Instruction:
    """``guard``: the predicate that it depends on; it runs where that is not ``negated``."""

    guard: str | None
    negated: bool
    op: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op} {', '.join(self.args)}"


_INT = r"[su](16|32|64)"
_FLOAT = r"(\.ftz)?\.f32"
_ANY = r"([bsuf](16|32|64)|[bsu]8)"
_COMPARE = r"(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)"
_ATOMIC = r"(global|shared)(\.gpu|\.cta)?\.(add|min|max|or|and|exch|cas)\.[bsu](32|64)"
FORMS = re.compile(
    "|".join(
        (
            rf"(add|sub|mul)(\.rn)?{_FLOAT}",
            rf"(add|sub|mul\.lo|mul\.hi|mad\.lo|mad\.hi|div|rem|min|max|abs|neg)\.{_INT}",
            r"(mul|mad)\.wide\.[su](16|32)",
            rf"div\.rn{_FLOAT}",
            rf"fma\.r[nm]{_FLOAT}",
            r"fma\.rn\.(bf16x2|f16x2)",
            rf"(min|max)(\.NaN)?{_FLOAT}",
            rf"(abs|neg){_FLOAT}",
            rf"(sqrt|rcp)\.(rn|approx){_FLOAT}",
            rf"(rsqrt|ex2|lg2)\.approx{_FLOAT}",
            r"copysign\.f32",
            r"(and|or|xor|not)\.(b16|b32|b64|pred)",
            r"shl\.b(16|32|64)",
            r"shr\.[bsu](16|32|64)",
            r"shf\.[lr]\.(wrap|clamp)\.b32",
            r"(prmt|lop3|brev|popc|clz)\.b32",
            r"(popc|clz|bfi)\.b64|bfi\.b32",
            r"bfe\.[su]32",
            r"mov\.([bsuf](16|32|64)|pred)",
            rf"setp\.{_COMPARE}(\.(and|or|xor))?(\.ftz)?\.([bsu](16|32|64)|f32)",
            r"selp\.[bsuf](16|32|64)",
            r"cvta(\.to)?\.(global|shared)\.u64",
            rf"cvt\.({_INT}|[su]8)\.({_INT}|[su]8)",
            r"cvt\.r[nzmp]\.f32\.[su](8|16|32|64)",
            r"cvt\.r[nzmp]i\.(ftz\.)?([su](8|16|32|64)|f32)\.f32",
            r"cvt\.(ftz\.)?f32\.f16|cvt\.f32\.bf16|cvt\.rn\.(bf16x2|f16x2)\.f32|cvt\.rn\.(bf16|f16)\.f32|cvt\.sat\.f32\.f32",
            rf"ld(\.param|\.global(\.nc)?(\.L1::no_allocate)?|\.shared|\.volatile(\.global|\.shared)?)?(\.v[24])?\.{_ANY}",
            rf"st(\.global|\.shared|\.volatile(\.global|\.shared)?)?(\.v[24])?\.{_ANY}",
            rf"atom\.{_ATOMIC}|red\.{_ATOMIC}",
            r"(membar|fence)\S*",
            r"shfl\.sync\.(bfly|idx|up|down)\.b32",
            r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred)",
            r"bar\.warp\.sync|(bar|barrier)\.sync|(bar|barrier)\.red\.(or\.pred|and\.pred|popc\.u32)",
            r"cp\.async\.(cg\.shared\.global|commit_group|wait_group|wait_all)",
            r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16",
            r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32",
            r"mma\.sync\.aligned\.m16n8k32\.row\.col\.(s32\.s8\.s8\.s32|f32\.e4m3\.e4m3\.f32)",
            r"mbarrier\.(init|arrive(\.expect_tx)?|try_wait\.parity)\.shared::cta\.b64",
            r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",
            r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned|setmaxnreg\.(inc|dec)\.sync\.aligned\.u32",
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(bf16\.bf16|f16\.f16)",
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.(f32\.e4m3\.e4m3|s32\.s8\.s8)",
            r"bra(\.uni)?|ret|exit",
        )
    )
)


def parse(ptx: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and where its labels point.

    Raises:
        PtxError: there is no such kernel, or an instruction has an unknown form.
    """
    entry = re.search(rf"\.entry\s+{kernel}\((.*?)\)(.*?)\n\{{(.*?)\n\}}", ptx, re.S)
    if not entry:
        raise PtxError(f"no kernel {kernel}")
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in re.split(r";|(?<=:)\s*\n", re.sub(r"//.*", "", entry[3])):
        text = re.sub(r"^([{}]\s*)+", "", " ".join(raw.split()))  # scopes of inline PTX have no names of their own
        while label := re.match(r"(\$[\w$]+):\s*", text):
            labels[label[1]] = len(code)
            text = text[label.end() :]
        if text and text[0] != ".":
            code.append(_instruction(text))
    return code, labels


def _instruction(text: str) -> Instruction:
    guard = re.match(r"@(!?)(%p\d+)\s+", text)
    body = text[guard.end() :] if guard else text
    op, _, rest = body.partition(" ")
    args = tuple(arg.strip() for arg in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest))
    barrier = op.startswith(("bar.sync", "barrier.sync", "bar.red", "barrier.red"))
    if not FORMS.fullmatch(op) or (barrier and "0" not in args[:2]):
        raise PtxError(f"unknown instruction: {text}")
    return Instruction(guard[2] if guard else None, bool(guard and guard[1]), op, args)
