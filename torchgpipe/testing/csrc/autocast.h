// Autocast: virtual devices cast the same operators as PyTorch's own accelerators.
#pragma once
#include <ATen/autocast_mode.h>

namespace virtual_accelerator {

inline at::Tensor refused_binary_cross_entropy(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe under autocast; use binary_cross_entropy_with_logits");
}

inline void register_autocast(torch::Library& all, torch::Library& m) {
  using namespace at;
  using namespace at::autocast;
  all.fallback(torch::CppFunction::makeFallthrough());
#define VIRTUAL_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define VIRTUAL_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define VIRTUAL_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define VIRTUAL_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(VIRTUAL_LOW)
  AT_FORALL_FP32(VIRTUAL_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(VIRTUAL_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(VIRTUAL_PROMOTE)
  m.impl("binary_cross_entropy", &refused_binary_cross_entropy);
}

}  // namespace virtual_accelerator
