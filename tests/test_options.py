"""Options of the loss that mean nothing are refused by name; presets."""

import dataclasses
import math

import pytest
import torch

import grpo_engine as ge
from loss_names import CLIPPED, LOSSES, NEEDED
from tensors import offsets

ALWAYS_NUMBERS = ["epsilon", "beta", "epsilon_std", "min_std"]
ALWAYS_NUMBERS += ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"]


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
