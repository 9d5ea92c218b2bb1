// The only file that knows Python: checks at the border, plain structs inside.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_head.hpp"
#include "cpu_loss.hpp"
#include "pack.hpp"
#include "simd.hpp"

namespace py = pybind11;

namespace {

using IntArray = py::array_t<int32_t, py::array::c_style>;
using PySlice = std::tuple<int32_t, int32_t, int32_t>;

void require_1d(const IntArray& a, const char* name, py::ssize_t size) {
  if (a.ndim() != 1 || a.size() != size) {
    throw std::invalid_argument(std::string(name) + " must be a vector of " + std::to_string(size) +
                                " int32; given " + std::to_string(a.size()) + " values in " +
                                std::to_string(a.ndim()) + " dimensions");
  }
}

std::vector<std::vector<PySlice>> pack_groups(const IntArray& prompt_len,
                                              const IntArray& completion_len,
                                              const IntArray& cu_groups, int64_t token_budget,
                                              bool shared_prompt) {
  const py::ssize_t groups = prompt_len.size();
  require_1d(prompt_len, "prompt_len", groups);
  require_1d(cu_groups, "cu_groups", groups + 1);
  require_1d(completion_len, "completion_len", cu_groups.data()[groups]);
  const grpo::Lengths lengths{prompt_len.data(), completion_len.data(), cu_groups.data(),
                              static_cast<int32_t>(groups)};
  std::vector<grpo::MicroBatch> batches;
  {
    py::gil_scoped_release release;
    batches = grpo::pack_groups(lengths, token_budget, shared_prompt);
  }
  std::vector<std::vector<PySlice>> result(batches.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    for (const auto& s : batches[b]) result[b].emplace_back(s.group, s.first, s.last);
  }
  return result;
}

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename T>
using MaybeArray = std::optional<Array<T>>;

template <typename T>
const T* data_of(const MaybeArray<T>& a, const char* name, py::ssize_t size) {
  if (!a) return nullptr;
  if (a->size() != size) {
    throw std::invalid_argument(std::string(name) + " must hold " + std::to_string(size) +
                                " values; given " + std::to_string(a->size()));
  }
  return a->data();
}

void check_offsets(const Array<int32_t>& offsets, const char* name, py::ssize_t total) {
  const int32_t* at = offsets.data();
  bool rising = offsets.size() > 0 && at[0] == 0 && at[offsets.size() - 1] == total;
  for (py::ssize_t i = 1; rising && i < offsets.size(); ++i) rising = at[i - 1] <= at[i];
  if (!rising) {
    throw std::invalid_argument(std::string(name) + " must start at 0, never fall and end at " +
                                std::to_string(total));
  }
}

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

const uint8_t* flags_of(const MaybeArray<bool>& a, const char* name, py::ssize_t size) {
  return reinterpret_cast<const uint8_t*>(data_of(a, name, size));
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

grpo::Dtype dtype_of(const std::string& name) {
  if (name == "float32") return grpo::Dtype::float32;
  if (name == "bfloat16") return grpo::Dtype::bfloat16;
  if (name == "float16") return grpo::Dtype::float16;
  throw std::invalid_argument("the head has no kernel for " + name);
}

void require_matrix(const py::array& a, const char* name, py::ssize_t rows, py::ssize_t columns,
                    py::ssize_t itemsize) {
  const bool contiguous = (a.flags() & py::array::c_style) != 0;
  if (a.ndim() != 2 || a.shape(0) != rows || a.shape(1) != columns || a.itemsize() != itemsize ||
      !contiguous) {
    throw std::invalid_argument(std::string(name) + " must be contiguous [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "]");
  }
}

// bfloat16 and float16 come as the 16-bit integers that hold them.
grpo::Tile tile_of(py::array& tile, const py::array& hidden, const py::array& weight,
                   const Array<int64_t>& targets, py::ssize_t first_column,
                   const std::string& dtype) {
  const grpo::Dtype kind = dtype_of(dtype);
  const py::ssize_t itemsize = kind == grpo::Dtype::float32 ? 4 : 2;
  const py::ssize_t rows = targets.size();
  if (weight.ndim() != 2) throw std::invalid_argument("weight must be [columns, width]");
  const py::ssize_t columns = weight.shape(0), width = weight.shape(1);
  require_matrix(tile, "tile", rows, columns, itemsize);
  require_matrix(hidden, "hidden", rows, width, itemsize);
  require_matrix(weight, "weight", columns, width, itemsize);
  for (py::ssize_t i = 0; first_column == 0 && i < rows; ++i) {
    if (targets.data()[i] < 0) throw std::invalid_argument("targets must be >= 0");
  }
  return {tile.mutable_data(), hidden.data(), weight.data(), kind, rows, columns, width,
          first_column,        targets.data()};
}

grpo::LogitMap map_of(const MaybeArray<float>& bias, const Array<float>& inv_temperature,
                      std::optional<float> softcap, float logit_scale, const grpo::Tile& tile) {
  if (inv_temperature.size() != tile.rows) {
    throw std::invalid_argument("inv_temperature must hold one value a row");
  }
  return {data_of(bias, "bias", tile.columns), inv_temperature.data(), softcap.value_or(0),
          logit_scale};
}

// logp, entropy, lse, target_weight, each [rows].
std::vector<Array<float>> softmax_rows(py::array& tile, const py::array& hidden,
                                       const py::array& weight, const Array<int64_t>& targets,
                                       const std::string& dtype, const MaybeArray<float>& bias,
                                       const Array<float>& inv_temperature,
                                       std::optional<float> softcap, float logit_scale,
                                       bool gradient) {
  const grpo::Tile t = tile_of(tile, hidden, weight, targets, 0, dtype);
  for (int64_t row = 0; row < t.rows; ++row) {
    if (t.targets[row] >= t.columns) throw std::invalid_argument("targets must be under V");
  }
  const grpo::LogitMap map = map_of(bias, inv_temperature, softcap, logit_scale, t);
  std::vector<Array<float>> out;
  for (int i = 0; i < (gradient ? 4 : 3); ++i) out.emplace_back(t.rows);
  const grpo::RowStats stats{out[0].mutable_data(), out[1].mutable_data(), out[2].mutable_data(),
                             gradient ? out[3].mutable_data() : nullptr};
  py::gil_scoped_release release;
  grpo::softmax_rows(t, map, gradient, stats);
  return out;
}

void gradient_rows(py::array& tile, const py::array& hidden, const py::array& weight,
                   const Array<int64_t>& targets, const std::string& dtype,
                   const MaybeArray<float>& bias, const Array<float>& inv_temperature,
                   std::optional<float> softcap, float logit_scale, py::ssize_t first_column,
                   const Array<float>& lse, const Array<float>& logp,
                   const Array<float>& upstream) {
  const grpo::Tile t = tile_of(tile, hidden, weight, targets, first_column, dtype);
  const grpo::LogitMap map = map_of(bias, inv_temperature, softcap, logit_scale, t);
  for (const auto* a : {&lse, &logp, &upstream}) {
    if (a->size() != t.rows) throw std::invalid_argument("lse, logp, upstream: one value a row");
  }
  py::gil_scoped_release release;
  grpo::gradient_rows(t, map, lse.data(), logp.data(), upstream.data());
}

// Runs the kernels by a lesser instruction set than the best of this CPU, to try it.
void use_isa(const std::string& name) {
  const std::map<std::string, grpo::Isa> known{
      {"plain", grpo::Isa::plain}, {"avx2", grpo::Isa::avx2}, {"avx512", grpo::Isa::avx512}};
  const auto found = known.find(name);
  if (found == known.end() || found->second > grpo::best_isa()) {
    throw std::invalid_argument("this CPU and build have no " + name);
  }
  grpo::current_isa() = found->second;
}

// sum [rows, columns] float32 += x in half precision, both contiguous.
void accumulate(Array<float>& sum, const py::array& x, const std::string& dtype) {
  if (sum.ndim() != 2) throw std::invalid_argument("sum must be [rows, columns]");
  require_matrix(x, "x", sum.shape(0), sum.shape(1), 2);
  float* to = sum.mutable_data();
  py::gil_scoped_release release;
  grpo::accumulate(to, x.data(), dtype_of(dtype), sum.size());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of grpo_engine; called through grpo_engine.ops.";
  m.def("pack_groups", &pack_groups, py::arg("prompt_len"), py::arg("completion_len"),
        py::arg("cu_groups"), py::arg("token_budget"), py::arg("shared_prompt"));
  py::class_<grpo::LossOptions>(m, "LossOptions").def(py::init(&loss_options));
  // Nothing is converted: a copy would be written to, or made again in each call.
  const auto as_is = [](const char* name) { return py::arg(name).noconvert(); };
  m.def("group_advantages", &group_advantages, as_is("rewards"), as_is("cu_groups"), as_is("valid"),
        py::arg("options"));
  m.def("group_loss", &group_loss, as_is("logp"), as_is("old_logp"), as_is("ref_logp"),
        as_is("rewards"), as_is("cu_groups"), as_is("advantages"), as_is("cu_seqlens"),
        py::arg("samples"), as_is("mask"), as_is("valid"), as_is("in_loss"),
        as_is("importance_ratio"), as_is("normalizer"), py::arg("options"), as_is("dlogp"));
  m.def("softmax_rows", &softmax_rows, as_is("tile"), as_is("hidden"), as_is("weight"),
        as_is("targets"), py::arg("dtype"), as_is("bias"), as_is("inv_temperature"),
        py::arg("softcap"), py::arg("logit_scale"), py::arg("gradient"));
  m.def("gradient_rows", &gradient_rows, as_is("tile"), as_is("hidden"), as_is("weight"),
        as_is("targets"), py::arg("dtype"), as_is("bias"), as_is("inv_temperature"),
        py::arg("softcap"), py::arg("logit_scale"), py::arg("first_column"), as_is("lse"),
        as_is("logp"), as_is("upstream"));
  m.def("accumulate", &accumulate, as_is("sum"), as_is("x"), py::arg("dtype"));
  m.def(
      "prefer_huge_pages",
      [](py::array& a) { grpo::prefer_huge_pages(a.mutable_data(), a.nbytes()); }, as_is("array"));
  m.def("use_isa", &use_isa);
  m.def("best_isa", [] {
    const char* names[] = {"plain", "avx2", "avx512"};
    return names[static_cast<int>(grpo::best_isa())];
  });
}
