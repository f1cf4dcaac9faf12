import torch

from llmc.plugins.embedding.reference import reference


def test_rows_are_exact_in_every_dtype() -> None:
    weight = torch.randn(7, 5)
    ids = torch.tensor([[6, 0], [3, 3]], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = reference(ids, weight.to(dtype))
        assert rows.dtype == torch.float32
        assert torch.equal(rows[0, 0], weight[6].to(dtype).float()) and torch.equal(rows[1, 0], rows[1, 1])
