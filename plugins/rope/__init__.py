"""Rotary position embedding, in a form that covers every pairing and scaling: each output is two scaled inputs.

    y[t, h, i] = x[t, h, index[0, i]] * sign[0, i] * table[p, index[1, i]]
               + x[t, h, index[2, i]] * sign[1, i] * table[p, index[3, i]]        with p = position_ids[t]

x [T, H, D] and y [T, H, Do] float32; position_ids [T] int32 or int64 in 0..P-1; table [P, U] float32: the distinct
columns of the coefficients (cosines, sines, a one for what is not rotated) up to their sign; index [4, Do] int32;
sign [2, Do] float32, 0 in row 1 where an output has one term only. Su et al., https://arxiv.org/abs/2104.09864
"""

from llmc.plugins.op import Op

OP = Op("rope", inputs=("x", "position_ids", "table", "index", "sign"), rtol=1e-6, atol=1e-6)
