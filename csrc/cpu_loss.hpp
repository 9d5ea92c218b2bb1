// The GRPO loss over token log-probs on the CPU: the twin of kernels/group_loss.py.
#pragma once

#include <cstdint>

namespace grpo {

enum class Term { clipped, cispo, sapo, vespo };
enum class Baseline { mean, median, loo };
enum class Scale { group, batch, none };
enum class Reduction { sample_mean, samples, constant_length, tokens };

// GRPOOptions in the form in which the loops use them.
struct LossOptions {
  Term term;
  Reduction reduction;
  bool sequence;
  float ratio_low, ratio_high;  // the clip range of the ratio; cispo: its cap is the upper end
  float delta;                  // infinity: none
  float beta;
  float kl_exp, kl_linear, kl_square;  // kl = kl_exp (e^x - 1) - kl_linear x + kl_square x^2 / 2
  bool weighted_kl;
  float sapo_positive, sapo_negative;
  float vespo_k_positive, vespo_k_negative, vespo_lambda_positive, vespo_lambda_negative;
  double max_length;
  Baseline baseline;
  Scale scale;
  int ddof;
  double epsilon_std, min_std, advantage_clip;
};

struct Groups {
  const float* rewards;      // [samples]
  const int32_t* cu_groups;  // [groups + 1]
  const uint8_t* valid;      // [samples] or null
  int64_t groups, samples;
};

struct LossInputs {
  const float *logp, *old_logp, *ref_logp, *importance;  // [tokens]; all but logp may be null
  const uint8_t* mask;                                   // [tokens] or null
  const int32_t* cu_seqlens;                             // [samples + 1] or null: padded rows
  int64_t row_length;                                    // of the padded rows
  const float* advantages;                               // [samples], or [tokens] if per_token
  bool per_token;
  const uint8_t* in_loss;  // [samples] or null
  int64_t samples;
  const float* normalizer;  // null: the default of the reduction
};

// Over the in-loss tokens; sums but for the loss and the extremes of the ratio.
struct LossResult {
  double loss = 0, kl = 0, ratio = 0, clip_low = 0, clip_high = 0, advantage_abs = 0;
  double nonfinite = 0;
  float ratio_min = __builtin_huge_valf(), ratio_max = -__builtin_huge_valf();
  int64_t tokens = 0, samples = 0;
};

// advantages [samples], signal [groups].
void group_advantages(const Groups& groups, const LossOptions& options, float* advantages,
                      uint8_t* signal);

// Writes d loss / d logp [tokens], every entry; the same bits for any number of threads.
LossResult group_loss(const LossInputs& in, const LossOptions& options, float* dlogp);

}  // namespace grpo
