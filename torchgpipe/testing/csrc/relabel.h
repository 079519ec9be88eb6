// The fallback: the CPU's kernels compute operators, on the same memory under another label. In a dry
// run the meta kernels compute their shapes.
//
// For the length of a call each tensor of a virtual device gets a twin that says it is on the CPU.
// The storage of a result tells where the result belongs. If it is a twin's storage, the result is a
// view of an argument, or an output that was given. Any other storage becomes the device's memory.
#pragma once
#include <time.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include "device.h"
#include "memo.h"
#include "wider.h"

namespace virtual_accelerator {

inline bool is_virtual(const at::Tensor& t) { return t.defined() && t.device().type() == kDeviceType; }

// Milliseconds that the processor has worked for this thread: neighbours on the machine do not count.
inline double processor_time() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * now.tv_sec + 1e-6 * now.tv_nsec;
}

// The range of bytes from a tensor's first to its last element.
inline std::pair<int64_t, int64_t> extent(const at::Tensor& t) {
  if (t.numel() == 0) return {0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  int64_t size = t.element_size(), low = t.storage_offset() * size;
  return {low, low + (last + 1) * size};
}
inline void touch(const at::Tensor& t, int s, bool write, const std::string& op, int64_t stack) {
  auto [low, high] = extent(t);
  touch(block_of(t.storage().unsafeGetStorageImpl()), s, low, high, write, op, stack);
}

inline c10::DataPtr borrowed(void* data) {
  return {state().hollow ? nullptr : data, nullptr, [](void*) {}, c10::Device(inner_device())};
}
inline c10::Storage twin_of(const c10::StorageImpl* it) {
  void* data = const_cast<c10::StorageImpl*>(it)->_mutable_data_ptr_no_checks().get();
  TORCH_CHECK(state().hollow || !is_hollow(data), "a tensor of a dry run has no values; make another one");
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), it->nbytes(), borrowed(data),
                                               c10::GetAllocator(inner_device()), true);
}
inline void set_layout(const at::Tensor& t, const at::Tensor& like) {
  auto* it = t.unsafeGetTensorImpl();
  it->set_sizes_and_strides(like.sizes(), like.strides());
  it->set_storage_offset(like.storage_offset());
  if (it->is_conj() != like.is_conj()) it->_set_conj(like.is_conj());
  if (it->is_neg() != like.is_neg()) it->_set_neg(like.is_neg());
}
inline at::Tensor twin_of(const at::Tensor& t, const c10::Storage& storage) {
  auto twin = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(inner_key()), t.dtype());
  set_layout(twin, t);
  return twin;
}
inline at::Tensor twin_of(const at::Tensor& t) {
  return is_virtual(t) ? twin_of(t, twin_of(t.storage().unsafeGetStorageImpl())) : t;
}

// How an operator uses an argument.
enum class Use { kView, kRead, kWrite };  // kView: it asks only for size and place.

// Operators that take some arguments on the CPU, as they do on other accelerators.
inline bool takes_cpu_tensors(const std::string& op) {
  static const std::set<std::string> ops{"index", "index_put", "index_put_", "_index_put_impl_",
                                         "_pack_padded_sequence", "_pack_padded_sequence_backward"};
  return ops.count(op);
}
// Operators for whose output, or its size, the host waits.
inline bool host_waits_for(const std::string& op) {
  static const std::set<std::string> ops{"nonzero", "masked_select", "_unique2", "unique_dim",
                                         "unique_consecutive", "equal", "bincount", "repeat_interleave"};
  return ops.count(op);
}
// Operators that read sizes alone, and no values.
inline bool reads_nothing(const std::string& op) {
  static const std::set<std::string> ops{"is_same_size", "is_set_to", "result_type"};
  return ops.count(op);
}

class Call {
 public:
  std::string op;
  int device = -1;
  bool is_changed = false;  // Whether an argument got another size or other memory.

  explicit Call(const std::string& name, int64_t stack) : op(name), stack_(stack) {}

  // Take a tensor for an argument, and return its place among those that differ.
  int use(const at::Tensor& t, Use use, bool is_out) {
    if (!is_virtual(t)) {
      has_cpu_tensor_ |= t.defined() && t.dim() > 0;
      return -1;
    }
    int d = t.device().index();
    TORCH_CHECK(device < 0 || device == d, op, ": all tensors must be on one device (found: virtual:", device,
                ", virtual:", d, "); move one with .to()");
    device = d;
    for (auto& a : arguments_)
      if (a.own.is_same(t)) {
        a.use = std::max(a.use, use);
        a.is_out &= is_out;
        return int(&a - arguments_.data());
      }
    arguments_.push_back({t, {}, use, is_out});
    return int(arguments_.size()) - 1;
  }
  at::Tensor lower(const at::Tensor& t) {
    if (!is_virtual(t)) return t;
    auto& it = *std::find_if(arguments_.begin(), arguments_.end(), [&](auto& a) { return a.own.is_same(t); });
    if (!it.twin.defined()) {
      auto* storage = t.storage().unsafeGetStorageImpl();
      auto found = twins_.find(storage);
      if (found == twins_.end()) {
        found = twins_.emplace(storage, twin_of(storage)).first;
        origins_.emplace(found->second.unsafeGetStorageImpl(), Origin{t.storage(), t.key_set()});
      }
      it.twin = twin_of(t, found->second);
    }
    return it.twin;
  }

  void begin() {
    TORCH_CHECK(!has_cpu_tensor_ || arguments_.empty() || takes_cpu_tensors(op), op,
                ": all tensors must be on one device (found: virtual:", device, ", cpu); move one with .to()");
    VIRTUAL_LOCK;
    stream_ = current_stream(device);
    virtual_accelerator::begin(stream_);
    for (auto& a : arguments_)
      if (a.use != Use::kView) touch(a.own, stream_, a.use == Use::kWrite, op, stack_);
    spend_by_table(stream_, op);
  }

  // Take the time that the CPU has taken, if that is what operators cost.
  void spend_measured(double cost) {
    VIRTUAL_LOCK;
    if (state().measured) spend(stream_, cost, op);
  }
  // Take the time that a described device takes. A kernel reads what it adds to, and not an output.
  void count(const at::Tensor& result) {
    bool is_fresh = result.defined() && !origins_.count(result.storage().unsafeGetStorageImpl());
    if (is_fresh) bytes_ += bytes_moved(result);
  }
  double bytes() const {
    double sum = bytes_;
    for (auto& a : arguments_)
      if (a.use != Use::kView) sum += bytes_moved(a.own) * (a.use == Use::kWrite && !a.is_out ? 2 : 1);
    return sum;
  }
  void spend_described(const Work& work) {
    if (work.bytes == 0 || moves_nothing(op)) return;
    VIRTUAL_LOCK;
    spend(stream_, time_of(work, op, device), op);
  }

  // An argument that the operator wrote to may have another size and other memory than before.
  void finish() {
    for (auto& a : arguments_) {
      if (a.use != Use::kWrite) continue;
      auto* twin = a.twin.storage().unsafeGetStorageImpl();
      auto* own = a.own.storage().unsafeGetStorageImpl();
      if (twin->nbytes() != own->nbytes() || (!state().hollow && twin->data() != own->data())) {
        is_changed = true;
        own->set_data_ptr_noswap(adopt(twin));
        own->set_nbytes(twin->nbytes());
        twin->set_data_ptr_noswap(borrowed(own->_mutable_data_ptr_no_checks().get()));
      }
      if (a.twin.sizes() != a.own.sizes() || a.twin.strides() != a.own.strides() ||
          a.twin.storage_offset() != a.own.storage_offset() || a.twin.is_conj() != a.own.is_conj()) {
        set_layout(a.own, a.twin);
        is_changed = true;
        VIRTUAL_LOCK;
        touch(a.own, stream_, true, op, stack_);
      }
    }
    if (host_waits_for(op)) {
      VIRTUAL_LOCK;
      host_wait(stream_);
    }
  }

  at::Tensor raise(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != inner_device()) return t;
    TORCH_CHECK(t.layout() == c10::kStrided, op, ": there are no sparse tensors on virtual accelerators (device: virtual:",
                device, ", layout: ", t.layout(), "); make a dense one");
    if (!t.has_storage()) return t;
    for (auto& a : arguments_)
      if (a.twin.is_same(t)) return a.own;
    auto* storage = t.storage().unsafeGetStorageImpl();
    auto origin = origins_.find(storage);
    if (origin != origins_.end()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(origin->second.storage), origin->second.keys, t.dtype());
      set_layout(view, t);
      return view;
    }
    if (storage->device().type() == inner_device()) {
      storage->set_data_ptr_noswap(adopt(storage));
      storage->set_allocator(allocator());
    }
    auto own = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
    set_layout(own, t);
    VIRTUAL_LOCK;
    touch(own, stream_, true, op, stack_);
    return own;
  }

  // What a meta kernel has said of results, if it can be said again.
  std::optional<Result> said(const c10::IValue& value) {
    Result it;
    if (!value.isTensor()) return std::nullopt;
    auto t = value.toTensor();
    if (!t.defined()) return it;
    for (size_t i = 0; i < arguments_.size(); i++)
      if (arguments_[i].twin.is_same(t)) it.argument = int(i);
    if (it.argument >= 0) return it;
    auto* storage = t.storage().unsafeGetStorageImpl();
    bool is_plain = t.device().type() == c10::kMeta && storage->device().type() == c10::kMeta && t.storage().use_count() == 1 &&
                    !origins_.count(storage) && t.storage_offset() == 0 && !t.is_conj() && !t.is_neg();
    if (!is_plain) return std::nullopt;
    return Result{-1, t.sizes().vec(), t.strides().vec(), t.scalar_type(), int64_t(storage->nbytes())};
  }
  at::Tensor repeat(const Result& it) {
    if (it.argument >= 0) return arguments_[it.argument].own;
    if (it.type == c10::ScalarType::Undefined) return {};
    auto memory = it.bytes ? new_block(device, it.bytes, {}, nullptr, op, stack_) : Allocator::allocate_on(device, 0);
    auto t = at::detail::make_tensor<c10::TensorImpl>(
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), it.bytes, std::move(memory), allocator(), true),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(it.type));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(it.sizes, it.strides);
    VIRTUAL_LOCK;
    touch(t, stream_, true, op, stack_);
    return t;
  }

 private:
  struct Argument {
    at::Tensor own, twin;
    Use use;
    bool is_out;
  };
  struct Origin {
    c10::Storage storage;
    c10::DispatchKeySet keys;
  };
  // Make memory that a kernel of the CPU has allocated memory of the device.
  c10::DataPtr adopt(c10::StorageImpl* storage) {
    auto bytes = storage->nbytes();
    if (bytes == 0) return Allocator::allocate_on(device, 0);
    if (state().hollow) return new_block(device, bytes, {}, nullptr, op, stack_);
    auto data = storage->set_data_ptr(borrowed(nullptr));
    return new_block(device, bytes, std::move(data), nullptr, op, stack_);
  }

  int64_t stack_;
  int stream_ = -1;
  bool has_cpu_tensor_ = false;
  double bytes_ = 0;  // Of results.
  std::vector<Argument> arguments_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> twins_;
  std::unordered_map<c10::StorageImpl*, Origin> origins_;
};

inline bool mentions(const c10::Argument& a, const char* type) {
  return a.type()->str().find(type) != std::string::npos;
}
inline Use use_of(const c10::Argument& a, const std::string& op) {
  if (reads_nothing(op)) return Use::kView;
  auto* alias = a.alias_info();
  if (!alias) return Use::kRead;
  if (alias->isWrite()) return Use::kWrite;
  for (auto& inner : alias->containedTypes())
    if (inner.isWrite()) return Use::kWrite;
  return Use::kView;
}

// Compute the shapes of an operator, whose arguments are on a stack.
inline void compute_shapes(const c10::OperatorHandle& op, const std::string& name, torch::jit::Stack* stack) {
  using Key = c10::DispatchKey;
  if (name == "equal") {
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->push_back(value_of_hollow(name) != 0);
    return;
  }
  if (host_waits_for(name))
    fail("value", name, "a dry run computes no values, and so no shape that depends on them",
         "leave the operator out of the step, or put one of a fixed size in its place");
  at::AutoDispatchBelowADInplaceOrView below;
  // The computed kernel is always there, as a fallback of the meta device that raises.
  for (auto key : {Key::Meta, Key::CompositeExplicitAutograd, Key::CompositeExplicitAutogradNonFunctional, Key::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return op.redispatchBoxed(c10::DispatchKeySet(Key::Meta), stack);
  // Whatever returns nothing but what it wrote to, such as a fused optimizer, has no shape to compute.
  auto& schema = op.schema();
  torch::jit::Stack written;
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && written.size() < schema.returns().size()) written.push_back(arguments[i]);
  }
  for (auto& r : schema.returns())
    if (!r.alias_info() || !r.alias_info()->isWrite())
      fail("shape", name, "a dry run needs the meta kernel of each operator, which computes its shape",
           "register one with torch.library.register_fake, or put another operator in its place");
  for (auto& value : written) stack->push_back(std::move(value));
}

template <class F>
inline void for_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) f(value.toTensor());
  if (value.isList())
    for (const c10::IValue& inner : value.toListRef())
      if (inner.isTensor()) f(inner.toTensor());
}

// Compute any operator that has no kernel of its own here.
inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  jitter();
  const auto& schema = op.schema();
  auto name = schema.name();
  Call call(name.rfind("aten::", 0) == 0 ? name.substr(6) : name, python_stack());
  size_t base = stack->size() - schema.arguments().size();
  std::vector<size_t> generators;
  std::vector<bool> is_written;
  int named = -1;  // The device in the arguments of a factory, such as zeros().
  const bool is_hollow = state().hollow, is_described = state().speed.described;
  std::optional<Question> question;
  if (is_hollow) question.emplace(schema);
  for (size_t i = base; i < stack->size(); i++) {
    const auto& value = (*stack)[i];
    const auto& argument = schema.arguments()[i - base];
    auto use = use_of(argument, call.op);
    is_written.push_back(use == Use::kWrite);
    for_tensors(value, [&](const at::Tensor& t) {
      int place = call.use(t, use, argument.is_out());
      if (question) question->same_as(place);
    });
    if (value.isDevice() && value.toDevice().type() == kDeviceType) named = index_of(value.toDevice());
    if (question) question->put(value);
  }
  if (call.device < 0) call.device = named;
  TORCH_CHECK(call.device >= 0, call.op, ": no argument tells on which virtual device to compute");
  if (auto* known = question ? question->find() : nullptr) {
    call.begin();
    if (is_described) call.spend_described(known->work);
    if (known->draws) {
      auto given = std::find_if(stack->begin() + base, stack->end(), [](auto& value) { return value.isGenerator(); });
      draw(given == stack->end() ? c10::IValue() : *given, call.device);
    }
    torch::jit::drop(*stack, schema.arguments().size());
    for (auto& result : known->results) stack->push_back(call.repeat(result));
    return;
  }
  Work work;
  std::vector<c10::IValue> arguments;
  if (is_hollow || is_described) arguments.assign(stack->begin() + base, stack->end());
  for (size_t i = base; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    const auto& argument = schema.arguments()[i - base];
    if (value.isTensor()) {
      value = call.lower(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(call.lower(t));
      value = list;
    } else if (value.isList() && mentions(argument, "Tensor")) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& t : value.toListRef())
        list.push_back(t.isTensor() ? std::make_optional(call.lower(t.toTensor())) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      value = c10::Device(inner_device());
    } else if (mentions(argument, "Generator")) {
      generators.push_back(i);
    }
  }
  for (size_t i : generators) {
    auto& value = (*stack)[i];
    auto generator = value.isNone() ? default_generator(call.device) : value.toGenerator();
    if (generator.device().type() == kDeviceType) {
      TORCH_CHECK(generator.device().index() == call.device, call.op, ": expected a generator of virtual:",
                  call.device, " (found: ", generator.device(), ")");
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
    // Meta kernels take no generator of the CPU.
    if (is_hollow) {
      draw(value, call.device);
      value = c10::IValue();
    }
  }
  call.begin();
  double start = processor_time();
  is_hollow ? compute_shapes(op, call.op, stack) : compute(op, call.op, is_written, stack);
  call.spend_measured(processor_time() - start);
  size_t first = stack->size() - schema.returns().size();
  if (is_hollow || is_described) {
    for (size_t i = first; i < stack->size(); i++) for_tensors((*stack)[i], [&](const at::Tensor& t) { call.count(t); });
    work.bytes = call.bytes();
    bool has_result = first < stack->size() && stack->at(first).isTensor() && stack->at(first).toTensor().defined();
    auto output = has_result ? stack->at(first).toTensor() : at::Tensor();
    count_operations(work, schema, call.op, arguments, has_result ? output.sizes() : c10::IntArrayRef());
  }
  call.finish();
  if (is_described) call.spend_described(work);
  if (question && question->is_plain && !call.is_changed) {
    Known answer{{}, work, !generators.empty()};
    for (size_t i = first; i < stack->size(); i++)
      if (auto result = call.said((*stack)[i])) answer.results.push_back(*result);
    if (answer.results.size() == schema.returns().size()) question->keep(std::move(answer));
  }
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (call.op == "_pack_padded_sequence" && &value == &stack->back()) continue;  // The sizes stay on the host.
    if (value.isTensor()) {
      value = call.raise(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(call.raise(t));
      value = list;
    }
  }
}

}  // namespace virtual_accelerator
