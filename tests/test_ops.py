"""Arguments and options that mean nothing are refused by name; what importing the package costs."""

import dataclasses
import math
import subprocess
import sys
import textwrap

import pytest
import torch

import grpo_engine as ge

CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
LOSSES = [*CLIPPED, "cispo", "sapo", "vespo"]
ALWAYS_NUMBERS = ["epsilon", "beta", "epsilon_std", "min_std"]
ALWAYS_NUMBERS += ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"]
NEEDED = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 16}}


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "name",
    "loss_type importance_sampling_level kl_estimator baseline scale_rewards ddof".split(),
)
@pytest.mark.parametrize("value", ["no such", None, 2, "GRPO", ""])
def test_unknown_choices_are_refused_by_name_with_the_allowed_ones(name, value):
    with pytest.raises(ValueError, match=name) as error:
        ge.GRPOOptions(**{name: value})
    assert repr(value) in str(error.value)
    assert str(getattr(ge.GRPOOptions(), name)) in str(error.value)


@pytest.mark.parametrize("name", ["epsilon_high", *ALWAYS_NUMBERS])
def test_negative_or_infinite_values_are_refused_and_zero_is_not(name):
    for value in (-0.1, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=name):
            ge.GRPOOptions(**{name: value})
    assert getattr(ge.GRPOOptions(**{name: 0.0}), name) == 0


@pytest.mark.parametrize(
    "name",
    "delta advantage_clip sapo_temperature_pos sapo_temperature_neg max_completion_length".split(),
)
def test_values_that_are_not_positive_are_refused(name):
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=name):
            ge.GRPOOptions(**{name: value})
    assert getattr(ge.GRPOOptions(**{name: 3}), name) == 3


@pytest.mark.parametrize("name", ["sapo_temperature_pos", "sapo_temperature_neg", *ALWAYS_NUMBERS])
def test_options_that_cannot_be_off_refuse_none(name):
    with pytest.raises(ValueError, match=name):
        ge.GRPOOptions(**{name: None})


def test_a_number_given_as_text_is_refused_by_name():
    with pytest.raises(ValueError, match="epsilon"):
        ge.GRPOOptions(epsilon="0.2")


@pytest.mark.parametrize("loss", LOSSES)
def test_delta_goes_only_with_the_clipped_losses(loss):
    options = {"loss_type": loss, "delta": 4.0, **NEEDED.get(loss, {})}
    if loss in CLIPPED:
        assert ge.GRPOOptions(**options).delta == 4
    else:
        with pytest.raises(ValueError, match=f"delta.*{loss}"):
            ge.GRPOOptions(**options)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_sequence_level_goes_only_with_the_clipped_losses(loss):
    options = {"importance_sampling_level": "sequence", **NEEDED.get(loss, {})}
    if loss in CLIPPED:
        made = ge.GRPOOptions(loss_type=loss, **options)
        assert made.importance_sampling_level == "sequence"
    else:
        with pytest.raises(ValueError, match=f"importance_sampling_level.*{loss}"):
            ge.GRPOOptions(loss_type=loss, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_only_cispo_needs_epsilon_high_and_only_dr_grpo_the_length(loss):
    if loss in NEEDED:
        with pytest.raises(ValueError, match=next(iter(NEEDED[loss]))):
            ge.GRPOOptions(loss_type=loss)
    # what another loss type needs is accepted, and ignored or used
    made = ge.GRPOOptions(loss_type=loss, epsilon_high=5.0, max_completion_length=16)
    assert (made.loss_type, made.epsilon_high) == (loss, 5.0)


def test_the_length_of_dr_grpo_changes_no_other_loss():
    kw = {"advantages": torch.tensor([1.0]), "cu_seqlens": offsets(0, 2)}
    for length in (None, 7):
        options = ge.GRPOOptions(loss_type="dapo", beta=0.0, max_completion_length=length)
        assert ge.grpo_loss(torch.tensor([-1.0, -2.0]), options=options, **kw).loss == -1


def test_presets_are_the_documented_fields_over_the_defaults():
    default = dataclasses.asdict(ge.GRPOOptions())
    assert default["loss_type"] == "grpo" and default["beta"] == 0.04
    assert (default["ddof"], default["advantage_clip"]) == (0, 5.0)
    assert (default["epsilon_std"], default["min_std"]) == (1e-4, 0.0)
    assert ge.GRPOOptions.preset("default") == ge.GRPOOptions()
    trl = {"loss_type": "dapo", "beta": 0.0, "use_bias_correction_kl": True}
    trl |= {"ddof": 1, "advantage_clip": None}
    assert dataclasses.asdict(ge.GRPOOptions.preset("trl")) == default | trl
    dr_grpo = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 64}
    made = ge.GRPOOptions.preset("dr_grpo", max_completion_length=64)
    assert dataclasses.asdict(made) == default | dr_grpo


def test_presets_take_changes_and_check_them():
    assert ge.GRPOOptions.preset("trl", beta=0.1, ddof=0) == ge.GRPOOptions(
        loss_type="dapo", beta=0.1, use_bias_correction_kl=True, advantage_clip=None
    )
    with pytest.raises(ValueError, match=r"preset.*default, trl, dr_grpo.*'grpo'"):
        ge.GRPOOptions.preset("grpo")
    with pytest.raises(ValueError, match="max_completion_length"):
        ge.GRPOOptions.preset("dr_grpo")
    with pytest.raises(ValueError, match="epsilon"):
        ge.GRPOOptions.preset("trl", epsilon=-1)


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ge.GRPOOptions().beta = 1.0


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
    tokens = {"logp": torch.tensor([-1.0, -2.0]), "old_logp": None, "ref_logp": None}
    with pytest.raises(ValueError, match="cu_seqlens"):
        call_loss(**tokens, cu_seqlens=bad)
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


def test_importing_the_package_imports_torch_and_nothing_optional():
    script = """
        import sys, torch
        before = set(sys.modules)
        import grpo_engine as ge
        ge.GRPOOptions(), ge.grpo_loss, ge.pack_groups, ge.SamplingParams()
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    optional = "transformers peft triton pyarrow bitsandbytes datasets rich jsonargparse tokenizers"
    assert "grpo_engine" in done.stdout.split()
    assert not set(optional.split()) & set(done.stdout.split())


def test_every_public_name_can_be_imported_and_an_unknown_one_cannot():
    for name in ge.__all__:
        assert getattr(ge, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ge.no_such_name
