import pytest

from llmc.errors import UsageError
from llmc.quantization.base import Method, Scheme, parse_method
from llmc.quantization.options import describe, help_text, make_method, methods, options_of, presets


@pytest.mark.parametrize("name", [*methods(), *presets()])
def test_a_name_alone_is_a_method(name: str) -> None:
    method = parse_method(name)
    assert isinstance(method, Method)
    assert parse_method(describe(method)) == method
    assert make_method(method.name, options_of(method)) == method
    assert f"{name}: " in help_text()


def test_options_come_from_the_fields() -> None:
    method = parse_method(" rtn:group=64, sym=false ,bits=8")
    assert method.weights == Scheme("int8", 64, symmetric=False)
    assert describe(method) == "rtn:bits=8,group=64,sym=false"
    assert options_of(method) == {"bits": 8, "group": 64, "sym": False, "clip": False}


def test_the_help_says_what_options_may_be() -> None:
    for line in ("inputs are rounded to [float, fp8]", "bits of a weight [4, 8]", "that of the Hessian [1e-06 to 1.0]"):
        assert line in help_text()


def test_options_change_a_preset() -> None:
    assert parse_method("int8:group=32").weights == Scheme("int8", 32)


@pytest.mark.parametrize("group", ["0", "-1"])
def test_mth_31_one_group_per_channel(group: str) -> None:
    assert parse_method(f"rtn:group={group}").weights == Scheme("int4", 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "unknown method; known: none, .*int8.*rtn"),
        ("", "unknown method"),
        ("rtn:size=3", "unknown option size; known: bits, group, sym, clip"),
        ("rtn:bits=5", "bits=5: expected one of 4, 8"),
        ("rtn:bits=four", "expected a whole number"),
        ("rtn:bits=4.5", "expected a whole number"),
        ("rtn:group=17", "^--quant rtn: group=17: expected a multiple of 16 up to 256"),
        ("int4:group=512", "^--quant rtn: group=512: expected a multiple of 16 up to 256"),
        ("rtn:group=-2", "expected a multiple of 16 up to 256"),
        ("rtn:sym=perhaps", "expected true or false"),
        ("rtn:sym", "expected option=value, got 'sym'"),
        ("rtn:sym=", "expected option=value"),
        ("rtn:sym=true,sym=false", "sym is given twice"),
        ("rtn:sym=true,", "expected option=value"),
        ("RTN", "unknown method"),
        ("smoothquant:alpha=0.3", "alpha=0.3: is searched; give search=false"),
        ("awq:grid=0,duo=false", "^--quant awq: duo=false: there are no scales with grid=0"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_method(text)


@pytest.mark.parametrize("value", [None, [4], {"a": 1}, True, float("nan")])
def test_values_of_files_are_type_checked(value: object) -> None:
    with pytest.raises(UsageError, match=r"bits=.*: expected a whole number"):
        make_method("rtn", {"bits": value})


def test_values_of_files_may_be_typed() -> None:
    assert make_method("rtn", {"bits": 8, "sym": False, "group": 32.0}) == parse_method("rtn:bits=8,sym=false,group=32")
