// Operators that the fallback cannot compute: memory, copies, streams, and some for which the CPU
// has no kernel that would do.
#pragma once
#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include "relabel.h"

namespace virtual_accelerator {

inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                                std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  int d = device ? index_of(*device) : thread().device;
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
  size_t bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, Allocator::allocate_on(d, bytes), allocator(), true));
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}
inline at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                        std::optional<c10::Device> device, std::optional<bool> pinned,
                        std::optional<c10::MemoryFormat> format) {
  std::vector<int64_t> stride(size.size());
  auto like = format.value_or(c10::MemoryFormat::Contiguous);
  if (like == c10::MemoryFormat::ChannelsLast) {
    stride = c10::get_channels_last_strides_2d(size);
  } else if (like == c10::MemoryFormat::ChannelsLast3d) {
    stride = c10::get_channels_last_strides_3d(size);
  } else {
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) stride[i] = step;
  }
  return empty_strided(size, stride, dtype, layout, device, pinned);
}
// The CPU's kernel makes a tensor without memory, marked by a dispatch key.
inline at::Tensor efficient_zeros(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                                  std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                                  std::optional<bool> pinned) {
  return empty(size, dtype, layout, device, pinned, {}).zero_();
}

// As on CUDA, the copy runs on the current stream of the source's device. The current stream of the
// target's device waits for it, and it waits for that stream.
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  jitter();
  auto stack = python_stack();
  int from = is_virtual(source) ? source.device().index() : kHost;
  int to = is_virtual(target) ? target.device().index() : kHost;
  bool crosses = from != kHost && to != kHost && from != to;
  std::string op = "copy_";
  {
    VIRTUAL_LOCK;
    int s = current_stream(from == kHost ? to : from);
    int other = crosses ? current_stream(to) : s;
    if (crosses) wait_for(s, stream_state(other).clock, stream_state(other).time);
    begin(s);
    if (is_virtual(source)) touch(source, s, false, op, stack);
    if (is_virtual(target)) touch(target, s, true, op, stack);
    auto bytes = source.numel() * int64_t(source.element_size());
    auto& traffic = state().traffic[{from, to}];
    traffic.copies++;
    traffic.bytes += bytes;
    auto& host = from == kHost ? source : target;
    bool has_host = from == kHost || to == kHost;
    auto* pinned = has_host && host.has_storage() ? PinnedAllocator::find(host.storage().data()) : nullptr;
    auto link = state().links.find({from, to});
    double launch = state().speed.described ? state().speed.launch : 0;
    if (link != state().links.end()) {
      std::ostringstream name;
      name << "copy to ";
      to == kHost ? name << "cpu" : name << "virtual:" << to;
      // The host itself copies what is not pinned, through a buffer.
      double most = link->second.bandwidth;
      if (has_host && !pinned && state().speed.pageable) most = std::min(most, state().speed.pageable);
      spend_on(link->second, s, launch + double(bytes) / most, name.str());
    } else if (state().speed.described) {
      if (bytes) spend(s, time_of({"other", 0, bytes_moved(source) + bytes_moved(target)}, op, from), op);
    } else {
      spend_by_table(s, op);
    }
    if (crosses) wait_for(other, stream_state(s).clock, stream_state(s).time);
    if (pinned) {
      auto [low, high] = extent(host);
      touch(pinned, s, low, high, to == kHost, op, stack);
    }
    if (has_host && !(non_blocking && pinned)) host_wait(s);
  }
  if (state().hollow) {
    // Bytes in pinned memory, which the host does not wait for, are what cells keep there, and no
    // value that anybody reads. Nobody writes to that memory, so it takes none.
    bool is_kept = non_blocking && target.scalar_type() == at::kByte && target.is_pinned();
    if (to == kHost && !is_kept) const_cast<at::Tensor&>(target).fill_(value_of_hollow("copy_ to the host"));
    return target;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto twin = twin_of(target);
  source._is_zerotensor() ? twin.zero_() : twin.copy_(twin_of(source));
  return target;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) const_cast<at::Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}
inline at::Scalar local_scalar_dense(const at::Tensor& t) {
  jitter();
  auto stack = python_stack();
  {
    VIRTUAL_LOCK;
    int s = current_stream(t.device().index());
    begin(s);
    touch(t, s, false, "item", stack);
    host_wait(s);
  }
  if (state().hollow) return at::Scalar(value_of_hollow("item"));
  return twin_of(t).item();
}
inline void record_stream(at::Tensor& t, c10::Stream s) {
  Allocator::record(t.storage().unsafeGetStorageImpl(), index_of(s));
}

inline at::Tensor& set_storage(at::Tensor& t, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* it = t.unsafeGetTensorImpl();
  it->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    it->set_sizes_and_strides(size, stride);
  } else {
    it->set_sizes_contiguous(size);
  }
  it->set_storage_offset(offset);
  return t;
}
inline at::Tensor& set_whole_storage(at::Tensor& t, c10::Storage storage) {
  int64_t elements = storage.nbytes() / t.element_size();
  return set_storage(t, std::move(storage), 0, {elements}, {});
}
inline at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) {
  return set_storage(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

// The CPU's kernel takes no generator.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(1)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}
// Attention is computed by plain operators (0). A described device has a kernel for it, as GPUs have,
// which never has the scores of all queries and keys in memory (1): that of the CPU, without dropout,
// for the layouts that this kernel takes. Which one of a GPU's kernels may be used, the caller says.
inline int64_t fused_sdp_choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                                double dropout, bool causal, std::optional<double>, bool grouped) {
  auto& settings = at::globalContext();
  bool is_wanted = state().speed.described && (settings.userEnabledFlashSDP() || settings.userEnabledMemEfficientSDP());
  bool is_half = q.scalar_type() == c10::kHalf || q.scalar_type() == c10::kBFloat16;
  if (!is_wanted || dropout != 0 || !(is_half || q.scalar_type() == c10::kFloat) || (mask && mask->defined() && causal)) return 0;
  sdp::sdp_params all{q, k, v, mask, dropout, causal, grouped};
  return sdp::check_tensor_shapes(all, false) && sdp::check_batch_size_and_num_heads_dense<true, false>(all, false) &&
         sdp::check_attn_mask_shape(all, false) && sdp::check_nonzero_sequence_lengths_dense(all, false) &&
         sdp::check_last_dim_stride_equals_1_dense<true>(all, false) && q.size(3) == k.size(3) && k.size(3) == v.size(3);
}

// What FlashAttention's operator computes, on the CPU: the last query sees all keys. Other kernels
// have as many heads of keys as of queries, and the first query see one key.
inline std::array<at::Tensor, 3> for_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal) {
  auto mask = causal ? at::ones({q.size(2), k.size(2)}, at::kBool).tril(k.size(2) - q.size(2)) : at::Tensor();
  auto groups = q.size(1) / k.size(1);
  return {k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), causal ? at::where(mask, 0.0, -INFINITY).to(q.scalar_type()) : mask};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  auto [keys, values, mask] = for_cpu(q, k, v, causal);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, keys, values, dropout, false, mask, scale);
  return {out, lse, {}, {}, q.size(2), k.size(2), {}, {}, {}};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  auto [keys, values, mask] = for_cpu(q, k, v, causal);
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, keys, values, out, lse, dropout, false, mask, scale);
  auto sum = [&](const at::Tensor& x) { return x.unflatten(1, {k.size(1), -1}).sum(2); };
  return {of_q, sum(of_k), sum(of_v)};
}

inline void register_kernels(torch::Library& all, torch::Library& aten, torch::Library& conjugate, torch::Library& negative) {
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_efficientzerotensor", &efficient_zeros);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_local_scalar_dense", &local_scalar_dense);
  aten.impl("record_stream", &record_stream);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Storage", &set_whole_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("native_dropout", &native_dropout);
  aten.impl("_fused_sdp_choice", &fused_sdp_choice);
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&fused_sdp_choice);
  // PyTorch has other kernels for these, and would not call the fallback. That of group_norm takes
  // contiguous tensors alone, and that of layer_norm is made of other operators.
  for (auto* name : {"convolution", "convolution_backward", "mse_loss", "smooth_l1_loss", "conj_physical_",
                     "native_group_norm", "native_layer_norm"})
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  conjugate.impl("_copy_from", torch::CppFunction::makeFallthrough());
  negative.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace virtual_accelerator
