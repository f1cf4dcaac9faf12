from configs import CONFIGS
from lowered import LIMITS

from llmc.compiler.lower import lower
from llmc.compiler.pipeline import make_graph
from llmc.compiler.targets.base import all_targets
from llmc.compiler.targets.cpu import TARGET
from llmc.compiler.trace import build_model, trace
from llmc.compiler.weights import Array
from llmc.plugins import kernels
from llmc.runtime.plan import Storage


def test_plans_name_only_kernels_that_exist():
    config = CONFIGS["llama"].make()
    parameters = {name: Array(value.numpy()) for name, value in build_model(config, "eager").state_dict().items()}
    lowered = lower(make_graph(trace(config, max_seq_len=64), parameters.__getitem__), TARGET, LIMITS, "float32")
    assert {step.op for step in lowered.plan.steps} <= set(kernels.ops())
    assert all(v.base % TARGET.alignment == 0 for v in lowered.plan.values if v.storage is Storage.ARENA)


def test_it_is_listed():
    assert all_targets()["cpu"] is TARGET
