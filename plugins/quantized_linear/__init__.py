"""y = x @ weight.T + bias with a quantized weight.

x [..., K] float32, weight [N, K] uint8 codes, scale [N, G] float32 (or float16), zero [N, G] uint8 or float32,
bias [N], x_scale [1] or [2] float32; y [..., N]. ``group`` columns share a scale, G = ceil(K / group); 0: the whole
row.

A code c stands for (c - 128) * scale in ``format`` int8 and (c - 8) * scale in int4; (c - zero) * scale with integer
zeros; c * scale + zero with float zeros; and the number of that E4M3 bit pattern * scale in fp8.

``compute`` says what is multiplied:

    int8      x is rounded to int8, for each ``x_group`` columns of each row (0: the whole row) with the scale
              a = max|x| / 127, or with ``x_scale`` if it is given (-128 to 127, as quantized checkpoints have it); sums
              are integers, so every machine gives the same bits. Not for fp8. A second number of ``x_scale`` is a zero
              point z: q = round(x / a + z) is multiplied as it is, and ``bias`` has to hold -a * z * (sum of a row of
              the weight).
    bfloat16  x is rounded to bfloat16, codes minus zero are exact in it
    fp8       (format fp8 only) as bfloat16, but x is first rounded to E4M3 as for int8, with a = max|x| / 448
    float32   the numbers that the codes stand for, and x as it is

Sums are taken over blocks of columns with the same scales (packing.blocks) and added in ascending order:
y += a * scale * (sum of products). A row of x that is not finite gives a row that is not finite.

With a ``function`` (of llmc::glu) y [..., N / 2] is function(gate) * up: gate the first half of those outputs, up the
second. runtime/fusing.py makes such steps when an engine is loaded.

In a plan weight, scale and zero are packed (packing.py), x and y are 2-D with any row stride.
"""

from llmc.plugins.op import Op

OP = Op(
    "quantized_linear",
    inputs=("x", "weight", "scale", "zero?", "bias?", "x_scale?"),
    attributes={"format": str, "group": int, "compute": str, "x_group": int},
    rtol=2e-5,
    atol=2e-5,
    stored_attributes={"function": ""},
    plan_only=True,
)
