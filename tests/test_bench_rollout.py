"""The checks of attention and sampling: that they see what could go wrong."""

import pytest
import torch

from check_outcomes import CPU, outcomes
from grpo_engine import decode_ops
from grpo_engine.benchmarks import checks_decode, checks_grouped, checks_sample
from grpo_engine.benchmarks.harness import admit
from grpo_engine.kernels.reference_decode import DecodeTables

ATTENTION = {
    "decode": (checks_decode, decode_ops, "group_decode"),
    "grouped": (checks_grouped, checks_grouped.grouped_attention, "grouped_attention"),
}


@pytest.mark.parametrize("option", ["softcap", "window"])
@pytest.mark.parametrize("name", ATTENTION)
def test_an_option_of_attention_that_is_dropped(name, option, monkeypatch):
    checks, module, op = ATTENTION[name]
    right = getattr(module, op)
    monkeypatch.setattr(module, op, lambda *args, **given: right(*args, **given | {option: None}))
    found = outcomes(checks, "cpp")
    bad = {case for case, row in found.items() if row.status != "ok"}
    assert bad and bad == {case for case in found if f"{option}=" in case}


@pytest.mark.parametrize(
    ("spoil", "outputs"),
    [
        ("stale tables", "replayed"),
        ("page 0", "k_pages, v_pages"),
        ("idle slots", "first, replayed"),
    ],
)
def test_what_a_decode_step_in_a_graph_could_get_wrong(spoil, outputs, monkeypatch):
    right, first = decode_ops.group_decode, []

    def wrong(q, k, v, k_pages, v_pages, tables, **given):
        if spoil == "stale tables":
            first.append(DecodeTables(**{name: x.clone() for name, x in vars(tables).items()}))
            tables = first[0]
        out = right(q, k, v, k_pages, v_pages, tables, **given)
        if spoil == "page 0":
            k_pages[0, 0], v_pages[0, 0] = k[0], v[0]
        if spoil == "idle slots":
            out[tables.slot_group < 0] = 1
        return out

    monkeypatch.setattr(decode_ops, "group_decode", wrong)
    case = next(c for c in checks_decode.cases("cpp", CPU, tiny=True) if "page=16" in c.name)
    row, _ = admit(case, case.providers[0], case.inputs(), case.expected())
    assert row.status == "wrong"
    assert {name for name, error in row.errors.items() if not error < 0.05} >= set(
        outputs.split(", ")
    )


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniform"]
)
def test_an_argument_of_sampling_that_is_dropped(name, monkeypatch):
    right = decode_ops.sample_tokens
    off = {"temperature": torch.ones, "uniform": torch.zeros}

    def wrong(**given):
        if name in off:
            return right(**given | {name: off[name](given[name].shape, dtype=given[name].dtype)})
        return right(**given | ({name: None} if name in given else {}))

    monkeypatch.setattr(decode_ops, "sample_tokens", wrong)
    found = outcomes(checks_sample, "cpp")
    bad = {case for case, row in found.items() if row.status != "ok"}
    assert bad and (name in off or bad <= {case for case in found if case.endswith("filtered")})
