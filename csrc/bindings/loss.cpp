#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "../cpu_loss.hpp"
#include "arrays.hpp"

namespace grpo::bindings {
namespace {

template <typename T>
T choice(const py::object& options, const char* name, const std::map<std::string, T>& choices) {
  return choices.at(options.attr(name).cast<std::string>());
}

float or_infinity(const py::object& value) {
  return value.is_none() ? __builtin_huge_valf() : value.cast<float>();
}

// From kernels/options.py::GRPOOptions, which has checked every value.
grpo::LossOptions loss_options(const py::object& options) {
  using grpo::Reduction, grpo::Term;
  const auto number = [&](const char* name) { return options.attr(name).cast<double>(); };
  const auto real = [&](const char* name) { return options.attr(name).cast<float>(); };
  const std::string type = options.attr("loss_type").cast<std::string>();
  const std::string kl = options.attr("kl_estimator").cast<std::string>();
  grpo::LossOptions o{};
  o.term = type == "cispo"   ? Term::cispo
           : type == "sapo"  ? Term::sapo
           : type == "vespo" ? Term::vespo
                             : Term::clipped;
  o.reduction = type == "grpo" || type == "sapo" ? Reduction::sample_mean
                : type == "luspo"                ? Reduction::samples
                : type == "dr_grpo"              ? Reduction::constant_length
                                                 : Reduction::tokens;
  o.sequence = options.attr("importance_sampling_level").cast<std::string>() == "sequence";
  o.ratio_low = static_cast<float>(1 - number("epsilon"));
  o.ratio_high =
      o.term == Term::cispo ? real("epsilon_high") : static_cast<float>(1 + number("clip_high"));
  o.delta = or_infinity(options.attr("delta"));
  o.beta = real("beta");
  o.kl_exp = kl == "k3";
  o.kl_linear = kl != "k2";
  o.kl_square = kl == "k2";
  o.weighted_kl = options.attr("use_bias_correction_kl").cast<bool>();
  o.sapo_positive = real("sapo_temperature_pos");
  o.sapo_negative = real("sapo_temperature_neg");
  o.vespo_k_positive = real("vespo_k_pos");
  o.vespo_k_negative = real("vespo_k_neg");
  o.vespo_lambda_positive = real("vespo_lambda_pos");
  o.vespo_lambda_negative = real("vespo_lambda_neg");
  const py::object length = options.attr("max_completion_length");
  o.max_length = length.is_none() ? 1.0 : length.cast<double>();
  o.baseline = choice<grpo::Baseline>(options, "baseline",
                                      {{"mean", grpo::Baseline::mean},
                                       {"median", grpo::Baseline::median},
                                       {"loo", grpo::Baseline::loo}});
  o.scale = choice<grpo::Scale>(
      options, "scale_rewards",
      {{"group", grpo::Scale::group}, {"batch", grpo::Scale::batch}, {"none", grpo::Scale::none}});
  o.ddof = options.attr("ddof").cast<int>();
  o.epsilon_std = number("epsilon_std");
  o.min_std = number("min_std");
  const py::object clip = options.attr("advantage_clip");
  o.advantage_clip = clip.is_none() ? __builtin_huge_val() : clip.cast<double>();
  return o;
}

std::tuple<Array<float>, Array<bool>> group_advantages(const Array<float>& rewards,
                                                       const Array<int32_t>& cu_groups,
                                                       const MaybeArray<bool>& valid,
                                                       const grpo::LossOptions& options) {
  const py::ssize_t samples = rewards.size();
  check_offsets(cu_groups, "cu_groups", samples);
  const auto* flags = reinterpret_cast<const uint8_t*>(data_of(valid, "valid", samples));
  Array<float> advantages(samples);
  Array<bool> signal(cu_groups.size() - 1);
  grpo::group_advantages({rewards.data(), cu_groups.data(), flags, cu_groups.size() - 1, samples},
                         options, advantages.mutable_data(),
                         reinterpret_cast<uint8_t*>(signal.mutable_data()));
  return {std::move(advantages), std::move(signal)};
}

// Loss and metrics, the means taken, in the order of cpu.py's names.
std::vector<double> metrics_of(const grpo::LossResult& r) {
  const double n = r.tokens ? static_cast<double>(r.tokens) : 1.0;
  const bool none = r.tokens == 0;
  // Minimum and maximum skip a NaN, which the sum has kept.
  const auto extreme = [&](float x) { return none ? 1.0 : std::isnan(r.ratio) ? r.ratio : x; };
  return {r.loss,
          r.kl / n,
          none ? 1.0 : r.ratio / n,
          extreme(r.ratio_min),
          extreme(r.ratio_max),
          r.clip_low / n,
          r.clip_high / n,
          (r.clip_low + r.clip_high) / n,
          r.advantage_abs / n,
          static_cast<double>(r.tokens),
          static_cast<double>(r.samples),
          r.nonfinite};
}

// Writes dlogp; returns metrics_of, with the share of groups without signal if rewards are given.
std::vector<double> group_loss(
    const Array<float>& logp, const MaybeArray<float>& old_logp, const MaybeArray<float>& ref_logp,
    const MaybeArray<float>& rewards, const MaybeArray<int32_t>& cu_groups,
    const MaybeArray<float>& advantages, const MaybeArray<int32_t>& cu_seqlens, py::ssize_t samples,
    const MaybeArray<bool>& mask, const MaybeArray<bool>& valid, const MaybeArray<bool>& in_loss,
    const MaybeArray<float>& importance_ratio, const MaybeArray<float>& normalizer,
    const grpo::LossOptions& options, Array<float>& dlogp) {
  const py::ssize_t tokens = logp.size();
  if (!rewards == !advantages || !rewards != !cu_groups) {
    throw std::invalid_argument("either rewards with cu_groups, or advantages");
  }
  if (dlogp.size() != tokens) throw std::invalid_argument("dlogp must be as logp");
  if (samples < 0 || (!cu_seqlens && (samples ? tokens % samples : tokens))) {
    throw std::invalid_argument("samples must be >= 0, and rows of logp without cu_seqlens");
  }
  if (cu_seqlens) check_offsets(*cu_seqlens, "cu_seqlens", tokens);
  if (cu_groups) check_offsets(*cu_groups, "cu_groups", samples);
  grpo::LossInputs in{};
  in.logp = logp.data();
  in.old_logp = data_of(old_logp, "old_logp", tokens);
  in.ref_logp = data_of(ref_logp, "ref_logp", tokens);
  in.importance = data_of(importance_ratio, "importance_ratio", tokens);
  in.mask = flags_of(mask, "mask", tokens);
  in.cu_seqlens = data_of(cu_seqlens, "cu_seqlens", samples + 1);
  in.row_length = samples ? tokens / samples : 0;
  in.per_token = advantages && (advantages->size() != samples || advantages->ndim() > 1);
  in.advantages = data_of(advantages, "advantages", in.per_token ? tokens : samples);
  in.samples = samples;
  in.normalizer = data_of(normalizer, "normalizer", 1);
  const uint8_t* is_valid = flags_of(valid, "valid", samples);
  const uint8_t* is_in_loss = flags_of(in_loss, "in_loss", samples);
  grpo::Groups groups{data_of(rewards, "rewards", samples), cu_groups ? cu_groups->data() : nullptr,
                      is_valid, cu_groups ? cu_groups->size() - 1 : 0, samples};
  float* out = dlogp.mutable_data();

  py::gil_scoped_release release;
  std::vector<float> own(groups.rewards ? samples : 0);
  std::vector<uint8_t> signal(groups.groups), used(samples, 1);
  if (groups.rewards) {
    grpo::group_advantages(groups, options, own.data(), signal.data());
    in.advantages = own.data();
  }
  // A sample outside the statistics has no advantage, so it has no place in the loss either.
  for (py::ssize_t s = 0; s < samples; ++s) {
    used[s] = (!is_in_loss || is_in_loss[s]) && (!is_valid || is_valid[s]) &&
              (!groups.rewards || std::isfinite(groups.rewards[s]));
  }
  in.in_loss = used.data();
  std::vector<double> result = metrics_of(grpo::group_loss(in, options, out));
  if (groups.rewards) {
    const auto quiet = std::count(signal.begin(), signal.end(), 0);
    result.push_back(static_cast<double>(quiet) / std::max<size_t>(signal.size(), 1));
  }
  return result;
}

}  // namespace

void bind_loss(py::module_& m) {
  py::class_<grpo::LossOptions>(m, "LossOptions").def(py::init(&loss_options));
  m.def("group_advantages", &group_advantages, as_is("rewards"), as_is("cu_groups"), as_is("valid"),
        py::arg("options"));
  m.def("group_loss", &group_loss, as_is("logp"), as_is("old_logp"), as_is("ref_logp"),
        as_is("rewards"), as_is("cu_groups"), as_is("advantages"), as_is("cu_seqlens"),
        py::arg("samples"), as_is("mask"), as_is("valid"), as_is("in_loss"),
        as_is("importance_ratio"), as_is("normalizer"), py::arg("options"), as_is("dlogp"));
}

}  // namespace grpo::bindings
