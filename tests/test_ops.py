"""Arguments of the ops that mean nothing are refused by name."""

import math

import pytest
import torch

import grpo_engine as ge
from loss_names import LOSSES, NEEDED
from tensors import offsets


def call_loss(**changes):
    """Two samples of 2 and 1 tokens in one group; `changes` replace arguments."""
    arguments = {
        "logp": torch.tensor([-1.0, -2.0, -1.5]),
        "old_logp": torch.tensor([-1.0, -2.0, -1.5]),
        "ref_logp": torch.tensor([-1.0, -2.0, -1.5]),
        "rewards": torch.tensor([0.0, 1.0]),
        "cu_groups": offsets(0, 2),
        "cu_seqlens": offsets(0, 2, 3),
        **changes,
    }
    return ge.grpo_loss(**arguments)


def call_advantages(**changes):
    arguments = {"rewards": torch.tensor([0.0, 1.0]), "cu_groups": offsets(0, 2), **changes}
    return ge.group_advantages(**arguments)


def call_logprob(**changes):
    arguments = {"hidden": torch.ones(3, 2), "weight": torch.ones(5, 2)}
    return ge.token_logprob(**{**arguments, "targets": torch.tensor([0, 1, 4]), **changes})


def test_the_arguments_these_tests_start_from_are_accepted():
    assert call_loss().loss.item() == pytest.approx(0, abs=1e-6)  # ratios 1, advantages +-A
    assert call_advantages()[0].tolist() == pytest.approx([-0.9998, 0.9998], abs=1e-6)
    assert call_logprob()[0].tolist() == pytest.approx([-math.log(5)] * 3)


# not from 0, not to the end, falling, in the middle too, none at all, two dimensions, wrong types
BAD_OFFSETS = [offsets(1, 2), offsets(0, 1), offsets(0, 3, 2), offsets(0, -1, 2), offsets()]
BAD_OFFSETS += [offsets(0, 2)[None], torch.tensor([0, 2]), torch.tensor([0.0, 2.0])]


@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_bad_offsets_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="cu_groups"):
        call_loss(cu_groups=bad)
    with pytest.raises(ValueError, match="cu_groups"):
        call_advantages(cu_groups=bad)
    tokens = {"logp": torch.tensor([-1.0, -2.0]), "old_logp": None, "ref_logp": torch.zeros(2)}
    credit = {"rewards": None, "advantages": torch.zeros(max(0, bad.numel() - 1))}
    with pytest.raises(ValueError, match="cu_seqlens"):
        call_loss(**tokens, **credit, cu_seqlens=bad, cu_groups=None)
    with pytest.raises(ValueError, match=r"the_name.*given"):
        ge.check_offsets("the_name", bad, 2)


def test_offsets_with_empty_parts_are_good():
    assert ge.check_offsets("o", offsets(0, 0, 2, 2), 2) is None
    assert ge.check_offsets("o", offsets(0), 0) is None


T3, F3 = torch.tensor([-1.0, -2.0, -1.5]), torch.ones(3, dtype=torch.bool)
PADDED = {"logp": torch.zeros(2, 3), "old_logp": None, "ref_logp": None, "cu_seqlens": None}
NO_REFERENCE = {"options": ge.GRPOOptions(beta=0.0), "ref_logp": None}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("impl", {"impl": "fast"}),
        ("logp", {"logp": T3.long()}),
        ("logp", {"logp": [-1.0, -2.0, -1.5]}),
        ("logp", {"logp": T3[None]}),
        ("logp", {**PADDED, "logp": T3}),
        ("mask", {**PADDED, **NO_REFERENCE}),
        ("mask", {**PADDED, **NO_REFERENCE, "mask": torch.ones(2, 2, dtype=torch.bool)}),
        ("mask", {"mask": torch.ones(3)}),
        ("mask", {"mask": F3[:2]}),
        ("old_logp", {"old_logp": T3[:2]}),
        ("old_logp", {"old_logp": T3[:, None]}),
        ("old_logp", {"old_logp": T3.int()}),
        ("ref_logp", {"ref_logp": T3[:2]}),
        ("ref_logp.*beta", {"ref_logp": None}),
        ("importance_ratio", {"importance_ratio": T3[:2]}),
        ("importance_ratio", {"importance_ratio": F3}),
        ("rewards", {"rewards": None}),
        ("rewards", {"advantages": torch.ones(2)}),
        ("cu_groups", {"cu_groups": None}),
        ("rewards", {"rewards": torch.ones(3)}),
        ("rewards", {"rewards": torch.ones(2, 1)}),
        ("rewards", {"rewards": torch.ones(2).long()}),
        ("rewards", {"rewards": [0.0, 1.0]}),
        ("advantages", {"rewards": None, "advantages": torch.ones(4)}),
        ("advantages", {"rewards": None, "advantages": torch.ones(2, 1)}),
        ("advantages", {"rewards": None, "advantages": torch.ones(2).long()}),
        ("valid", {"valid": torch.ones(2)}),
        ("valid", {"valid": F3}),
        ("in_loss", {"in_loss": torch.ones(2)}),
        ("in_loss", {"in_loss": F3}),
        # not tensors, or tensors of a form that torch would broadcast or misread
        ("cu_groups", {"cu_groups": [0, 2]}),
        ("cu_seqlens", {"cu_seqlens": [0, 2, 3]}),
        ("valid", {"valid": [True, True]}),
        ("in_loss", {"in_loss": [True, True]}),
        ("mask", {"mask": [True, True, True]}),
        ("advantages", {"rewards": None, "advantages": [1.0, 1.0]}),
        ("mask", {"mask": torch.tensor([0, 1, 2])}),
        ("normalizer", {"normalizer": torch.ones(3)}),
    ],
)
def test_grpo_loss_refuses_bad_arguments_by_name(name, changes):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call_loss(**changes)


def test_vespo_refuses_advantages_per_token_and_the_others_take_them():
    for loss in LOSSES:
        options = ge.GRPOOptions(loss_type=loss, **NEEDED.get(loss, {}))
        changes = {"rewards": None, "cu_groups": None, "options": options}
        if loss == "vespo":
            with pytest.raises(ValueError, match=r"advantages.*vespo"):
                call_loss(**changes, advantages=torch.zeros(3))
        else:
            assert call_loss(**changes, advantages=torch.zeros(3)).loss == 0


def test_integer_masks_of_zeros_and_ones_are_accepted():
    flags = {"mask": torch.tensor([1, 0, 1]), "in_loss": torch.tensor([1, 0])}
    metrics = call_loss(**flags, valid=torch.tensor([1, 1], dtype=torch.int32)).metrics
    assert (metrics["tokens"], metrics["samples"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rewards", {"rewards": torch.tensor([0, 1])}),
        ("rewards", {"rewards": torch.zeros(1, 2)}),
        ("rewards", {"rewards": [0.0, 1.0]}),
        ("valid", {"valid": torch.ones(2)}),
        ("valid", {"valid": torch.ones(3, dtype=torch.bool)}),
    ],
)
def test_group_advantages_refuses_bad_arguments_by_name(name, changes):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call_advantages(**changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("impl", {"impl": "cuda"}),
        ("hidden", {"hidden": torch.ones(3, 4)}),
        ("hidden", {"hidden": torch.ones(2)}),
        ("weight", {"weight": torch.ones(5)}),
        ("weight", {"weight": torch.ones(5, 2, dtype=torch.bfloat16)}),
        ("hidden", {"hidden": torch.ones(3, 2).int(), "weight": torch.ones(5, 2).int()}),
        ("targets", {"targets": torch.tensor([0, 1])}),
        ("targets", {"targets": torch.tensor([[0], [1], [4]])}),
        ("targets", {"targets": torch.tensor([0.0, 1.0, 4.0])}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": torch.ones(2)}),
        ("temperature", {"temperature": torch.ones(3, 1)}),
        ("temperature", {"temperature": torch.ones(3).long()}),
        # taken without a check, these would broadcast, divide by zero, or fail in another's name
        ("bias", {"bias": torch.ones(4)}),
        ("bias", {"bias": torch.ones(1)}),
        ("bias", {"bias": torch.ones(3, 5)}),
        ("softcap", {"softcap": 0.0}),
        ("targets", {"targets": torch.tensor([0, 1, 5])}),
        ("targets", {"targets": torch.tensor([0, -1, 4])}),
        ("temperature", {"temperature": torch.tensor([1.0, 0.0, 1.0])}),
        ("hidden", {"hidden": [[1.0, 1.0]] * 3}),
        ("targets", {"targets": [0, 1, 4]}),
    ],
)
def test_token_logprob_refuses_bad_arguments_by_name(name, changes):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call_logprob(**changes)
