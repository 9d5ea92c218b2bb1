// What a buffer that comes from Python holds.
#pragma once

namespace grpo {

enum class Dtype { float32, bfloat16, float16 };

}  // namespace grpo
